//! The scheduler's decision for one step, as a value.

use std::ops::Range;

use crate::ids::{Micros, PageId, RequestId, SlotId, SnapshotId, StepId, TokenId};

/// One step: its rows, and what changed on the device since the last one.
///
/// A worker applies the changes in the order freed, new, trimmed, appended, restored, rows, saved.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The step's number. Numbers count up by one from 1; a group skips steps without rows.
    pub step: StepId,
    /// Slots whose request ended, was aborted or preempted. They travel with the next plan that has
    /// rows, because nothing on the device depends on them until then. A slot that is reused at
    /// once is here and in `new_slots`.
    pub freed_slots: Vec<SlotId>,
    /// Slots that take a request. Each has a prefill row in this plan.
    pub new_slots: Vec<NewSlot>,
    /// Slots that lose their last pages, which were leased for rejected draft tokens.
    pub trimmed_slots: Vec<TrimmedSlot>,
    /// Pages that slots gain, in the order of their positions. Those before the first token of the slot's row
    /// are shared: earlier steps fill them.
    pub appended_pages: Vec<(SlotId, PageId)>,
    /// The same for further cache kinds; empty for models with one kind.
    pub other_pages: Vec<OtherPage>,
    /// New slots whose state comes from snapshots; empty for models without slot state.
    pub restored_slots: Vec<RestoredSlot>,
    /// Slots whose state becomes a snapshot. Those of one slot are in the order of their positions.
    pub saved_slots: Vec<SavedSlot>,
    /// Prefill rows, in the scheduler's order.
    pub prefill: Vec<PrefillRow>,
    /// Decode rows, in the scheduler's order. They follow the prefill rows in the batch.
    pub decode: Vec<DecodeRow>,
    /// Tokens of the prefill rows, row after row (see [`PrefillRow::lookahead`]).
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

    /// Rows of prompts.
    pub fn num_prefill_rows(&self) -> u32 {
        u32::try_from(self.prefill.len()).expect("rows are bounded by max_rows")
    }

    /// Cached tokens that the prefill rows attend to.
    pub fn num_context_tokens(&self) -> u32 {
        let starts = self.prefill.iter().map(|row| row.start);
        starts.fold(0, u32::saturating_add)
    }

    /// Rows that decode.
    pub fn num_decode_rows(&self) -> u32 {
        u32::try_from(self.decode.len()).expect("rows are bounded by max_rows")
    }
}

/// A page of a further cache kind that a slot gains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherPage {
    /// Which kind, from 1.
    pub kind: u32,
    /// The slot that gains it.
    pub slot: SlotId,
    /// Its number in the kind's pool.
    pub page: PageId,
}

/// A new slot that begins with the state of a snapshot, where its first row starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoredSlot {
    /// Which slot.
    pub slot: SlotId,
    /// Which snapshot.
    pub snapshot: SnapshotId,
}

/// A slot whose state at a page boundary is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedSlot {
    /// Which slot.
    pub slot: SlotId,
    /// Tokens that the state covers: its row of this plan passes the position, or ends there.
    pub position: u32,
    /// Where it goes.
    pub snapshot: SnapshotId,
}

/// A slot that keeps the first pages of one kind and loses the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimmedSlot {
    /// Which kind, from 0.
    pub kind: u32,
    /// Which slot.
    pub slot: SlotId,
    /// Pages that it keeps.
    pub num_pages: u32,
}

/// A request that enters a slot.
#[derive(Clone, Debug, PartialEq)]
pub struct NewSlot {
    /// The slot. What it held before is void.
    pub slot: SlotId,
    /// The request that takes it.
    pub request: RequestId,
    /// Index of the next output token: 0, or more after a preemption.
    pub next_output: u32,
    /// Leading tokens whose KV is already in the slot's first pages. These are whole pages, which no row
    /// writes; the first row starts after them.
    pub num_cached: u32,
    /// Time from submit to admission; None after a preemption.
    pub waited: Option<Micros>,
}

/// A chunk of a request's prompt, and after a preemption of its output so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillRow {
    /// Which request.
    pub request: RequestId,
    /// The slot whose page table it uses.
    pub slot: SlotId,
    /// Position of the chunk's first token: where the slot's last chunk ended, or later. What lies between is
    /// in pages that other requests fill in earlier steps; they end where the chunk begins.
    pub start: u32,
    /// Tokens in the chunk, at least 1.
    pub length: u32,
    /// The chunk completes the prompt, and an output token is due. Only then is one sampled.
    pub is_last_chunk: bool,
    /// `token_ids` holds one more token of this row, which is not computed: the one after the
    /// chunk. Middle chunks have it if the request wants prompt log-probabilities or is pooled.
    pub lookahead: bool,
    /// Prompt positions whose log-probabilities this row reports; empty if not wanted. Never empty in a pooled prompt. No position
    /// is reported twice, even if a preempted prompt is computed twice. The row's records begin at
    /// `start + 1`; ignore those outside the range.
    pub prompt_logprobs: Range<u32>,
}

/// The next token of a request whose prompt is computed, and draft tokens after it. The worker holds
/// the tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeRow {
    /// Which request.
    pub request: RequestId,
    /// The slot with its page table and last token.
    pub slot: SlotId,
    /// Position of the first token. With drafts in flight it is an upper bound, as if all were accepted.
    /// Pages are leased up to `start + length`.
    pub start: u32,
    /// Tokens computed, and the most to accept: 1, or more with drafts.
    pub length: u32,
}
