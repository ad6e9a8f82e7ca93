//! What is measured while a replica runs. Measurements of replicas add up.

use std::collections::BTreeMap;

use plait_core::{Micros, Plan};

/// Intervals from the trace's start to its last arrival. What comes after takes as many more as needed.
const NUM_BINS: u64 = 240;

/// All measurements.
#[derive(Clone, Debug)]
pub struct RunMetrics {
    /// What each tenant asked for and got.
    pub tenants: BTreeMap<u32, TenantMetrics>,
    /// Microseconds from each request's arrival to its last token.
    pub e2e: Vec<u64>,
    /// When the last token came.
    pub end: Micros,
    /// Counts of the whole run.
    pub counts: RunCounts,
    /// Counts over time.
    pub bins: Bins,
}

/// What one tenant asked for and got.
#[derive(Clone, Debug, Default)]
pub struct TenantMetrics {
    /// Microseconds from each request's arrival to its first token.
    pub ttft: Vec<u64>,
    /// Microseconds between tokens of one request.
    pub itl: Vec<u64>,
    /// Requests that arrived.
    pub num_requests: u64,
    /// Rejected requests.
    pub num_refused: u64,
    /// Prompt and output tokens of the requests that arrived.
    pub num_asked_tokens: u64,
    /// Prompts with a first token, and output tokens, up to the last arrival.
    pub num_served_tokens: u64,
}

/// Counts that add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Requests that arrived.
    pub num_requests: u64,
    /// Rejected requests.
    pub num_refused: u64,
    /// Rejected requests that exceed the context or the pool.
    pub num_too_long: u64,
    /// Output tokens.
    pub num_output_tokens: u64,
    /// Tokens of admitted prompts.
    pub num_prompt_tokens: u64,
    /// Those that were cached.
    pub num_hit_tokens: u64,
    /// Prefill tokens that were computed.
    pub num_prefill_tokens: u64,
    /// Those of them that a preemption made necessary.
    pub num_recomputed_tokens: u64,
    /// Preemptions.
    pub num_preemptions: u64,
    /// Prefills that went first because they had waited too long.
    pub num_starvation_grants: u64,
    /// Steps that only prefill.
    pub num_prefill_steps: u64,
    /// Steps that only decode.
    pub num_decode_steps: u64,
    /// Steps that do both.
    pub num_mixed_steps: u64,
}

/// Steps that begin in one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bin {
    /// Prefill tokens.
    pub num_prefill_tokens: u64,
    /// Decode rows.
    pub num_decode_rows: u64,
    /// Microseconds in prefill, decode and mixed steps.
    pub busy: [u64; 3],
}

/// Counts over time, in intervals of equal width.
#[derive(Clone, Debug)]
pub struct Bins {
    /// Microseconds.
    pub width: u64,
    /// The intervals.
    pub bins: Vec<Bin>,
}

/// The kind of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepKind {
    Prefill,
    Decode,
    Mixed,
}

impl RunMetrics {
    /// Empty measurements of a trace whose last request arrives at `last`.
    pub fn new(last: Micros) -> Self {
        let width = (last.0 / NUM_BINS).max(10_000);
        let bins = Bins {
            width,
            bins: Vec::new(),
        };
        Self {
            tenants: BTreeMap::new(),
            e2e: Vec::new(),
            end: Micros(0),
            counts: RunCounts::default(),
            bins,
        }
    }

    /// Adds a step that begins at `start`.
    pub fn step(&mut self, plan: &Plan, start: Micros, elapsed: Micros) {
        let kind = match (plan.prefill.is_empty(), plan.decode.is_empty()) {
            (false, true) => StepKind::Prefill,
            (true, false) => StepKind::Decode,
            _ => StepKind::Mixed,
        };
        let counts = &mut self.counts;
        match kind {
            StepKind::Prefill => counts.num_prefill_steps += 1,
            StepKind::Decode => counts.num_decode_steps += 1,
            StepKind::Mixed => counts.num_mixed_steps += 1,
        }
        counts.num_hit_tokens += num_hits(plan);
        let bin = self.bins.at(start);
        bin.num_prefill_tokens += u64::from(plan.num_prefill_tokens());
        bin.num_decode_rows += u64::from(plan.num_decode_rows());
        self.bins.add_busy(kind, start, elapsed);
    }

