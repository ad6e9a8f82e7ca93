//! What a step computes, in terms that its time is nearly linear in.

use crate::least_squares::Terms;
use crate::plan::Plan;

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Tokens of its prefill rows.
    pub num_prefill_tokens: u64,
    /// Pairs of a prefill token and a KV token that it attends to.
    pub num_prefill_pairs: u64,
    /// Its decode rows.
    pub num_decode_rows: u64,
    /// KV tokens that its decode rows read.
    pub num_decode_kv_tokens: u64,
}

/// Which rows a step has. Each kind may run other kernels, or in a graph or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkKind {
    Decode,
    Mixed,
    Prefill,
}

impl StepWork {
    /// The work of a plan.
    pub fn of(plan: &Plan) -> Self {
        let mut work = Self::default();
        for row in &plan.prefill {
            work.add_prefill(row.start, row.length);
        }
        for row in &plan.decode {
            work.add_decode(row.start);
        }
        work
    }

    /// Adds a chunk of `length` tokens whose first is at position `start`.
    pub fn add_prefill(&mut self, start: u32, length: u32) {
        let (start, length) = (u64::from(start), u64::from(length));
        self.num_prefill_tokens += length;
        self.num_prefill_pairs += length * start + length * (length + 1) / 2;
    }

    /// Adds a decode row at position `start`.
    pub fn add_decode(&mut self, start: u32) {
        self.num_decode_rows += 1;
        self.num_decode_kv_tokens += u64::from(start) + 1;
    }

    /// The same without its prefill rows.
    pub(crate) fn decode_part(&self) -> Self {
        Self {
            num_prefill_tokens: 0,
            num_prefill_pairs: 0,
            ..*self
        }
    }

    pub(crate) fn kind(&self) -> WorkKind {
        match (self.num_decode_rows > 0, self.num_prefill_tokens > 0) {
            (true, true) => WorkKind::Mixed,
            (false, true) => WorkKind::Prefill,
            (_, false) => WorkKind::Decode,
        }
    }

    /// The step itself, and what it computes: what [`crate::StepCost`] has coefficients of.
    pub(crate) fn terms(&self) -> Terms {
        [
            1,
            self.num_prefill_tokens,
            self.num_prefill_pairs,
            self.num_decode_rows,
            self.num_decode_kv_tokens,
        ]
        .map(|count| count as f64)
    }
}
