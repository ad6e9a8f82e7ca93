//! The ITL target: how many prefill tokens may join a step that decodes, and how many decoders it carries.

use crate::ids::{Micros, StepId};
use crate::plan_builder::{MIN_CHUNK, PlanBuilder};
use crate::scheduler::Scheduler;
use crate::settings::{Limits, Settings};
use crate::state::{Job, Phase};
use crate::step_cost::StepCost;
use crate::step_sizes::{SIZE, padded_tokens};
use crate::step_times::StepTimes;
use crate::step_work::{StepWork, WorkKind};

/// A mixed step takes at most so many times the prefill tokens of those measured: what few tokens cost tells
/// little of what many do.
const MAX_GROWTH: f64 = 4.0;
/// What the largest mixed step counts against the one after it, as the fit forgets.
const DECAY: f64 = 0.99;

/// Share of the target that steps may be planned to take, however far they exceed what is expected.
const LEAST_USABLE: f64 = 0.5;
/// Sizes of a step that are looked at above the one that fits by the linear fit; below it, half of the chunk.
const NUM_SIZES_ABOVE: u64 = 4;
/// Fewer prefill tokens are left as they are: a size is too coarse for them.
const LEAST_SIZES: u64 = 8;
/// Share of the target that a grant takes.
const GRANT: f64 = 0.25;

/// Keeps the time of decoding steps within a target, by what earlier steps took.
#[derive(Clone, Debug)]
pub(crate) struct ItlTarget {
    micros: f64,
    /// The last step with a prefill row.
    last_prefill: StepId,
    prefill_starvation_steps: u32,
    /// Tokens granted if decoding has left no time for too long.
    least: u32,
    /// Prefill tokens of the largest mixed step measured, with decay.
    largest_mixed: f64,
}

/// What steps take, and the target that they should keep.
#[derive(Clone, Debug)]
pub(crate) struct Pacing {
    pub(crate) times: StepTimes,
    /// None without a target in the settings.
    pub(crate) target: Option<ItlTarget>,
}

impl Pacing {
    pub(crate) fn new(settings: &Settings, limits: &Limits) -> Self {
        Self {
            times: StepTimes::new(first_guess(settings, limits), limits.itl_target),
            target: ItlTarget::new(settings, limits),
        }
    }

    /// Tokens of a chunk from `start` on that may join the plan.
    pub(crate) fn prefill_budget(&self, plan: &PlanBuilder, start: u32) -> u32 {
        self.target.as_ref().map_or(u32::MAX, |target| {
            target.prefill_budget(&self.times, plan, start)
        })
    }

    /// Tokens from `start` on that the target grants a prefill that had none for too long.
    pub(crate) fn grant(&self, start: u32) -> u32 {
        let target = self.target.as_ref();
        target.map_or(0, |target| target.grant(&self.times, start))
    }

    /// A plan is in flight.
    pub(crate) fn launch(&mut self, step: StepId, work: StepWork) {
        self.times.launch(step, work);
        if let Some(target) = &mut self.target {
            target.launch(step, &work);
        }
    }

    /// A step in flight took `elapsed`.
    pub(crate) fn measure(&mut self, step: StepId, elapsed: Micros) {
        let work = self.times.measure(step, elapsed);
        if let (Some(work), Some(target)) = (work, &mut self.target) {
            target.measure(&work);
        }
    }
}

/// Microseconds that a prefill token is taken to cost until steps were measured. It admits hardly any prefill.
fn first_guess(settings: &Settings, limits: &Limits) -> f64 {
    limits.itl_target.map_or(0.0, |target| {
        target.0 as f64 / f64::from(least_grant(settings))
    })
}

fn least_grant(settings: &Settings) -> u32 {
    settings.pages.page_size.max(MIN_CHUNK)
}

impl ItlTarget {
    fn new(settings: &Settings, limits: &Limits) -> Option<Self> {
        Some(Self {
            micros: limits.itl_target?.0 as f64,
            last_prefill: StepId(0),
            prefill_starvation_steps: settings.scheduler.prefill_starvation_steps,
            least: least_grant(settings),
            largest_mixed: f64::from(MIN_CHUNK),
        })
    }

    /// Tokens of a chunk from `start` on that may join the plan.
    ///
    /// A step without decoders is not bound. If decoding alone leaves no time, one page joins after
    /// `prefill_starvation_steps` steps without prefill.
    pub(crate) fn prefill_budget(&self, times: &StepTimes, plan: &PlanBuilder, start: u32) -> u32 {
        let work = &plan.work;
        if work.num_decode_rows == 0 {
            return u32::MAX;
        }
        let usable = self.less(times.errors.margin_of_chunks());
        let left = usable - times.cost.estimate_as(work, WorkKind::Mixed);
        let on_fit = times.cost.num_tokens_within(left, start);
        let in_time = of_best_size(&times.cost, usable, work, start, on_fit);
        let budget = in_time.min(self.num_tried(work));
        if self.is_starved(plan.step, work) {
            budget.max(self.page_or_grant(times, start))
        } else {
            budget
        }
    }

    /// Tokens from `start` on that a prefill gets once time has left it none for too long.
    fn grant(&self, times: &StepTimes, start: u32) -> u32 {
        let in_time = times.cost.num_tokens_within(self.micros * GRANT, start);
        in_time.min(self.num_tried(&StepWork::default()))
    }

