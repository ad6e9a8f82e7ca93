//! What a result, an abort or a stop does to requests.

use crate::event::{FAILED_ROW, FinishReason, Output, StepResult, UnexpectedResult};
use crate::ids::{RequestId, SlotId, StepId, TokenId};
use crate::in_flight::Parked;
use crate::scheduler::{Location, Scheduler};
use crate::slot_saves::SlotSaves;
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
        let step = completed.step;
        for snapshot in completed.restored {
            self.cache.unpin_snapshot(snapshot);
        }
        for (slot, end) in completed.chunks {
            self.complete_chunk(slot, step, end, outputs);
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
            self.complete_sample(row.slot, step, sample, outputs);
        }
        for parked in completed.parked {
            self.cache.unpark(parked.pages);
            self.cache.unpark_snapshots(parked.snapshots);
            self.running.release_slot(parked.slot);
        }
        Ok(())
    }

    fn complete_chunk(&mut self, slot: SlotId, step: StepId, end: u32, outputs: &mut Vec<Output>) {
        let Some(running) = self.running.get_mut(slot) else {
            return;
        };
        let start = running.num_computed;
        let has_ended = running.complete_chunk(end);
        if self.cache.keeps_slot_state() {
            self.publish(slot, end);
            self.complete_saves(slot, step, start);
        }
        if has_ended {
            self.finish(slot, FinishReason::Length, outputs);
        } else {
            self.preempt_if_due(slot);
        }
    }

    fn complete_sample(
        &mut self,
        slot: SlotId,
        step: StepId,
        sample: Sample<'_>,
        outputs: &mut Vec<Output>,
    ) {
        let Some(running) = self.running.get_mut(slot) else {
            return;
        };
        self.in_flight.trials.end(&mut running.job);
        let start = running.num_computed;
        if sample.accepted.is_empty() {
            running.leave_out(sample.num_sampled);
            let num_computed = running.num_computed;
            if self.cache.keeps_slot_state() {
                self.publish(slot, num_computed);
                self.complete_saves(slot, step, start);
            }
            return self.await_mask(slot);
        }
        if sample.accepted.contains(&FAILED_ROW) {
            running.leave_out(sample.num_sampled);
            return self.fail(slot, outputs);
        }
        let num_before = running.job.num_output();
        let (tokens, end) =
            running.complete_sample(sample.accepted, sample.num_sampled, sample.sampled_row);
        let (num_computed, has_saves) = (running.num_computed, running.num_saves_in_flight > 0);
        for num in num_before + 1..=running.job.num_output() {
            self.outlook.lengths.observe_token(num);
        }
        outputs.push(tokens);
        self.publish(slot, num_computed);
        if has_saves {
            self.complete_saves(slot, step, start);
        }
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
        self.resume_with_mask(slot);
        self.preempt_if_due(slot);
    }

    /// Lets a request go on whose mask is there, once its results are in. Slot state that has seen the last token
    /// cannot see it again: then the request begins anew.
    fn resume_with_mask(&mut self, slot: SlotId) {
        if self.cache.keeps_slot_state() {
            if self.running.at_mut(slot).takes_late_mask() {
                self.preempt(slot);
            }
        } else {
            self.running.resume_with_mask(slot);
        }
    }

    /// The mask is there that a row lacked.
    pub(crate) fn note_mask(&mut self, request: RequestId) {
        match self.locations.get(&request) {
            Some(Location::Slot(slot)) => {
                let slot = *slot;
                self.running.at_mut(slot).job.has_late_mask = true;
                self.resume_with_mask(slot);
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
        if reason != FinishReason::Abort {
            self.outlook.observe_end(&self.running.at(slot).job);
        }
        let request = self.remove(slot);
        outputs.push(Output::Finished { request, reason });
    }

    /// The model computed NaN for a row of the request. Its pages may hold NaN too: later prompts do not find them.
    fn fail(&mut self, slot: SlotId, outputs: &mut Vec<Output>) {
        self.cache.unpublish(&self.running.at(slot).job);
        let request = self.remove(slot);
        outputs.push(Output::Failed { request });
    }

    /// Forgets a request that runs; its pages and its slot are free with its last result.
    fn remove(&mut self, slot: SlotId) -> RequestId {
        let running = self.running.remove(slot);
        let request = running.job.id();
        self.forget(&running.job);
        self.free_or_park(running);
        self.note_idle();
        request
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

    fn free_or_park(&mut self, mut running: Running) {
        self.free_slot(running.slot);
        let saves = running.saves.as_deref_mut();
        let snapshots = saves.map_or_else(Vec::new, SlotSaves::take_in_flight);
        if running.is_in_flight() {
            let num_saved = u32::try_from(snapshots.len()).expect("no more than the pool has");
            self.cache.park_snapshots(num_saved);
            let parked = Parked {
                slot: running.slot,
                pages: self.cache.park(running.lease, running.job.tenant()),
                snapshots,
            };
            self.in_flight.park(running.last_step, parked);
        } else {
            // Only a row that failed leaves some.
            for snapshot in snapshots {
                self.cache.discard_snapshot(snapshot);
            }
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
        self.queue.preempted.push(queued.job().id());
        self.enqueue(queued);
    }

    fn preempt_if_due(&mut self, slot: SlotId) {
        let running = self.running.get(slot);
        if running.is_some_and(|it| it.phase == Phase::Held && !it.is_in_flight()) {
            self.preempt(slot);
        }
    }
}
