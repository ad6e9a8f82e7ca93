//! What a result, an abort or a stop does to the requests.

use crate::event::{FinishReason, Output, StepResult, UnexpectedResult};
use crate::flight::Parked;
use crate::ids::{RequestId, SlotId, TokenId};
use crate::scheduler::{Place, Scheduler};
use crate::state::{Phase, Running};

impl Scheduler {
    /// Takes in the result of the oldest step on the wire; rows of requests that ended are dropped.
    pub(crate) fn land(
        &mut self,
        result: &StepResult<'_>,
        outputs: &mut Vec<Output>,
    ) -> Result<(), UnexpectedResult> {
        let flight = self.flights.land(result)?;
        if let Some(target) = &mut self.time_target {
            target.land(result.step);
        }
        for slot in flight.chunks {
            if let Some(running) = self.roster.get_mut(slot) {
                running.land_chunk();
                self.preempt_if_due(slot);
            }
        }
        for (sampled_row, (slot, token)) in
            (0..).zip(flight.samples.into_iter().zip(result.token_ids))
        {
            self.land_sample(slot, *token, sampled_row, outputs);
        }
        for parked in flight.parked {
            self.pages.unpark(parked.pages);
            self.roster.release_slot(parked.slot);
        }
        Ok(())
    }

    fn land_sample(
        &mut self,
        slot: SlotId,
        token: TokenId,
        sampled_row: u32,
        outputs: &mut Vec<Output>,
    ) {
        let Some(running) = self.roster.get_mut(slot) else {
            return;
        };
        let (tokens, end) = running.land_sample(token, sampled_row);
        outputs.push(tokens);
        match end {
            Some(reason) => self.finish(slot, reason, outputs),
            None => self.preempt_if_due(slot),
        }
    }

    /// Ends a request wherever it is.
    pub(crate) fn end(
        &mut self,
        request: RequestId,
        reason: FinishReason,
        outputs: &mut Vec<Output>,
    ) {
        match self.places.get(&request) {
            Some(Place::Slot(slot)) => self.finish(*slot, reason, outputs),
            Some(Place::Queue(order)) => {
                self.queue.remove(*order);
                self.places.remove(&request);
                outputs.push(Output::Finished { request, reason });
            }
            None => {}
        }
    }

    fn finish(&mut self, slot: SlotId, reason: FinishReason, outputs: &mut Vec<Output>) {
        let running = self.roster.unseat(slot);
        let request = running.job.id();
        self.places.remove(&request);
        self.free_or_park(running);
        outputs.push(Output::Finished { request, reason });
    }

    fn free_or_park(&mut self, running: Running) {
        self.freed_slots.push(running.slot);
        if running.is_in_flight() {
            let parked = Parked {
                slot: running.slot,
                pages: self.pages.park(running.lease),
            };
            self.flights.park(running.last_step, parked);
        } else {
            self.pages.release(running.lease);
            self.roster.release_slot(running.slot);
        }
    }

    /// Takes a request with nothing in flight out of its slot and back to the queue.
    pub(crate) fn preempt(&mut self, slot: SlotId) {
        let (queued, lease, slot) = self.roster.unseat(slot).preempt();
        self.pages.release(lease);
        self.roster.release_slot(slot);
        self.freed_slots.push(slot);
        self.counts.num_preemptions += 1;
        self.enqueue(queued);
    }

    fn preempt_if_due(&mut self, slot: SlotId) {
        let running = self.roster.seated(slot);
        if running.phase == Phase::Held && !running.is_in_flight() {
            self.preempt(slot);
        }
    }
}
