//! From a `PlanBuilder` to a plan in flight.

use crate::ids::{StepId, TokenId};
use crate::in_flight::InFlightStep;
use crate::plan::{DecodeRow, Plan, PrefillRow};
use crate::plan_builder::PlanBuilder;
use crate::scheduler::Scheduler;
use crate::state::Order;

impl Scheduler {
    /// Puts the plan in flight, with its rows in order and every change since the last plan.
    pub(crate) fn launch(&mut self, builder: PlanBuilder) -> Plan {
        let prefill: Vec<PrefillRow> = in_order(builder.prefill);
        let decode: Vec<DecodeRow> = in_order(builder.decode);
        self.in_flight
            .push(in_flight_step(&prefill, &decode, builder.step));
        self.last_step = builder.step;
        let ends = prefill.iter().map(|row| (row.slot, row.start + row.length));
        self.in_flight.unpublished.extend(ends);
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
            token_ids: self.tokens_of(&prefill),
            prefill,
            decode,
        }
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

/// The round-robin order rotates slowly. Rows come as a few sorted runs, which a stable sort only merges.
fn in_order<Row>(mut rows: Vec<(Order, Row)>) -> Vec<Row> {
    rows.sort_by_key(|(order, _)| *order);
    rows.into_iter().map(|(_, row)| row).collect()
}

fn in_flight_step(prefill: &[PrefillRow], decode: &[DecodeRow], step: StepId) -> InFlightStep {
    let (last, middle): (Vec<_>, Vec<_>) = prefill.iter().partition(|row| row.is_last_chunk);
    let decoders = decode.iter().map(|row| (row.slot, row.length));
    InFlightStep {
        step,
        chunks: middle
            .into_iter()
            .map(|row| (row.slot, row.start + row.length))
            .collect(),
        samples: last
            .into_iter()
            .map(|row| (row.slot, 1))
            .chain(decoders)
            .collect(),
        parked: Vec::new(),
    }
}
