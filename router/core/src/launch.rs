//! From a `PlanBuilder` to a plan in flight.

use rustc_hash::FxHashSet;

use crate::ids::{SlotId, StepId, TokenId};
use crate::in_flight::{InFlightStep, SampledRow};
use crate::plan::{DecodeRow, Plan, PrefillRow};
use crate::plan_builder::PlanBuilder;
use crate::scheduler::Scheduler;
use crate::state::Order;

impl Scheduler {
    /// Puts the plan in flight, with its rows in order and every change since the last plan.
    pub(crate) fn launch(&mut self, builder: PlanBuilder) -> Plan {
        let prefill: Vec<PrefillRow> = in_order(builder.prefill);
        let decode: Vec<DecodeRow> = in_order(builder.decode);
        let mut step = in_flight_step(&prefill, &decode, builder.step);
        if !self.cache.keeps_slot_state() {
            let ends = prefill.iter().map(|row| (row.slot, row.start + row.length));
            self.in_flight.unpublished.extend(ends);
        }
        let restored = builder.restored_slots.iter();
        step.restored.extend(restored.map(|it| it.snapshot));
        if !builder.masked.is_empty() {
            self.expect_late_masks(&mut step, &builder.masked);
        }
        self.in_flight.push(step);
        self.last_step = builder.step;
        self.note_missed_target(&builder.work);
        self.pacing.launch(builder.step, builder.work);
        self.outlook.decay();
        Plan {
            step: builder.step,
            freed_slots: std::mem::take(&mut self.slot_changes.freed),
            new_slots: builder.new_slots,
            trimmed_slots: std::mem::take(&mut self.slot_changes.trimmed),
            appended_pages: builder.appended_pages,
            other_pages: builder.other_pages,
            restored_slots: builder.restored_slots,
            saved_slots: builder.saved_slots,
            token_ids: self.tokens_of(&prefill),
            prefill,
            decode,
        }
    }

    /// Rows of masked requests may accept nothing. Then a last chunk's last token is computed again, so the page
    /// that it fills is not published before.
    fn expect_late_masks(&mut self, step: &mut InFlightStep, masked: &FxHashSet<SlotId>) {
        let rows = step.samples.iter_mut();
        rows.filter(|row| masked.contains(&row.slot))
            .for_each(SampledRow::allow_late_mask);
        let ends = self.in_flight.unpublished.iter_mut();
        ends.filter(|(slot, _)| masked.contains(slot))
            .for_each(|(_, end)| *end -= 1);
    }

    fn tokens_of(&self, rows: &[PrefillRow]) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        for row in rows {
            let end = row.start + row.length + u32::from(row.lookahead);
            self.running
                .at(row.slot)
                .job
                .extend_with_tokens(&mut tokens, row.start, end);
        }
        tokens
    }
}

/// The round-robin order rotates slowly. Rows come sorted, or as a few sorted runs, which a stable sort only merges.
fn in_order<Row>(mut rows: Vec<(Order, Row)>) -> Vec<Row> {
    if !rows.is_sorted_by_key(|(order, _)| *order) {
        rows.sort_by_key(|(order, _)| *order);
    }
    rows.into_iter().map(|(_, row)| row).collect()
}

fn in_flight_step(prefill: &[PrefillRow], decode: &[DecodeRow], step: StepId) -> InFlightStep {
    let (last, middle): (Vec<_>, Vec<_>) = prefill.iter().partition(|row| row.is_last_chunk);
    let decoders = decode
        .iter()
        .map(|row| SampledRow::new(row.slot, row.length));
    InFlightStep {
        step,
        chunks: middle
            .into_iter()
            .map(|row| (row.slot, row.start + row.length))
            .collect(),
        samples: last
            .into_iter()
            .map(|row| SampledRow::new(row.slot, 1))
            .chain(decoders)
            .collect(),
        restored: Vec::new(),
        parked: Vec::new(),
    }
}
