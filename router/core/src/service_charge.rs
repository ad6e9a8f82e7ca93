//! What fair share charges tenants: the step time that their rows take.
//!
//! A prefill is charged at admission, again after a preemption; a decode row in its plan. Both pay for the
//! constant part of a step by the share of the leased pages that they hold.

use crate::ids::SlotId;
use crate::scheduler::Scheduler;
use crate::state::Queued;
use crate::step_cost::StepCost;
use crate::step_work::StepWork;

impl Scheduler {
    /// Charges a tenant for everything that is to be computed before the next token, and notes the
    /// request's place in order.
    pub(crate) fn charge_admission(&mut self, queued: &mut Queued, num_cached: u32) {
        let job = queued.job();
        let (tenant, num_known) = (job.tenant(), job.num_known());
        let mut work = StepWork::default();
        work.add_prefill(num_cached, num_known - num_cached);
        let micros = self.price(&work);
        if let Some(fair_share) = &mut self.queue.fair_share {
            queued.set_virtual_time(fair_share.time(tenant));
            fair_share.charge(tenant, micros);
        }
    }

    /// Charges a tenant for a decode row of `length` tokens from `start` on.
    pub(crate) fn charge_decode_row(&mut self, slot: SlotId, start: u32, length: u32) {
        if self.queue.fair_share.is_some() {
            let mut work = StepWork::default();
            work.add_decode(start);
            let micros = self.price(&work) * f64::from(length);
            self.charge(slot, micros + self.price_of_pages(slot));
        }
    }

    /// Charges a tenant for a chunk, whose tokens were charged at admission.
    pub(crate) fn charge_chunk(&mut self, slot: SlotId) {
        if self.queue.fair_share.is_some() {
            self.charge(slot, self.price_of_pages(slot));
        }
    }

    fn charge(&mut self, slot: SlotId, micros: f64) {
        let tenant = self.running.at(slot).job.tenant();
        if let Some(fair_share) = &mut self.queue.fair_share {
            fair_share.charge(tenant, micros);
        }
    }

    /// A request's share of a step's constant time: that of the leased pages that it holds.
    fn price_of_pages(&self, slot: SlotId) -> f64 {
        let Some(cost) = self.fitted_cost() else {
            return 0.0;
        };
        let num_held = self.running.at(slot).lease.num_pages()[0];
        let num_leased = self.cache.counts(0).leased.max(1);
        cost.of_step() * f64::from(num_held) / f64::from(num_leased)
    }

    /// Microseconds that `work` adds to a step; until steps were measured, its tokens.
    fn price(&self, work: &StepWork) -> f64 {
        let Some(cost) = self.fitted_cost() else {
            return (work.num_prefill_tokens + work.num_decode_rows) as f64;
        };
        cost.of_work(work)
    }

    /// The step-time model, once it has seen both prefill and decode rows.
    fn fitted_cost(&self) -> Option<&StepCost> {
        let cost = &self.pacing.times.cost;
        cost.has_seen_all_rows().then_some(cost)
    }
}
