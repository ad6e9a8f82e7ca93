//! One replica in virtual time: the engine's driver loop, with a cost model as the worker.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use plait_core::{
    Decision, Event, Micros, Output, Plan, Refusal, Request, RequestId, Scheduler, StepId,
    StepResult, TenantId, TokenId, Vote,
};
use rustc_hash::FxHashMap;

use crate::run_metrics::RunMetrics;
use crate::settings::{Routing, Setup};
use crate::trace::Arrival;

/// Every sampled token. Answers end by length, so its value does not matter.
const ANY_TOKEN: TokenId = 0;

/// A step that the worker computes, or will compute after the one before it.
struct InFlight {
    step: StepId,
    elapsed: Micros,
    end: Micros,
    num_samples: usize,
}

/// What is kept of a request until it ends.
struct Live {
    tenant: u32,
    num_prompt: u32,
    /// It was preempted, and computes its prompt and output again.
    is_recomputing: bool,
    arrived: Micros,
    last_token: Option<Micros>,
}

/// A scheduler, its worker, and the measurements of both.
pub struct Replica<'a> {
    scheduler: Scheduler,
    setup: &'a Setup,
    in_flight: VecDeque<InFlight>,
    /// When the worker has computed all steps it was sent.
    free_at: Micros,
    live: FxHashMap<RequestId, Live>,
    /// Requests whose first token has come since somebody asked.
    begun: Vec<RequestId>,
    /// Requests that have ended since somebody asked.
    ended: Vec<RequestId>,
    outputs: Vec<Output>,
    accepted: Vec<u32>,
    tokens: Vec<TokenId>,
    metrics: RunMetrics,
}

impl<'a> Replica<'a> {
    /// An idle replica.
    pub fn new(setup: &'a Setup) -> Self {
        Self {
            scheduler: Scheduler::new(setup.scheduler.clone()).expect("the set-up tried them"),
            setup,
            in_flight: VecDeque::new(),
            free_at: Micros(0),
            live: FxHashMap::default(),
            begun: Vec::new(),
            ended: Vec::new(),
            outputs: Vec::new(),
            accepted: Vec::new(),
            tokens: Vec::new(),
            metrics: RunMetrics::new(setup.last_arrival()),
        }
    }

    /// Its load: unanswered requests, then all requests so far.
    pub fn load(&self) -> (usize, u64) {
        (self.live.len(), self.metrics.counts.num_requests)
    }

    /// Runs until everything is answered, and returns the measurements.
    pub fn finish(mut self) -> RunMetrics {
        self.run_until(Micros(u64::MAX));
        self.into_metrics()
    }

    /// The measurements, once everything is answered.
    pub fn into_metrics(mut self) -> RunMetrics {
        assert!(
            self.scheduler.is_idle(),
            "requests are left that get no rows"
        );
        let counts = self.scheduler.stats().counts;
        self.metrics.counts.num_preemptions = counts.num_preemptions;
        self.metrics.counts.num_starvation_grants = counts.num_starvation_grants;
        self.metrics
    }

    /// Completes the steps that are over at `now`.
    pub fn complete_until(&mut self, now: Micros) {
        while self.in_flight.front().is_some_and(|step| step.end <= now) {
            let step = self.in_flight.pop_front().expect("it was just looked at");
            self.complete(&step);
        }
    }

    /// Runs until `now`.
    pub fn run_until(&mut self, now: Micros) {
        while self.in_flight.front().is_some_and(|step| step.end <= now) {
            let step = self.in_flight.pop_front().expect("it was just looked at");
            self.complete(&step);
            self.send_steps(step.end);
        }
    }

    /// Somebody asks which requests have begun and ended.
    fn is_watched(&self) -> bool {
        self.setup.routing == Routing::PrefixAware
    }

    /// Requests whose first token has come since the last call.
    pub fn take_begun(&mut self) -> Vec<RequestId> {
        std::mem::take(&mut self.begun)
    }

    /// Requests that have ended since the last call.
    pub fn take_ended(&mut self) -> Vec<RequestId> {
        std::mem::take(&mut self.ended)
    }

    /// Puts a request into the queue; None if it was refused. Call [`Replica::send_steps`] after the last one of
    /// this time.
    pub fn submit(&mut self, arrival: &Arrival, now: Micros) -> Option<RequestId> {
        self.metrics.counts.num_requests += 1;
        let of_tenant = self.metrics.tenants.entry(arrival.tenant).or_default();
        of_tenant.num_requests += 1;
        of_tenant.num_asked_tokens += u64::from(arrival.num_prompt + arrival.num_output);
        let submitted = self.scheduler.submit(request(arrival), now);
        match &submitted {
            Ok(id) => {
                self.metrics.counts.num_prompt_tokens += u64::from(arrival.num_prompt);
                let live = Live {
                    tenant: arrival.tenant,
                    num_prompt: arrival.num_prompt,
                    is_recomputing: false,
                    arrived: now,
                    last_token: None,
                };
                self.live.insert(*id, live);
            }
            Err(refusal) => self.refuse(refusal, arrival.tenant),
        }
        self.drop_rejected();
        submitted.ok()
    }

    /// Requests that left the queue unserved count as rejected.
    fn drop_rejected(&mut self) {
        for rejected in self.scheduler.take_rejected() {
            let live = self.live.remove(&rejected.request).expect("it ends once");
            if self.is_watched() {
                self.ended.push(rejected.request);
            }
            self.metrics.counts.num_prompt_tokens -= u64::from(live.num_prompt);
            self.refuse(&rejected.refusal, live.tenant);
        }
    }

