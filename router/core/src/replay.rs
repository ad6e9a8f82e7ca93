//! What follows when the ranks are lost: every request goes on where it was, on ranks that know nothing of it.
//!
//! Requests keep prompt, parameters and output, and wait in their old order to compute both again, as after a
//! preemption. Pages, slots and cached prefixes are gone. A request that had a row in flight may be what killed the
//! ranks: it is *on trial* until a row of it has sampled in a step of its own, with no other step in flight. One that
//! had a row in flight in two losses and sampled nothing between has ended.

use std::collections::BTreeSet;

use crate::ids::{Micros, RequestId, SlotId};
use crate::in_flight::InFlight;
use crate::plan_builder::PlanBuilder;
use crate::queue::QueueKey;
use crate::running_set::RunningSet;
use crate::scheduler::{Location, Scheduler, SlotChanges};
use crate::state::{Job, Order, Running};

/// Losses with a row of the same request in flight, after which it is not tried again.
pub(crate) const MAX_LOSSES: u32 = 2;

/// Requests that run alone before any other does, by order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trials(BTreeSet<Order>);

impl Trials {
    /// A request that may have killed ranks runs alone.
    pub(crate) fn begin(&mut self, job: &Job) {
        self.0.insert(job.order);
    }

    /// A row of the request has sampled.
    #[inline]
    pub(crate) fn end(&mut self, job: &mut Job) {
        job.num_losses = 0;
        self.forget(job.order);
    }

    /// The request has ended, or a row of it has sampled.
    #[inline]
    pub(crate) fn forget(&mut self, order: Order) {
        if !self.0.is_empty() {
            self.0.remove(&order);
        }
    }
}

impl Scheduler {
    /// Every rank is gone, with all that it kept; results of steps in flight never come. Steps are counted on.
    /// Returns the requests that are not tried again: each has ended.
    pub fn lose_ranks(&mut self) -> Vec<RequestId> {
        let running = std::mem::replace(&mut self.running, RunningSet::new(&self.settings));
        self.cache.forget_all();
        // Suspects that still wait for their turn alone stay on trial.
        let trials = std::mem::take(&mut self.in_flight.trials);
        self.in_flight = InFlight::default();
        self.in_flight.trials = trials;
        self.slot_changes = SlotChanges::default();
        self.pacing.times.forget_in_flight();
        self.outlook.forget_running();
        self.queue.for_each(Job::forget_cached);
        let mut ended = Vec::new();
        for running in running.into_ordered() {
            ended.extend(self.take_back(running));
        }
        self.note_idle();
        ended
    }

    /// Queues a request that ran, or ends it.
    fn take_back(&mut self, running: Running) -> Option<RequestId> {
        let was_in_flight = running.is_in_flight();
        let mut queued = running.lose();
        let job = queued.job_mut();
        if was_in_flight {
            job.num_losses += 1;
            if job.num_losses >= MAX_LOSSES {
                self.forget(queued.job());
                return Some(queued.job().id());
            }
            self.in_flight.trials.begin(job);
        }
        self.counts.num_replays += 1;
        self.enqueue(queued);
        None
    }

    /// Whether a request is on trial: it runs alone.
    pub(crate) fn has_trial(&self) -> bool {
        !self.in_flight.trials.0.is_empty()
    }

    /// A chunk of the first request on trial. Where it finds no room all go on together: nobody waits for ever.
    pub(crate) fn schedule_trial(&mut self, now: Micros, builder: &mut PlanBuilder) {
        if let Some(order) = self.in_flight.trials.0.first() {
            match self.locations.get(&order.request()) {
                Some(Location::Slot(slot)) => self.go_on_alone(*slot, builder),
                Some(Location::Queue(key)) => self.admit_alone(*key, now, builder),
                None => {}
            }
        }
        if builder.is_empty() {
            self.in_flight.trials = Trials::default();
        }
    }

    fn go_on_alone(&mut self, slot: SlotId, builder: &mut PlanBuilder) {
        let has_chunk = self.running.at(slot).num_to_prefill() > 0;
        if let Some(chunk) = has_chunk.then(|| self.next_chunk(slot, builder)).flatten() {
            self.prefill_row(slot, &chunk, builder);
        }
    }

    fn admit_alone(&mut self, key: QueueKey, now: Micros, builder: &mut PlanBuilder) {
        if let Some(head) = self.fitting_now(key, builder) {
            self.admit_head(&head, now, builder);
        }
    }
}
