//! The ITL target: how many prefill tokens may join a step that decodes.

use std::collections::VecDeque;

use crate::ids::{Micros, StepId};
use crate::plan_builder::MIN_CHUNK;
use crate::settings::{Limits, Settings};
use crate::step_cost::{StepCost, StepWork};

/// Keeps the time of decoding steps within a target, by what earlier steps took.
#[derive(Clone, Debug)]
pub(crate) struct ItlTarget {
    micros: f64,
    cost: StepCost,
    in_flight: VecDeque<(StepId, StepWork)>,
    /// The last step with a prefill row.
    last_prefill: StepId,
    prefill_starvation_steps: u32,
    /// Tokens granted if decoding has left no time for too long.
    least: u32,
}

impl ItlTarget {
    /// None without a target in the settings.
    pub(crate) fn new(settings: &Settings, limits: &Limits) -> Option<Self> {
        let micros = limits.itl_target?.0 as f64;
        let least = settings.pages.page_size.max(MIN_CHUNK);
        Some(Self {
            micros,
            // A guess that admits hardly any prefill until steps were measured.
            cost: StepCost::new(micros / f64::from(least)),
            in_flight: VecDeque::new(),
            last_prefill: StepId(0),
            prefill_starvation_steps: settings.scheduler.prefill_starvation_steps,
            least,
        })
    }

    /// Tokens of a chunk from `start` on that may join the work of `step`.
    ///
    /// A step without decoders is not bound. If decoding alone leaves no time, one page joins after
    /// `prefill_starvation_steps` steps without prefill.
    pub(crate) fn prefill_budget(&self, step: StepId, work: &StepWork, start: u32) -> u32 {
        if work.num_decode_rows == 0 {
            return u32::MAX;
        }
        let margin = self.cost.excess().min(self.micros / 2.0);
        let left = self.micros - margin - self.cost.estimate(work);
        let budget = self.cost.num_tokens_within(left, start);
        if self.is_starved(step, work) {
            budget.max(self.least)
        } else {
            budget
        }
    }

    /// The step-time model.
    pub(crate) fn cost(&self) -> &StepCost {
        &self.cost
    }

    /// A plan is in flight.
    pub(crate) fn launch(&mut self, step: StepId, work: StepWork) {
        if work.num_prefill_tokens > 0 {
            self.last_prefill = step;
        }
        self.in_flight.push_back((step, work));
    }

    /// A step in flight took `elapsed`.
    pub(crate) fn measure(&mut self, step: StepId, elapsed: Micros) {
        let launched = self
            .in_flight
            .iter()
            .find(|(launched, _)| *launched == step);
        if let Some((_, work)) = launched {
            self.cost.observe(work, elapsed.0 as f64);
        }
    }

    /// Expected time of a step in flight.
    pub(crate) fn expected(&self, step: StepId) -> Option<Micros> {
        let (_, work) = self
            .in_flight
            .iter()
            .find(|(launched, _)| *launched == step)?;
        #[expect(
            clippy::cast_sign_loss,
            reason = "no coefficient is negative, and the cast saturates"
        )]
        let micros = self.cost.estimate(work) as u64;
        Some(Micros(micros))
    }

    /// A step is complete. Its time was measured before, or never will be.
    pub(crate) fn complete(&mut self, step: StepId) {
        self.in_flight.retain(|(launched, _)| *launched > step);
    }

    fn is_starved(&self, step: StepId, work: &StepWork) -> bool {
        let num_without = step.0 - self.last_prefill.0;
        work.num_prefill_tokens == 0 && num_without > u64::from(self.prefill_starvation_steps)
    }
}
