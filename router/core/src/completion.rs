//! What a result, an abort or a stop does to requests.

use crate::event::{FinishReason, Output, StepResult, UnexpectedResult};
use crate::ids::{RequestId, SlotId, TokenId};
use crate::in_flight::Parked;
use crate::scheduler::{Location, Scheduler};
use crate::state::{Job, Phase, Running};

/// What one row sampled.
#[derive(Clone, Copy)]
struct Sample<'a> {
    accepted: &'a [TokenId],
    /// The most tokens that it could accept.
    num_sampled: u32,
    /// Index among the step's sampling rows.
    sampled_row: u32,
}

impl Sample<'_> {
    fn num_accepted(&self) -> u32 {
        u32::try_from(self.accepted.len()).expect("no more than was planned")
    }
}

impl Scheduler {
    /// Takes the result of the oldest step in flight. Rows of requests that have ended are dropped.
    pub(crate) fn complete(
        &mut self,
        result: &StepResult<'_>,
        outputs: &mut Vec<Output>,
    ) -> Result<(), UnexpectedResult> {
        let completed = self.in_flight.complete(result)?;
        self.pacing.times.complete(result.step);
        for (slot, end) in completed.chunks {
            self.complete_chunk(slot, end, outputs);
        }
        let mut rest = result.token_ids;
        let samples = completed.samples.into_iter().zip(result.num_accepted);
        for (sampled_row, (row, num_accepted)) in (0..).zip(samples) {
            let (accepted, others) = rest.split_at(*num_accepted as usize);
            rest = others;
            let sample = Sample {
                accepted,
                num_sampled: row.num_sampled,
                sampled_row,
            };
            self.complete_sample(row.slot, sample, outputs);
        }
        for parked in completed.parked {
            self.cache.unpark(parked.pages);
            self.running.release_slot(parked.slot);
        }
        Ok(())
    }

    fn complete_chunk(&mut self, slot: SlotId, end: u32, outputs: &mut Vec<Output>) {
        let Some(running) = self.running.get_mut(slot) else {
            return;
        };
        if running.complete_chunk(end) {
            self.finish(slot, FinishReason::Length, outputs);
        } else {
            self.preempt_if_due(slot);
        }
    }

    fn complete_sample(&mut self, slot: SlotId, sample: Sample<'_>, outputs: &mut Vec<Output>) {
        let Some(running) = self.running.get_mut(slot) else {
            return;
        };
        self.in_flight.trials.end(&mut running.job);
        if sample.accepted.is_empty() {
            running.leave_out(sample.num_sampled);
            return self.await_mask(slot);
        }
        let num_before = running.job.num_output();
        let (tokens, end) =
            running.complete_sample(sample.accepted, sample.num_sampled, sample.sampled_row);
        let num_computed = running.num_computed;
        for num in num_before + 1..=running.job.num_output() {
            self.outlook.lengths.observe_token(num);
        }
        outputs.push(tokens);
        self.publish(slot, num_computed);
        if let Some(reason) = end {
            return self.finish(slot, reason, outputs);
        }
        if sample.num_accepted() < sample.num_sampled {
            self.reject_draft_tokens(slot);
        }
        self.preempt_if_due(slot);
    }

    /// A row's mask was late, or that of the row before it. The request gets its next row when the mask is there
    /// and nothing of it is in flight.
    fn await_mask(&mut self, slot: SlotId) {
        self.in_flight.void_rows(slot);
        self.running.await_mask(slot);
        self.running.resume_with_mask(slot);
        self.preempt_if_due(slot);
    }

    /// The mask is there that a row lacked.
    pub(crate) fn note_mask(&mut self, request: RequestId) {
        match self.locations.get(&request) {
            Some(Location::Slot(slot)) => {
                self.running.at_mut(*slot).job.has_late_mask = true;
                self.running.resume_with_mask(*slot);
            }
            Some(Location::Queue(_)) | None => {}
        }
    }

    /// Makes rejected draft tokens due again and frees their pages.
    fn reject_draft_tokens(&mut self, slot: SlotId) {
        self.running.resume_decoding(slot);
        self.running
            .trim(slot, &mut self.cache, &mut self.slot_changes.trimmed);
    }

    /// Ends a request, wherever it is.
    pub(crate) fn end(
        &mut self,
        request: RequestId,
        reason: FinishReason,
        outputs: &mut Vec<Output>,
    ) {
        match self.locations.get(&request) {
            Some(Location::Slot(slot)) => self.finish(*slot, reason, outputs),
            Some(Location::Queue(key)) => {
                let queued = self.queue.remove(*key);
                let queued = queued.expect("locations name queued requests only");
                self.forget(queued.job());
                self.note_idle();
                outputs.push(Output::Finished { request, reason });
            }
            None => {}
        }
    }

    fn finish(&mut self, slot: SlotId, reason: FinishReason, outputs: &mut Vec<Output>) {
        let running = self.running.remove(slot);
        let request = running.job.id();
        if reason != FinishReason::Abort {
            self.outlook.observe_end(&running.job);
        }
        self.forget(&running.job);
        self.free_or_park(running);
        self.note_idle();
        outputs.push(Output::Finished { request, reason });
    }

    /// Time in which nothing runs or waits tells nothing of how fast requests are served.
    pub(crate) fn note_idle(&mut self) {
        if self.running.is_empty() && self.queue.is_empty() {
            self.outlook.served.observe_idle();
        }
    }

    /// A request has ended.
    pub(crate) fn forget(&mut self, job: &Job) {
        self.locations.remove(&job.id());
        self.in_flight.trials.forget(job.order);
        if let Some(fair_share) = &mut self.queue.fair_share {
            fair_share.leave(job.tenant());
        }
        self.leave_choices(job);
    }

    fn free_or_park(&mut self, running: Running) {
        self.free_slot(running.slot);
        if running.is_in_flight() {
            let parked = Parked {
                slot: running.slot,
                pages: self.cache.park(running.lease, running.job.tenant()),
            };
            self.in_flight.park(running.last_step, parked);
        } else {
            self.cache.release(running.lease, running.job.tenant());
            self.running.release_slot(running.slot);
        }
    }

    fn free_slot(&mut self, slot: SlotId) {
        self.slot_changes.freed.push(slot);
        self.slot_changes
            .trimmed
            .retain(|trimmed| trimmed.slot != slot);
    }

    /// Moves a request with nothing in flight from its slot back to the queue.
    pub(crate) fn preempt(&mut self, slot: SlotId) {
        let (queued, lease, slot) = self.running.remove(slot).preempt();
        self.cache.release(lease, queued.job().tenant());
        self.running.release_slot(slot);
        self.free_slot(slot);
        self.counts.num_preemptions += 1;
        self.enqueue(queued);
    }

    fn preempt_if_due(&mut self, slot: SlotId) {
        let running = self.running.at(slot);
        if running.phase == Phase::Held && !running.is_in_flight() {
            self.preempt(slot);
        }
    }
}
