//! Preemption: which request loses its pages when a row needs some.

use crate::ids::SlotId;
use crate::plan_builder::PlanBuilder;
use crate::scheduler::Scheduler;
use crate::state::{Order, Phase};

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
            self.preempt_or_hold(victim);
        }
        true
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
