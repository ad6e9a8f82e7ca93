//! Preemption: which request loses its pages when a row needs some, or one of better priority waits.

use crate::ids::SlotId;
use crate::kv_cache::Released;
use crate::plan_builder::PlanBuilder;
use crate::prefix_sharing::Chunk;
use crate::scheduler::Scheduler;
use crate::state::{Job, Order, Phase};

impl Scheduler {
    /// Leases the pages that a request lacks for `num_tokens` tokens. If false, its row must wait.
    pub(crate) fn lease_pages(
        &mut self,
        slot: SlotId,
        num_tokens: u32,
        builder: &mut PlanBuilder,
    ) -> bool {
        if num_tokens <= self.running.at(slot).lease.num_tokens() {
            return true;
        }
        let num = self.running.num_missing_pages(slot, num_tokens);
        let has_room = self.free_pages_for(slot, &num, builder);
        if has_room {
            let lease = self.running.grow(slot, &num, &mut self.cache);
            builder.append_pages(slot, lease, &num);
        }
        has_room
    }

    /// Preempts requests after the asker until `num` pages of each kind are free, or results
    /// in flight will free them. If no later request has a row in this plan, the asker itself is
    /// preempted.
    pub(crate) fn free_pages_for(
        &mut self,
        asker: SlotId,
        num: &[u32],
        builder: &mut PlanBuilder,
    ) -> bool {
        let order = self.running.at(asker).job.order;
        while !self.cache.has(num) {
            if self.cache.will_have(num, self.running.num_held_pages()) {
                return false;
            }
            let Some(victim) = self.last_victim(order, builder) else {
                if !builder.has_row_after(order) {
                    self.preempt_or_hold(asker);
                }
                return false;
            };
            self.outlook.observe_preemption();
            self.preempt_or_hold(victim);
        }
        true
    }

    /// The part of a chunk that needs no preemption; where no page is free, up to the end of one page.
    pub(crate) fn shrink_to_free_pages(&self, slot: SlotId, chunk: &Chunk) -> Chunk {
        let Chunk { start, length } = *chunk;
        let running = self.running.at(slot);
        let num = self.running.num_missing_pages(slot, start + length);
        // Pages to adopt are taken with the chunk's own.
        if start > running.num_planned || self.cache.has(&num) {
            return *chunk;
        }
        let in_free_pages = self.cache.num_tokens_with_free(&running.lease);
        let page_size = self.settings.pages.page_size;
        let to_end_of_page = page_size - start % page_size;
        let fitting = in_free_pages.saturating_sub(start).max(to_end_of_page);
        Chunk {
            start,
            length: length.min(fitting),
        }
    }

    /// Preempts requests whose priority is worse by the threshold, if that makes way for the head.
    pub(crate) fn make_way(&mut self, builder: &mut PlanBuilder) {
        let threshold = self.settings.scheduler.priority_preemption_threshold;
        if threshold.is_none() || self.running.num_held() > 0 {
            return;
        }
        for victim in self.victims_for_head().unwrap_or_default() {
            self.preempt_or_hold(victim);
        }
        builder.last_victim = None;
    }

    /// The last requests in order that must give way to the head; None if it can be admitted as it is, or
    /// not even then.
    fn victims_for_head(&mut self) -> Option<Vec<SlotId>> {
        let key = self.queue.first()?;
        if !self.outranks_last(key) {
            return None;
        }
        let hits = self.find_hits(key)?;
        let job = self.queue.job(key)?;
        let mut released = self.cache.nothing_released(job, hits.num_tokens);
        let mut victims = Vec::new();
        let has_way = |victims: &Vec<SlotId>, released: &Released| {
            let has_slot = self.running.free_slot().is_some() || !victims.is_empty();
            has_slot
                && self.has_pages_once(
                    job.num_known(),
                    &hits,
                    self.running.num_prefill_pages(),
                    &released.num,
                )
        };
        for running in self.running.backwards_from(None) {
            if has_way(&victims, &released) {
                break;
            }
            if !self.outranks(job, &running.job) {
                return None;
            }
            self.cache.count_released(&mut released, &running.lease);
            victims.push(running.slot);
        }
        has_way(&victims, &released).then_some(victims)
    }

    /// Whether a waiting request may preempt a running one.
    pub(crate) fn outranks(&self, waiting: &Job, running: &Job) -> bool {
        let difference = i64::from(running.priority()) - i64::from(waiting.priority());
        let threshold = self.settings.scheduler.priority_preemption_threshold;
        running.order > waiting.order && threshold.is_some_and(|it| difference >= it.into())
    }

    /// The last request in order after `asker` that has no row in this plan and is not held yet.
    fn last_victim(&self, asker: Order, builder: &mut PlanBuilder) -> Option<SlotId> {
        let is_candidate = |phase, last_step| phase != Phase::Held && last_step != builder.step;
        let mut after = self
            .running
            .backwards_from(builder.last_victim)
            .take_while(|running| running.job.order > asker);
        let found = after.find(|running| is_candidate(running.phase, running.last_step));
        let (order, slot) = found.map_or((asker, None), |running| {
            (running.job.order, Some(running.slot))
        });
        builder.last_victim = Some(order);
        slot
    }

    /// Preempts a request now if nothing of it is in flight, else when its results are in.
    fn preempt_or_hold(&mut self, slot: SlotId) {
        if self.running.at(slot).is_in_flight() {
            self.running.hold(slot);
        } else {
            self.preempt(slot);
        }
    }
}
