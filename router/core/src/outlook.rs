//! What running requests will need: admission reserves pages for the answers it expects.
//!
//! The head is admitted if the tokens that all are expected to hold never exceed the pool. Each request grows
//! by one token a step and frees its pages at its end. Requests that would all end at the same time are
//! admitted apart: together they would leave the pool half empty in the mean.

use crate::admission::QueueHead;
use crate::ids::{Micros, RequestId, StepId};
use crate::output_lengths::OutputLengths;
use crate::plan_builder::PlanBuilder;
use crate::queue::QueueKey;
use crate::scheduler::{Location, Scheduler};
use crate::served_rate::ServedRate;
use crate::state::{Job, Running};

/// Share of the pool that a preemption adds to the reserve.
const RESERVE_OF_PREEMPTION: f64 = 0.02;
const MAX_RESERVE: f64 = 0.25;
/// What is left of the added reserve after a plan.
const RESERVE_DECAY: f64 = 0.999;
/// Distance of two ends, as a multiple of what fills the pool evenly. Above 1, since an admission that comes
/// too late loses less than one that is blocked.
const SPACING: f64 = 1.03;
/// Running requests for which a blocked head is looked at again one plan later.
const NUM_CHECKED_PER_PLAN: u64 = 64;
/// Ends of running requests at which their demand is looked at, in the mean.
const NUM_TIMES: usize = 32;
/// Steps from now at which it is looked at besides.
const BETWEEN_ENDS: [u32; 6] = [16, 64, 128, 256, 512, 1024];

/// What is expected of running requests.
#[derive(Clone, Debug)]
pub(crate) struct Outlook {
    pub(crate) lengths: OutputLengths,
    /// Share of the pool kept free since answers were longer than expected.
    reserve: f64,
    /// The last admitted request, and the step in which it is expected to end.
    last_admitted: Option<(RequestId, u64)>,
    /// The head that was blocked, and the next step in which it is looked at again.
    blocked: Option<(RequestId, u64)>,
    pub(crate) served: ServedRate,
}

/// One request from now on.
#[derive(Clone, Copy, Debug)]
struct Growth {
    /// Its answer so far, and where it ends at the latest.
    num_output: u32,
    latest_end: u32,
    /// Tokens that it holds alone, and those that its last page has no use for yet.
    num_tokens: f64,
    /// Share of answers that get so far.
    survival: f64,
}

impl Growth {
    /// Steps to its end at the latest.
    fn num_left(&self) -> u32 {
        self.latest_end - self.num_output
    }

    /// Tokens that it is expected to hold after so many steps.
    fn demand(&self, num_steps: u32, lengths: &OutputLengths) -> f64 {
        if num_steps > self.num_left() {
            return 0.0;
        }
        let alive = lengths.survival(self.num_output + num_steps) / self.survival;
        alive * (self.num_tokens + f64::from(num_steps))
    }
}

impl Outlook {
    pub(crate) fn new() -> Self {
        Self {
            lengths: OutputLengths::new(),
            reserve: 0.0,
            last_admitted: None,
            blocked: None,
            served: ServedRate::default(),
        }
    }

    /// An answer has ended. One that was cut says nothing of longer ones.
    pub(crate) fn observe_end(&mut self, job: &Job) {
        self.served.observe_end(job.num_output());
        if job.num_output() < job.max_output() {
            self.lengths.observe_end(job.num_output());
        }
    }

    /// Pages were short.
    pub(crate) fn observe_preemption(&mut self) {
        self.reserve = (self.reserve + RESERVE_OF_PREEMPTION).min(MAX_RESERVE);
    }

    /// A plan is made.
    pub(crate) fn decay(&mut self) {
        self.reserve *= RESERVE_DECAY;
    }

    /// Nothing runs any more.
    pub(crate) fn forget_running(&mut self) {
        (self.last_admitted, self.blocked) = (None, None);
    }

    fn is_blocked(&self, request: RequestId, step: StepId) -> bool {
        self.blocked
            .is_some_and(|(blocked, until)| blocked == request && step.0 < until)
    }
}

/// The running requests as one plan sees them.
#[derive(Clone, Debug)]
pub(crate) struct Forecast {
    growths: Vec<Growth>,
    /// Expected tokens after some numbers of steps.
    demands: Vec<(u32, f64)>,
    /// Tokens that the requests may hold.
    capacity: f64,
}

impl Forecast {
    fn new(growths: Vec<Growth>, capacity: f64, lengths: &OutputLengths) -> Self {
        let mut times: Vec<u32> = growths.iter().map(Growth::num_left).collect();
        times.sort_unstable();
        let stride = times.len() / NUM_TIMES + 1;
        let last_of_each = times.iter().rev().step_by(stride).copied();
        let times: Vec<u32> = last_of_each.chain(BETWEEN_ENDS).collect();
        let mut forecast = Self {
            growths,
            demands: Vec::new(),
            capacity,
        };
        let demands = times
            .into_iter()
            .map(|time| (time, forecast.demand(time, lengths)));
        forecast.demands = demands.collect();
        forecast
    }

