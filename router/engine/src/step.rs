//! A step in flight: its plan as frames, and what its result is read with.

use std::time::Duration;

use plait_core::{Decision, Plan, RequestId, StepWork, TokenId};
use plait_proto::{
    Adjustment, AppendedPage, DecodeRow, NewSlot, OtherPage, PageKind, PlanEncoder, PooledSlot,
    PrefillRow, RestoredSlot, SamplingParams, SavedSlot, ScoredId, TrimmedSlot,
};

use crate::group::decision_to_wire;
use crate::masks::AwaitingRow;
use crate::metrics::StepKind;

/// What a step's result is read with.
#[derive(Debug)]
pub struct StepInFlight {
    /// Its number.
    pub step: u64,
    /// Which rows it has; None for a dummy row.
    pub kind: Option<StepKind>,
    /// What it computes.
    pub work: StepWork,
    /// Its result is overdue so long after the worker could begin it.
    pub limit: Duration,
    /// For each row that samples, how many best tokens come with its log-probabilities (None: no
    /// record). Empty where no request asked.
    pub sampled: Vec<Option<u32>>,
    /// Prefill rows whose prompt log-probabilities come with the result.
    pub measured: Vec<MeasuredRow>,
    /// Requests whose pooled prompts end with this step, in row order.
    pub pooled: Vec<RequestId>,
    /// Rows that await masks, until these are sent.
    pub awaiting: Vec<AwaitingRow>,
    /// Rows that must accept nothing.
    pub left_out: Vec<u32>,
    /// The worker's device has nothing to do until the masks come.
    pub forward_is_done: bool,
}

/// A prefill row of a request that wants prompt log-probabilities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredRow {
    /// Whose.
    pub request: RequestId,
    /// Best tokens in each record.
    pub num_top: u32,
    /// Position of the first record's token.
    pub first_position: u32,
    /// Records that the worker sends.
    pub num_records: u32,
    /// Positions whose records are new.
    pub wanted: std::ops::Range<u32>,
}

impl StepInFlight {
    /// A step with its limit; the caller fills in the rows that want log-probabilities.
    pub fn new(plan: &Plan, limit: Duration) -> Self {
        Self {
            step: plan.step.0,
            kind: StepKind::of(!plan.prefill.is_empty(), !plan.decode.is_empty()),
            work: StepWork::of(plan),
            limit,
            sampled: Vec::new(),
            measured: Vec::new(),
            pooled: Vec::new(),
            awaiting: Vec::new(),
            left_out: Vec::new(),
            forward_is_done: false,
        }
    }
}

impl StepInFlight {
    /// A row that was left out, and accepted something or is not there.
    pub fn sampled_though_left_out(&self, num_accepted: &[u32]) -> Option<u32> {
        let sampled = |row: &u32| num_accepted.get(*row as usize) != Some(&0);
        self.left_out.iter().copied().find(sampled)
    }
}

impl MeasuredRow {
    /// A prefill row of a request that wants `num_top` best tokens beside each prompt token.
    pub fn new(row: &plait_core::PrefillRow, num_top: u32) -> Self {
        Self {
            request: row.request,
            num_top,
            first_position: row.start + 1,
            num_records: row.length - 1 + u32::from(row.lookahead),
            wanted: row.prompt_logprobs.clone(),
        }
    }
}

/// A plan's new slots with what their requests ask for.
#[derive(Debug, Default)]
pub struct NewSlots {
    /// With their sampling parameters.
    pub slots: Vec<NewSlot>,
    /// Of those that change their logits.
    pub adjustments: Vec<Adjustment>,
    /// Of those that name tokens to score.
    pub scored_ids: Vec<ScoredId>,
    /// Of those whose prompts are pooled.
    pub pooled: Vec<PooledSlot>,
}

/// Turns plans into frames, in buffers that it keeps.
#[derive(Debug, Default)]
pub struct PlanWriter {
    plan: plait_proto::Plan,
    encoder: PlanEncoder,
}

