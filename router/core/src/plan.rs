//! The scheduler's decision for one step, as a value.

use std::ops::Range;

use crate::ids::{Micros, PageId, RequestId, SlotId, StepId, TokenId};

/// One step: rows, and what changed on the device since the last one.
///
/// A worker applies the parts in the order freed, new, trimmed, appended, rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Which step this is; steps count up by one from 1. A group passes over those in which nobody has rows.
    pub step: StepId,
    /// Slots whose request ended, was aborted or preempted. They travel with the next plan that has
    /// rows: nothing on the device depends on them until then. One that is taken again at once is
    /// here and in `new_slots`.
    pub freed_slots: Vec<SlotId>,
    /// Slots that take a request in this plan; each has a prefill row below.
    pub new_slots: Vec<NewSlot>,
    /// Slots that lose their last pages, which were leased for drafts that were not accepted.
    pub trimmed_slots: Vec<TrimmedSlot>,
    /// Pages that slots gain, in the order of their positions; a new slot's first ones may be shared with
    /// other slots (see [`NewSlot::num_cached`]).
    pub appended_pages: Vec<(SlotId, PageId)>,
    /// The same for cache kinds after the first; empty where a model has one kind.
    pub other_pages: Vec<OtherPage>,
    /// Prefill rows, in the scheduler's order.
    pub prefill: Vec<PrefillRow>,
    /// Decode rows, in the scheduler's order; they follow the prefill rows in the batch.
    pub decode: Vec<DecodeRow>,
    /// The tokens of the prefill rows, one row after the other (see [`PrefillRow::lookahead`]).
    pub token_ids: Vec<TokenId>,
}

impl Plan {
    /// Tokens that the step computes.
    pub fn num_tokens(&self) -> u32 {
        let num_decode_tokens: u32 = self.decode.iter().map(|row| row.length).sum();
        self.num_prefill_tokens() + num_decode_tokens
    }

    /// Tokens of the prefill rows.
    pub fn num_prefill_tokens(&self) -> u32 {
        self.prefill.iter().map(|row| row.length).sum()
    }

    /// Rows that decode.
    pub fn num_decode_rows(&self) -> u32 {
        u32::try_from(self.decode.len()).expect("rows are bounded by max_rows")
    }
}

/// A page of another cache kind than the first that a slot gains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherPage {
    /// Which kind, from 1.
    pub kind: u32,
    /// Whose page it becomes.
    pub slot: SlotId,
    /// Which page of the kind's pool.
    pub page: PageId,
}

/// A slot that keeps its first pages of one kind and loses the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimmedSlot {
    /// Which kind; 0 is the first.
    pub kind: u32,
    /// Whose pages.
    pub slot: SlotId,
    /// Pages that stay.
    pub num_pages: u32,
}

/// A request that enters a slot.
#[derive(Clone, Debug, PartialEq)]
pub struct NewSlot {
    /// The slot; whatever it held before is forgotten.
    pub slot: SlotId,
    /// Who takes it.
    pub request: RequestId,
    /// Index of the next output token: 0, or more after a preemption.
    pub next_output: u32,
    /// Leading tokens whose KV is in the slot's first pages already; whole pages, which nobody writes.
    /// Its first row starts behind them.
    pub num_cached: u32,
    /// How long the request waited from its submit; nothing where it comes back from a preemption.
    pub waited: Option<Micros>,
}

/// A chunk of a request's prompt (and, after a preemption, of its output so far).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillRow {
    /// Whose row it is.
    pub request: RequestId,
    /// Where the worker finds its pages.
    pub slot: SlotId,
    /// Position of the chunk's first token.
    pub start: u32,
    /// Tokens in the chunk, at least 1.
    pub length: u32,
    /// Nothing of the prompt is left after this chunk; only then is a token sampled.
    pub is_last_chunk: bool,
    /// The row's `token_ids` hold one more token, which is not computed: the one that follows the
    /// chunk. It is there for middle chunks of requests that want prompt log-probabilities.
    pub lookahead: bool,
    /// Positions of the prompt tokens whose log-probabilities this row reports: no position comes
    /// twice, though the worker computes a preempted prompt twice. Its records begin with the one of
    /// `start + 1`; those outside the range are to be ignored. Empty where nobody asked.
    pub prompt_logprobs: Range<u32>,
}

/// The next token of a request whose prompt has been computed, and drafts of those after it; the worker
/// holds the tokens themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeRow {
    /// Whose row it is.
    pub request: RequestId,
    /// Where the worker finds its pages and its last token.
    pub slot: SlotId,
    /// Position of the first token; with drafts on the wire an upper bound, as if all will be accepted.
    /// Pages are there up to `start + length`.
    pub start: u32,
    /// Tokens computed, and at most accepted: 1, or with drafts more.
    pub length: u32,
}