    fn demand(&self, num_steps: u32, lengths: &OutputLengths) -> f64 {
        self.growths
            .iter()
            .map(|it| it.demand(num_steps, lengths))
            .sum()
    }

    /// Whether one more always finds room.
    fn fits(&self, head: &Growth, lengths: &OutputLengths) -> bool {
        let end = head.num_left();
        let at_its_end = self.demand(end, lengths) + head.demand(end, lengths);
        let mut others = self.demands.iter();
        at_its_end <= self.capacity
            && others.all(|(time, demand)| demand + head.demand(*time, lengths) <= self.capacity)
    }

    fn push(&mut self, growth: Growth, lengths: &OutputLengths) {
        for (time, demand) in &mut self.demands {
            *demand += growth.demand(*time, lengths);
        }
        self.growths.push(growth);
    }
}

impl Scheduler {
    /// Whether the head and all running requests are expected to find pages to their ends. A watermark
    /// that was given stands for the reserve, and nothing is expected.
    pub(crate) fn can_grow(
        &mut self,
        key: QueueKey,
        job: &JobSize,
        builder: &mut PlanBuilder,
    ) -> bool {
        let is_given = self.settings.pages.watermark.is_some();
        if is_given || self.running.is_empty() || self.outranks_last(key) {
            return true;
        }
        if self.outlook.is_blocked(job.request, builder.step) {
            return false;
        }
        let head = self.growth_of(job);
        let grows = self.has_room_for_all(job)
            || self.is_spaced(&head, builder.step) && self.fits_beside(&head, builder);
        if !grows {
            let pause = 1 + u64::from(self.running.len()) / NUM_CHECKED_PER_PLAN;
            self.outlook.blocked = Some((job.request, builder.step.0 + pause));
        }
        grows
    }

    /// Whether the last running request would give way to the head anyway.
    pub(crate) fn outranks_last(&self, key: QueueKey) -> bool {
        let last = self.running.backwards_from(None).next();
        let both = self.queue.job(key).zip(last);
        both.is_some_and(|(job, last)| self.outranks(job, &last.job))
    }

    /// Whether the pool holds everything that runs, or soon may, at its full length.
    fn has_room_for_all(&self, job: &JobSize) -> bool {
        let running = self.running.num_expected_tokens() + self.num_expected(job);
        running as f64 + self.expected_of_free_slots(job) <= self.pool_less_reserve()
    }

    fn fits_beside(&self, head: &Growth, builder: &mut PlanBuilder) -> bool {
        let forecast = builder.forecast.get_or_insert_with(|| {
            let growths = self.running.iter().map(|it| self.growth(it)).collect();
            Forecast::new(growths, self.capacity(), &self.outlook.lengths)
        });
        forecast.fits(head, &self.outlook.lengths)
    }

    /// Whether the head ends at another time than the one admitted before it, if both are expected to be
    /// as long as they may.
    fn is_spaced(&self, head: &Growth, step: StepId) -> bool {
        let Some((last, end)) = self.outlook.last_admitted else {
            return true;
        };
        let is_uncertain = self.outlook.lengths.survival(head.latest_end) < head.survival / 2.0;
        if is_uncertain || !matches!(self.locations.get(&last), Some(Location::Slot(_))) {
            return true;
        }
        let left = f64::from(head.num_left());
        let token_steps = (head.num_tokens + left / 2.0) * left;
        let apart = (step.0 + u64::from(head.num_left())).abs_diff(end) as f64;
        apart >= SPACING * token_steps / self.limits.pool_tokens as f64
    }

    /// Notes what is expected of the head, which is admitted now. Returns the tokens that it will hold.
    pub(crate) fn note_admission(&mut self, head: &QueueHead, builder: &mut PlanBuilder) -> u64 {
        let growth = self.growth_of(&head.size);
        let (num_known, num_cached) = (head.size.num_known, head.size.num_cached);
        if let Some(forecast) = &mut builder.forecast {
            let newly_held = head.hits.num_cached[0] * self.settings.pages.page_size;
            forecast.capacity -= f64::from(newly_held);
            forecast.push(growth, &self.outlook.lengths);
        }
        let end = builder.step.0 + u64::from(growth.num_left());
        self.outlook.last_admitted = Some((head.size.request, end));
        // The queue counts a prompt once, however many choices it has.
        let num_shared = match head.size.is_first_choice {
            true => 0,
            false => num_cached,
        };
        self.outlook
            .served
            .observe_admission(num_known - num_shared, num_cached - num_shared);
        self.num_expected(&head.size)
    }

    /// Tokens that the head is expected to hold at its end.
    fn num_expected(&self, job: &JobSize) -> u64 {
        let left = self
            .outlook
            .lengths
            .expected_left(job.num_output, job.max_output);
        #[expect(clippy::cast_sign_loss, reason = "lengths are positive")]
        let left = left as u64;
        u64::from(job.num_known) + left
    }