impl PlanWriter {
    /// The plan's frames, the same for every rank; in a group with its decision.
    pub fn write(
        &mut self,
        plan: &Plan,
        new_slots: NewSlots,
        decision: Option<&Decision>,
        awaits_masks: bool,
    ) -> &[Vec<u8>] {
        let wire = &mut self.plan;
        wire.adjustments = new_slots.adjustments;
        wire.scored_ids = new_slots.scored_ids;
        wire.pooled_slots = new_slots.pooled;
        wire.step = plan.step.0;
        wire.awaits_masks = awaits_masks;
        wire.decision = decision.map(decision_to_wire);
        wire.new_slots = new_slots.slots;
        refill(&mut wire.prefill, &plan.prefill, prefill_row);
        refill(&mut wire.decode, &plan.decode, |row| DecodeRow {
            slot: row.slot.0,
            start: row.start,
            length: row.length,
        });
        refill(&mut wire.token_ids, &plan.token_ids, TokenId::clone);
        refill(
            &mut wire.appended_pages,
            &plan.appended_pages,
            |(slot, page)| AppendedPage {
                slot: slot.0,
                page: page.0,
            },
        );
        refill(&mut wire.other_pages, &plan.other_pages, |other| {
            OtherPage {
                kind: other.kind,
                slot: other.slot.0,
                page: other.page.0,
            }
        });
        refill(&mut wire.trimmed_slots, &plan.trimmed_slots, |trimmed| {
            TrimmedSlot {
                kind: trimmed.kind,
                slot: trimmed.slot.0,
                num_pages: trimmed.num_pages,
            }
        });
        refill(&mut wire.restored_slots, &plan.restored_slots, |it| {
            RestoredSlot {
                slot: it.slot.0,
                snapshot: it.snapshot.0,
            }
        });
        refill(&mut wire.saved_slots, &plan.saved_slots, |it| SavedSlot {
            slot: it.slot.0,
            position: it.position,
            snapshot: it.snapshot.0,
        });
        refill(&mut wire.freed_slots, &plan.freed_slots, |slot| slot.0);
        self.encoder.encode(wire)
    }
}

fn refill<From, To>(to: &mut Vec<To>, from: &[From], convert: impl Fn(&From) -> To) {
    to.clear();
    to.extend(from.iter().map(convert));
}

fn prefill_row(row: &plait_core::PrefillRow) -> PrefillRow {
    PrefillRow {
        slot: row.slot.0,
        start: row.start,
        length: row.length,
        is_last_chunk: row.is_last_chunk,
        lookahead: row.lookahead,
    }
}

/// Tokens of the warm-up's only chunk.
const WARM_UP_TOKENS: u32 = 2;

/// Step 0: one greedy slot and one chunk, so that the first real step finds everything warm.
pub fn warm_up(page_size: u32, other_kinds: &[PageKind]) -> plait_proto::Plan {
    let slot = 0;
    let pages = |page_size: u32| 0..WARM_UP_TOKENS.div_ceil(page_size);
    let kinds = (1..).zip(other_kinds);
    let other_pages = kinds.flat_map(|(kind, of_kind)| {
        pages(of_kind.page_size).map(move |page| OtherPage { kind, slot, page })
    });
    plait_proto::Plan {
        step: 0,
        new_slots: vec![NewSlot {
            slot,
            next_output: 0,
            sampling: SamplingParams {
                temperature: 0.0,
                ..SamplingParams::default()
            },
        }],
        prefill: vec![PrefillRow {
            slot,
            start: 0,
            length: WARM_UP_TOKENS,
            is_last_chunk: true,
            lookahead: false,
        }],
        token_ids: vec![0; WARM_UP_TOKENS as usize],
        appended_pages: pages(page_size)
            .map(|page| AppendedPage { slot, page })
            .collect(),
        other_pages: other_pages.collect(),
        ..plait_proto::Plan::default()
    }
}