    fn refuse(&mut self, refusal: &Refusal, tenant: u32) {
        assert!(
            *refusal != Refusal::Draining,
            "a simulated replica never drains"
        );
        self.metrics.counts.num_refused += 1;
        let of_tenant = self.metrics.tenants.entry(tenant).or_default();
        of_tenant.num_refused += 1;
        let is_too_long = matches!(
            refusal,
            Refusal::TooLongForModel { .. } | Refusal::TooLongForPool { .. }
        );
        self.metrics.counts.num_too_long += u64::from(is_too_long);
    }

    /// Plans as many steps as may be in flight.
    pub fn send_steps(&mut self, now: Micros) {
        while self.in_flight.len() < self.setup.scheduler.scheduler.max_in_flight() {
            let Some(plan) = self.plan(now) else {
                return;
            };
            let elapsed = self.setup.cost.time(&plan);
            self.send(&plan, self.free_at.max(now), elapsed);
        }
    }

    /// The next step, if there is something to do.
    pub fn plan(&mut self, now: Micros) -> Option<Plan> {
        let plan = self.scheduler.plan(now);
        self.drop_rejected();
        plan
    }

    /// Its vote as `replica` of a group.
    pub fn vote(&self, plan: Option<&Plan>, replica: u32) -> Vote {
        self.scheduler.vote(plan, replica, 0)
    }

    /// The step that the group takes: the plan, or a dummy row's.
    pub fn apply_decision(&mut self, plan: Option<Plan>, decision: &Decision) -> Option<Plan> {
        let decided = self.scheduler.apply_decision(plan, decision);
        decided.map(|decided| decided.plan)
    }

    /// Sends a step that the worker begins at `start`.
    pub fn send(&mut self, plan: &Plan, start: Micros, elapsed: Micros) {
        self.free_at = Micros(start.0.saturating_add(elapsed.0));
        if !plan.prefill.is_empty() || !plan.decode.is_empty() {
            self.metrics.step(plan, start, elapsed);
        }
        self.count_prefill(plan);
        let num_last_chunks = plan.prefill.iter().filter(|row| row.is_last_chunk).count();
        self.in_flight.push_back(InFlight {
            step: plan.step,
            elapsed,
            end: self.free_at,
            num_samples: num_last_chunks + plan.decode.len(),
        });
    }

    /// Counts the plan's prefill tokens, and those that were computed before a preemption.
    fn count_prefill(&mut self, plan: &Plan) {
        for new in plan.new_slots.iter().filter(|new| new.waited.is_none()) {
            if let Some(live) = self.live.get_mut(&new.request) {
                live.is_recomputing = true;
            }
        }
        for row in &plan.prefill {
            let length = u64::from(row.length);
            let live = &self.live[&row.request];
            self.metrics.counts.num_prefill_tokens += length;
            if live.is_recomputing {
                self.metrics.counts.num_recomputed_tokens += length;
            }
        }
    }

    fn complete(&mut self, step: &InFlight) {
        self.accepted.resize(step.num_samples, 1);
        self.tokens.resize(step.num_samples, ANY_TOKEN);
        let measured = Event::Measured {
            step: step.step,
            elapsed: step.elapsed,
        };
        let result = Event::Result(StepResult {
            step: step.step,
            num_accepted: &self.accepted,
            token_ids: &self.tokens,
        });
        for event in [measured, result] {
            let advanced = self.scheduler.advance(event, &mut self.outputs);
            advanced.expect("the result fits its plan");
        }
        self.observe(step.end);
    }

    fn observe(&mut self, now: Micros) {
        self.metrics.end = now;
        let is_watched = self.is_watched();
        for output in self.outputs.drain(..) {
            match output {
                Output::Tokens {
                    request, tokens, ..
                } => {
                    self.metrics.counts.num_output_tokens += tokens.len() as u64;
                    let live = self.live.get_mut(&request).expect("it has not ended");
                    let mut num_served = tokens.len() as u64;
                    let of_tenant = self.metrics.tenants.entry(live.tenant).or_default();
                    match live.last_token.replace(now) {
                        None => {
                            if is_watched {
                                self.begun.push(request);
                            }
                            of_tenant.ttft.push(now.0 - live.arrived.0);
                            num_served += u64::from(live.num_prompt);
                        }
                        Some(last) => of_tenant.itl.push(now.0 - last.0),
                    }
                    if now <= self.setup.last_arrival() {
                        of_tenant.num_served_tokens += num_served;
                    }
                }
                Output::Finished { request, .. } | Output::Failed { request } => {
                    let live = self.live.remove(&request).expect("it ends once");
                    if is_watched {
                        self.ended.push(request);
                    }
                    self.metrics.e2e.push(now.0 - live.arrived.0);
                }
            }
        }
    }
}

fn request(arrival: &Arrival) -> Request {
    Request {
        prompt: arrival.prompt(),
        max_tokens: arrival.num_output,
        stop_ids: [].into(),
        num_choices: NonZeroU32::MIN,
        prompt_logprobs: false,
        is_masked: false,
        num_slot_words: 0,
        pooled: None,
        priority: arrival.priority,
        tenant: TenantId(arrival.tenant.into()),
        weight: NonZeroU32::MIN,
        salt: 0,
    }
}
