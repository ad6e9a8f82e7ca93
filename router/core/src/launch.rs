//! From a draft to a plan on the wire.

use crate::draft::Draft;
use crate::flight::Flight;
use crate::ids::{StepId, TokenId};
use crate::plan::{DecodeRow, Plan, PrefillRow};
use crate::scheduler::Scheduler;
use crate::state::Order;

impl Scheduler {
    /// Puts the draft on the wire: its rows in order, and everything that changed since the last plan.
    pub(crate) fn launch(&mut self, draft: Draft) -> Plan {
        let prefill: Vec<PrefillRow> = in_order(draft.prefill);
        let decode: Vec<DecodeRow> = in_order(draft.decode);
        self.flights
            .launch(flight_of(&prefill, &decode, draft.step));
        self.last_step = draft.step;
        if let Some(target) = &mut self.time_target {
            target.launch(draft.step, draft.work);
        }
        Plan {
            step: draft.step,
            freed_slots: std::mem::take(&mut self.freed_slots),
            new_slots: draft.new_slots,
            trimmed_slots: std::mem::take(&mut self.trimmed_slots),
            appended_pages: draft.appended_pages,
            token_ids: self.tokens_of(&prefill),
            prefill,
            decode,
        }
    }

    fn tokens_of(&self, rows: &[PrefillRow]) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        for row in rows {
            let end = row.start + row.length + u32::from(row.lookahead);
            self.roster
                .seated(row.slot)
                .job
                .extend_with_tokens(&mut tokens, row.start, end);
        }
        tokens
    }
}

/// Turns rotate slowly, so the rows come as a few sorted runs, which a stable sort only merges.
fn in_order<Row>(mut rows: Vec<(Order, Row)>) -> Vec<Row> {
    rows.sort_by_key(|(order, _)| *order);
    rows.into_iter().map(|(_, row)| row).collect()
}

fn flight_of(prefill: &[PrefillRow], decode: &[DecodeRow], step: StepId) -> Flight {
    let (last, middle): (Vec<_>, Vec<_>) = prefill.iter().partition(|row| row.is_last_chunk);
    let decoders = decode.iter().map(|row| (row.slot, row.length));
    Flight {
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
