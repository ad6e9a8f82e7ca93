//! Steps in flight, oldest first, and what their results free.

use std::collections::VecDeque;

use crate::event::{StepResult, UnexpectedResult};
use crate::ids::{SlotId, SnapshotId, StepId};
use crate::kv_cache::PerKind;
use crate::page_pool::ParkedPages;
use crate::replay::Trials;

/// The slot and pages of a request that has ended while steps in flight still use them.
#[derive(Clone, Debug)]
pub(crate) struct Parked {
    pub(crate) slot: SlotId,
    pub(crate) pages: PerKind<ParkedPages>,
    /// Snapshots that its rows in flight save.
    pub(crate) snapshots: Vec<SnapshotId>,
}

/// A row in flight that samples.
#[derive(Clone, Debug)]
pub(crate) struct SampledRow {
    pub(crate) slot: SlotId,
    /// The most tokens that it samples.
    pub(crate) num_sampled: u32,
    /// How many it may accept.
    possible: (u32, u32),
}

impl SampledRow {
    pub(crate) fn new(slot: SlotId, num_sampled: u32) -> Self {
        Self {
            slot,
            num_sampled,
            possible: (1, num_sampled),
        }
    }

    /// It accepts nothing if its mask is late.
    pub(crate) fn allow_late_mask(&mut self) {
        self.possible.0 = 0;
    }
}

/// One step in flight.
#[derive(Clone, Debug)]
pub(crate) struct InFlightStep {
    pub(crate) step: StepId,
    /// Rows that sample nothing: the slot, and the position after the row's last.
    pub(crate) chunks: Vec<(SlotId, u32)>,
    /// Rows that sample, in the plan's order.
    pub(crate) samples: Vec<SampledRow>,
    /// Snapshots that its new slots begin with.
    pub(crate) restored: Vec<SnapshotId>,
    /// Parked with this step, the last that uses them.
    pub(crate) parked: Vec<Parked>,
}

/// All steps in flight.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight {
    steps: VecDeque<InFlightStep>,
    /// Slots of the last plan's prefill rows, and where the rows end: their pages are still to be published.
    pub(crate) unpublished: Vec<(SlotId, u32)>,
    /// Requests with one step in flight at a time, of their own.
    pub(crate) trials: Trials,
}

impl InFlight {
    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    pub(crate) fn push(&mut self, step: InFlightStep) {
        self.steps.push_back(step);
    }

    /// Keeps a slot and its pages until the result of `step`.
    pub(crate) fn park(&mut self, step: StepId, parked: Parked) {
        let in_flight = self
            .steps
            .iter_mut()
            .find(|in_flight| in_flight.step == step);
        in_flight
            .expect("a request in flight has its last row in a step in flight")
            .parked
            .push(parked);
    }

    /// The mask of a slot's row was late: its rows in later steps, which follow a token that was not sampled,
    /// accept nothing.
    pub(crate) fn void_rows(&mut self, slot: SlotId) {
        let rows = self.steps.iter_mut().flat_map(|step| &mut step.samples);
        rows.filter(|row| row.slot == slot)
            .for_each(|row| row.possible = (0, 0));
    }

    /// Checks a result against the oldest step, and removes the step.
    pub(crate) fn complete(
        &mut self,
        result: &StepResult<'_>,
    ) -> Result<InFlightStep, UnexpectedResult> {
        let in_flight = self.steps.front().ok_or(UnexpectedResult::Step {
            given: result.step,
            expected: None,
        })?;
        check_fit(in_flight, result)?;
        Ok(self
            .steps
            .pop_front()
            .expect("the front was just looked at"))
    }
}

fn check_fit(in_flight: &InFlightStep, result: &StepResult<'_>) -> Result<(), UnexpectedResult> {
    let (step, expected) = (in_flight.step, in_flight.samples.len());
    if result.step != step {
        return Err(UnexpectedResult::Step {
            given: result.step,
            expected: Some(step),
        });
    }
    if result.num_accepted.len() != expected {
        return Err(UnexpectedResult::Rows {
            step,
            given: result.num_accepted.len(),
            expected,
        });
    }
    let rows = result.num_accepted.iter().zip(&in_flight.samples);
    for (row, (given, sampled)) in rows.enumerate() {
        let (least, most) = sampled.possible;
        if !(least..=most).contains(given) {
            return Err(UnexpectedResult::Accepted {
                step,
                row,
                given: *given,
                possible: least..=most,
            });
        }
    }
    let expected = result.num_accepted.iter().map(|num| *num as usize).sum();
    if result.token_ids.len() != expected {
        return Err(UnexpectedResult::Tokens {
            step,
            given: result.token_ids.len(),
            expected,
        });
    }
    Ok(())
}
