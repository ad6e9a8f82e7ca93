//! What steps took, what they should take, and which are in flight.

use std::collections::VecDeque;

use crate::ids::{Micros, StepId};
use crate::least_squares::NUM_TERMS;
use crate::step_cost::StepCost;
use crate::step_errors::StepErrors;
use crate::step_work::{StepWork, WorkKind};

/// A step in flight.
#[derive(Clone, Debug)]
struct Launched {
    step: StepId,
    work: StepWork,
    /// Microseconds that it should take, as it was planned; None if no step of its kind was measured.
    planned: Option<f64>,
    /// A step of its size was measured before it was planned.
    has_seen_size: bool,
}

/// Learns from every measured step. It has no clock: times are events.
#[derive(Clone, Debug)]
pub(crate) struct StepTimes {
    pub(crate) cost: StepCost,
    pub(crate) errors: StepErrors,
    in_flight: VecDeque<Launched>,
}

/// What has been learned of step times, for the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTimeStats {
    /// Microseconds of a step, a prefill token, a prefill pair, a decode row and a KV token of one.
    pub coefficients: [f64; NUM_TERMS],
    /// By how much 99 of 100 mixed steps exceed their expected time at most, as a share of the ITL target or,
    /// without one, of that time.
    pub margin: f64,
    /// Steps that took twice as long as they should, while those after them did not.
    pub num_hiccups: u64,
}

impl StepTimes {
    pub(crate) fn new(prefill_token_micros: f64, target: Option<Micros>) -> Self {
        Self {
            cost: StepCost::new(prefill_token_micros),
            errors: StepErrors::new(target.map(|target| target.0 as f64)),
            in_flight: VecDeque::new(),
        }
    }

    /// A plan is in flight.
    pub(crate) fn launch(&mut self, step: StepId, work: StepWork) {
        let planned = self.cost.has_seen(work.kind());
        let planned = planned.then(|| self.cost.estimate(&work));
        self.in_flight.push_back(Launched {
            step,
            work,
            planned,
            has_seen_size: self.cost.has_seen_size(&work),
        });
    }

    /// A step in flight took `elapsed`. Returns its work.
    pub(crate) fn measure(&mut self, step: StepId, elapsed: Micros) -> Option<StepWork> {
        let Launched {
            work,
            planned,
            has_seen_size,
            ..
        } = *self.find(step)?;
        let micros = elapsed.0 as f64;
        if self.cost.observe(&work, micros) {
            self.errors.start_again();
        } else if let Some(planned) = planned {
            // Each size is new only once.
            let tells_margin = work.kind() == WorkKind::Mixed && has_seen_size;
            self.errors.observe(micros, planned.max(1.0), tells_margin);
        }
        Some(work)
    }

    /// A step is complete. Its time was measured before, or never will be.
    pub(crate) fn complete(&mut self, step: StepId) {
        self.in_flight.retain(|launched| launched.step > step);
    }

    /// The steps in flight never end.
    pub(crate) fn forget_in_flight(&mut self) {
        self.in_flight.clear();
    }

    /// Expected time of a step in flight; None if no step of its kind was measured.
    pub(crate) fn expected(&self, step: StepId) -> Option<Micros> {
        let work = &self.find(step)?.work;
        self.cost.has_seen(work.kind()).then(|| self.micros(work))
    }

    /// Expected time of a step in flight; None if no recent steps were like it.
    pub(crate) fn expected_if_alike(&self, step: StepId) -> Option<Micros> {
        let work = &self.find(step)?.work;
        self.cost.has_seen_alike(work).then(|| self.micros(work))
    }

    pub(crate) fn stats(&self) -> StepTimeStats {
        StepTimeStats {
            coefficients: self.cost.coefficients(),
            margin: self.errors.margin(),
            num_hiccups: self.errors.num_hiccups(),
        }
    }

    fn micros(&self, work: &StepWork) -> Micros {
        #[expect(
            clippy::cast_sign_loss,
            reason = "no coefficient is negative, and the cast saturates"
        )]
        let micros = self.cost.estimate(work) as u64;
        Micros(micros)
    }

    fn find(&self, step: StepId) -> Option<&Launched> {
        self.in_flight.iter().find(|launched| launched.step == step)
    }
}