    /// Adds another replica's measurements.
    pub fn add(&mut self, other: Self) {
        for (tenant, metrics) in other.tenants {
            self.tenants.entry(tenant).or_default().add(metrics);
        }
        self.e2e.extend(other.e2e);
        self.end = self.end.max(other.end);
        self.counts.add(&other.counts);
        self.bins.add(&other.bins);
    }
}

impl TenantMetrics {
    fn add(&mut self, other: Self) {
        self.ttft.extend(other.ttft);
        self.itl.extend(other.itl);
        self.num_requests += other.num_requests;
        self.num_refused += other.num_refused;
        self.num_asked_tokens += other.num_asked_tokens;
        self.num_served_tokens += other.num_served_tokens;
    }
}

/// Cached tokens of newly admitted requests: where their first chunks begin.
fn num_hits(plan: &Plan) -> u64 {
    let first_chunks = plan
        .new_slots
        .iter()
        .filter(|new| new.waited.is_some())
        .filter_map(|new| plan.prefill.iter().find(|row| row.slot == new.slot));
    first_chunks.map(|row| u64::from(row.start)).sum()
}

impl RunCounts {
    fn add(&mut self, other: &Self) {
        self.num_requests += other.num_requests;
        self.num_refused += other.num_refused;
        self.num_too_long += other.num_too_long;
        self.num_output_tokens += other.num_output_tokens;
        self.num_prompt_tokens += other.num_prompt_tokens;
        self.num_hit_tokens += other.num_hit_tokens;
        self.num_prefill_tokens += other.num_prefill_tokens;
        self.num_recomputed_tokens += other.num_recomputed_tokens;
        self.num_preemptions += other.num_preemptions;
        self.num_starvation_grants += other.num_starvation_grants;
        self.num_prefill_steps += other.num_prefill_steps;
        self.num_decode_steps += other.num_decode_steps;
        self.num_mixed_steps += other.num_mixed_steps;
    }

    /// Steps of all kinds.
    pub fn num_steps(&self) -> u64 {
        self.num_prefill_steps + self.num_decode_steps + self.num_mixed_steps
    }

    /// Share of mixed steps; 0 without steps.
    pub fn mixed_share(&self) -> f64 {
        ratio(self.num_mixed_steps, self.num_steps())
    }

    /// Share of admitted prompt tokens that were cached; 0 without prompts.
    pub fn prefix_hit_ratio(&self) -> f64 {
        ratio(self.num_hit_tokens, self.num_prompt_tokens)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

impl Bins {
    fn at(&mut self, time: Micros) -> &mut Bin {
        let index = usize::try_from(time.0 / self.width).expect("as many spans as steps at most");
        if index >= self.bins.len() {
            self.bins.resize(index + 1, Bin::default());
        }
        &mut self.bins[index]
    }

    /// Spreads a step's time over the intervals that it touches.
    fn add_busy(&mut self, kind: StepKind, start: Micros, elapsed: Micros) {
        let (mut now, end) = (start.0, start.0.saturating_add(elapsed.0));
        while now < end {
            let next = end.min((now / self.width + 1) * self.width);
            self.at(Micros(now)).busy[kind as usize] += next - now;
            now = next;
        }
    }

    fn add(&mut self, other: &Self) {
        let num_bins = self.bins.len().max(other.bins.len());
        self.bins.resize(num_bins, Bin::default());
        for (bin, other) in self.bins.iter_mut().zip(&other.bins) {
            bin.num_prefill_tokens += other.num_prefill_tokens;
            bin.num_decode_rows += other.num_decode_rows;
            for (busy, other) in bin.busy.iter_mut().zip(other.busy) {
                *busy += other;
            }
        }
    }
}