    fn page_or_grant(&self, times: &StepTimes, start: u32) -> u32 {
        self.grant(times, start).max(self.least)
    }

    /// The shortest chunk from `start` on that time may cut of the first prefill in order: what grants would
    /// give it.
    pub(crate) fn shortest_chunk(&self, times: &StepTimes, start: u32) -> u32 {
        let num_steps = self.prefill_starvation_steps.saturating_add(1);
        let granted = self.page_or_grant(times, start);
        granted.div_ceil(num_steps).min(MIN_CHUNK)
    }

    /// Whether decoding alone takes longer than the target.
    pub(crate) fn is_missed_by(&self, times: &StepTimes, decoding: &StepWork) -> bool {
        let expected = times.cost.estimate_decoding(decoding);
        expected.is_some_and(|micros| micros > self.micros)
    }

    /// Whether the target leaves a page of prefill when all of `decoding` decode.
    ///
    /// True where not even one row of them would: then admitting fewer does not help.
    pub(crate) fn carries(&self, times: &StepTimes, decoding: &StepWork) -> bool {
        let one = StepWork {
            num_decode_rows: 1,
            num_decode_kv_tokens: decoding.num_decode_kv_tokens / decoding.num_decode_rows.max(1),
            ..StepWork::default()
        };
        self.leaves_a_page(times, decoding) || !self.leaves_a_page(times, &one)
    }

    /// A step in flight was measured.
    pub(crate) fn measure(&mut self, work: &StepWork) {
        if work.kind() == WorkKind::Mixed {
            let num_tokens = work.num_prefill_tokens as f64;
            self.largest_mixed = num_tokens.max(self.largest_mixed * DECAY);
        }
    }

    /// A plan is in flight.
    pub(crate) fn launch(&mut self, step: StepId, work: &StepWork) {
        if work.num_prefill_tokens > 0 {
            self.last_prefill = step;
        }
    }

    fn leaves_a_page(&self, times: &StepTimes, decoding: &StepWork) -> bool {
        times.cost.estimate_decoding(decoding).is_none_or(|micros| {
            let left = self.less(times.errors.margin()) - micros;
            times.cost.num_tokens_within(left, 0) >= self.least
        })
    }

    /// Microseconds that a step may be expected to take, so that 99 of 100 take no more than the target.
    fn less(&self, margin: f64) -> f64 {
        self.micros * (1.0 - margin).max(LEAST_USABLE)
    }

    /// Tokens that may join `work` beside what it has, by what was measured.
    fn num_tried(&self, work: &StepWork) -> u32 {
        let most = self.largest_mixed.max(MIN_CHUNK.into()) * MAX_GROWTH;
        #[expect(
            clippy::cast_sign_loss,
            reason = "it is positive, and the cast saturates"
        )]
        let most = most as u32;
        most.saturating_sub(u32::try_from(work.num_prefill_tokens).unwrap_or(u32::MAX))
    }

    fn is_starved(&self, step: StepId, work: &StepWork) -> bool {
        let num_without = step.0 - self.last_prefill.0;
        work.num_prefill_tokens == 0 && num_without > u64::from(self.prefill_starvation_steps)
    }
}

/// Tokens that fill `work` up to the largest size of a step that takes no more than `usable`, near the `on_fit`
/// tokens that do so by the linear fit.
fn of_best_size(cost: &StepCost, usable: f64, work: &StepWork, start: u32, on_fit: u32) -> u32 {
    let size = u64::from(SIZE);
    if work.num_prefill_tokens + u64::from(on_fit) < LEAST_SIZES * size {
        return on_fit;
    }
    let before = padded_tokens(work);
    let least = (before + u64::from(on_fit / 2)) / size;
    let most = (before + u64::from(on_fit)) / size;
    let is_in_time = |length: &u32| {
        let mut with = *work;
        with.add_prefill(start, *length);
        cost.estimate(&with) <= usable
    };
    let length = |num: u64| u32::try_from((num * size).checked_sub(before)?).ok();
    let sizes = (least..=most + NUM_SIZES_ABOVE).rev();
    sizes
        .filter_map(length)
        .find(is_in_time)
        .unwrap_or(on_fit / 2)
}

impl Scheduler {
    /// Whether the target still leaves a page of prefill once all that run, and this job too, decode.
    pub(crate) fn target_carries(&self, job: &Job, plan: &PlanBuilder) -> bool {
        let Some(target) = &self.pacing.target else {
            return true;
        };
        if job.ends_with_prefill() {
            return true;
        }
        let mut decoding = plan.work.decode_part();
        for (_, row) in plan.prefill.iter().filter(|(_, row)| row.is_last_chunk) {
            if self.running.at(row.slot).phase == Phase::Decoding {
                decoding.add_decode(row.start + row.length);
            }
        }
        for running in self.running.prefills() {
            if !running.job.ends_with_prefill() {
                decoding.add_decode(running.job.num_known());
            }
        }
        decoding.add_decode(job.num_known());
        target.carries(&self.pacing.times, &decoding)
    }

    /// Counts a plan whose decode rows alone take longer than the target.
    pub(crate) fn note_missed_target(&mut self, work: &StepWork) {
        let decoding = work.decode_part();
        let is_missed = |target: &ItlTarget| target.is_missed_by(&self.pacing.times, &decoding);
        if self.pacing.target.as_ref().is_some_and(is_missed) {
            self.counts.num_decodes_over_target += 1;
        }
    }
}