    /// Tokens that requests may count on, of their own and cached prefixes that they share.
    fn pool_less_reserve(&self) -> f64 {
        let kept = u64::from(self.limits.watermark) * u64::from(self.settings.pages.page_size);
        self.limits.pool_tokens as f64 * (1.0 - self.outlook.reserve) - kept as f64
    }

    /// Tokens that requests may count on beside the cached prefixes that they share.
    fn capacity(&self) -> f64 {
        let alone = self.running.iter().map(|it| self.num_pages_alone(it));
        let num_shared = self.cache.counts(0).leased.saturating_sub(alone.sum());
        let shared = f64::from(num_shared) * f64::from(self.settings.pages.page_size);
        self.pool_less_reserve() - shared
    }

    fn num_pages_alone(&self, running: &Running) -> u32 {
        let num_shared = running.num_shared / self.settings.pages.page_size;
        running.lease.num_pages()[0].saturating_sub(num_shared)
    }

    fn growth(&self, running: &Running) -> Growth {
        let job = &running.job;
        let num_held = running.num_planned.max(job.num_known());
        let num_output = job.max_output() - running.num_left();
        let num_alone = num_held.saturating_sub(running.num_shared);
        self.growth_from(num_alone, num_output, job.max_output())
    }

    fn growth_of(&self, job: &JobSize) -> Growth {
        let num_alone = job.num_known - job.num_cached;
        self.growth_from(num_alone, job.num_output, job.max_output)
    }

    fn growth_from(&self, num_alone: u32, num_output: u32, most: u32) -> Growth {
        // A last page is half empty in the mean.
        let slack = f64::from(self.settings.pages.page_size) / 2.0;
        Growth {
            num_output,
            latest_end: OutputLengths::latest_end(num_output, most),
            num_tokens: f64::from(num_alone) + slack,
            survival: self.outlook.lengths.survival(num_output),
        }
    }

    /// When all who wait now are expected to run; None before any ran.
    pub fn queue_clears_in(&self) -> Option<Micros> {
        let waiting = self.queue.room.total();
        let each = self.outlook.served.mean_output();
        let each = each.or_else(|| self.mean_output_so_far())?;
        let prompts = waiting.num_tokens as f64 * self.outlook.served.computed_share();
        let tokens = prompts + waiting.num_requests as f64 * each;
        self.outlook.served.time_of(tokens)
    }

    /// Tokens of an answer until one has ended: twice what the running ones have, as if they were halfway, up to
    /// their limits.
    fn mean_output_so_far(&self) -> Option<f64> {
        let outputs = self.running.iter().map(|it| {
            let doubled = it.job.num_output().saturating_mul(2);
            doubled.min(it.job.max_output())
        });
        let sum: f64 = outputs.map(f64::from).sum();
        let num_running = f64::from(self.running.len());
        (num_running > 0.0).then(|| sum / num_running)
    }

    /// Tokens that requests of the queue, asked for answers like the head's, are expected to need in the free slots.
    fn expected_of_free_slots(&self, head: &JobSize) -> f64 {
        let waiting = self.queue.room.total();
        let num_requests = waiting.num_requests as f64;
        let each = self.outlook.lengths.expected_left(0, head.max_output);
        let of_all = waiting.num_tokens as f64 + num_requests * each;
        of_all * (self.running.num_free_slots() as f64 / num_requests.max(1.0)).min(1.0)
    }
}

/// What the outlook needs to know of the head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobSize {
    request: RequestId,
    is_first_choice: bool,
    num_known: u32,
    num_cached: u32,
    num_output: u32,
    max_output: u32,
}

impl JobSize {
    pub(crate) fn num_known(&self) -> u32 {
        self.num_known
    }

    pub(crate) fn new(job: &Job, num_cached: u32) -> Self {
        Self {
            request: job.id(),
            is_first_choice: job.is_first_choice(),
            num_known: job.num_known(),
            num_cached,
            num_output: job.num_output(),
            max_output: job.max_output(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_peaks_where_a_request_ends() {
        let lengths = OutputLengths::new();
        let growth = |num_left: u32, num_tokens| Growth {
            num_output: 1,
            latest_end: 1 + num_left,
            num_tokens,
            survival: 1.0,
        };
        let others = vec![growth(1, 50.0), growth(50, 5.0)];
        let fits = |capacity, head| {
            Forecast::new(others.clone(), capacity, &lengths).fits(&head, &lengths)
        };
        assert!(
            fits(115.0, growth(60, 10.0)),
            "5 and 10 tokens that grow by 50"
        );
        assert!(!fits(114.9, growth(60, 10.0)));
        assert!(fits(180.0, growth(50, 75.0)));
        assert!(!fits(179.9, growth(50, 75.0)), "both end at the same time");
    }
}
