//! A replica that serves: the scheduler, the steps in flight, and the requests that wait for tokens.

mod masks;
mod moves;
mod results;

use std::collections::VecDeque;
use std::sync::Arc;

use plait_core::{
    Decision, Event, KvEvent, Limits, Micros, Output, Plan, Rejected, RequestId, Scheduler,
    Settings, SettingsError, StepId, Vote,
};
use plait_openai::{ApiError, PreparedPrompt};
use plait_proto::{Adjustment, NewSlot, PooledSlot, ScoredId};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::clock::{micros, since};
use crate::deadlines::{DeadlineSettings, Deadlines};
use crate::first_uses::FirstUses;
use crate::group::GroupStepTimes;
use crate::intake::Admission;
use crate::kv_events::KvEventQueue;
use crate::listing::ListedRequest;
use crate::live_request::LiveRequest;
use crate::masks::{MaskAnswers, MaskJobs};
use crate::metrics::{Ending, Rejection};
use crate::output::StreamEvent;
use crate::output_queue::StreamId;
use crate::shared::{ReplicaShared, Shared};
use crate::step::{MeasuredRow, NewSlots, PlanWriter, StepInFlight};
use crate::step_trace::StepRecorder;
use crate::stream_times::{Moment, StreamTimes, TimedResponse};
use crate::timeouts::Timeouts;

/// What a replica is started with.
pub struct ServingConfig {
    /// The scheduler's settings.
    pub settings: Settings,
    /// Plans that may be in flight.
    pub credit: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// How long requests may take.
    pub deadlines: DeadlineSettings,
    /// Limits on waiting.
    pub timeouts: Timeouts,
    /// What all replicas share.
    pub shared: Arc<Shared>,
    /// What this one shares with others.
    pub own: Arc<ReplicaShared>,
    /// Writes the step trace, if there is one.
    pub recorder: Option<StepRecorder>,
    /// Takes KV events, if they are published.
    pub kv_events: Option<Arc<KvEventQueue>>,
    /// To the mask threads.
    pub masks: MaskJobs,
}

/// Under a target for step times, the next step is planned this long before the last one should end.
/// Requests that arrive until then join it. A plan takes 0.5 ms to the device and back, a graph launch up
/// to 2.5 ms, and the driver wakes up to 1 ms late.
const LEAD: Micros = Micros(4_000);

/// A step that is planned and not yet sent.
pub struct PlannedStep {
    plan: Plan,
    step: StepInFlight,
    new_slots: NewSlots,
}

/// A replica from its first plan to its end.
// budget: all that the driver knows of a replica that serves
pub struct Serving {
    scheduler: Scheduler,
    config: ServingConfig,
    writer: PlanWriter,
    in_flight: VecDeque<StepInFlight>,
    /// Since when the worker computes the oldest step in flight.
    oldest_since: Micros,
    requests: FxHashMap<RequestId, LiveRequest>,
    streams: FxHashMap<StreamId, SmallVec<[RequestId; 1]>>,
    first_uses: FirstUses,
    group_steps: GroupStepTimes,
    /// Live requests that want log-probabilities. At 0 no row is searched for them.
    num_measured: usize,
    outputs: Vec<Output>,
    events: Vec<StreamEvent>,
    masks: MaskAnswers,
    deadlines: Deadlines,
    /// The log says that decoding alone misses the ITL target.
    has_warned: bool,
    kv_events: Vec<KvEvent>,
}

impl Serving {
    /// An empty replica. Fails if no request could ever run.
    pub fn new(config: ServingConfig) -> Result<Self, SettingsError> {
        let mut scheduler = Scheduler::new(config.settings.clone())?;
        if config.kv_events.is_some() {
            scheduler.record_kv_events();
        }
        let max_rows = scheduler.limits().max_rows;
        let masks = MaskAnswers::new(
            config.masks.clone(),
            config.own.clone(),
            max_rows,
            config.vocab_size,
        );
        Ok(Self {
            scheduler,
            deadlines: Deadlines::new(config.deadlines),
            config,
            masks,
            writer: PlanWriter::default(),
            in_flight: VecDeque::new(),
            oldest_since: Micros(0),
            requests: FxHashMap::default(),
            streams: FxHashMap::default(),
            first_uses: FirstUses::default(),
            group_steps: GroupStepTimes::default(),
            num_measured: 0,
            outputs: Vec::new(),
            events: Vec::new(),
            has_warned: false,
            kv_events: Vec::new(),
        })
    }

    /// The settings of the Welcome.
    pub fn settings(&self) -> &Settings {
        &self.config.settings
    }

    /// The limits that follow from them.
    pub fn limits(&self) -> &Limits {
        self.scheduler.limits()
    }

    /// Plans that may be in flight.
    pub fn credit(&self) -> usize {
        self.config.credit
    }

    /// Nothing waits, runs, or is in flight.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// When the oldest step in flight is overdue.
    pub fn oldest_deadline(&self) -> Option<Micros> {
        let step = self.in_flight.front()?;
        let end = self.oldest_since.0.saturating_add(micros(step.limit));
        Some(Micros(end))
    }

    /// Queues all choices of a stream, or none.
    pub fn admit(&mut self, admission: Admission, now: Micros) {
        let Admission {
            stream,
            received,
            prepared,
            constrained,
        } = admission;
        let times = Arc::new(StreamTimes::new(received));
        let (mut submitted, mut lives) = (Vec::new(), Vec::new());
        for PreparedPrompt { request, choices } in prepared.prompts {
            let choices = choices.into_iter();
            lives.extend(
                choices.map(|it| LiveRequest::new(&request, it, stream, received, times.clone())),
            );
            submitted.push(request);
        }
        let num_prompts = submitted.len();
        let num_prompt_tokens: usize = submitted.iter().map(|it| it.prompt.len()).sum();
        let taken = self.scheduler.submit_all(submitted, now);
        self.fail_rejected();
        let requests = match taken {
            Ok(requests) => SmallVec::from_vec(requests),
            Err(refusal) => return self.refuse(stream, refusal),
        };
        for (request, live) in requests.iter().zip(lives) {
            self.num_measured += usize::from(live.wants_logprobs());
            self.requests.insert(*request, live);
        }
        let metrics = &self.config.own.metrics.requests;
        metrics.prompt_tokens.inc_by(num_prompt_tokens as u64);
        let num_further = requests.len() - num_prompts;
        metrics.further_choices.inc_by(num_further as u64);
        self.streams.insert(stream, requests.clone());
        self.events.push(StreamEvent::Open {
            stream,
            response: TimedResponse::new(prepared.response, times),
            requests: requests.clone(),
        });
        for (request, answer) in requests.iter().zip(constrained) {
            if self.masks.open(*request, answer) {
                self.stop(*request);
            }
        }
    }

    /// The client is gone. Its requests return their pages when the steps in flight are complete.
    pub fn abort(&mut self, stream: StreamId) {
        if let Some(requests) = self.forget(stream) {
            self.events.push(StreamEvent::Forget(stream));
            self.end_requests(&requests, Event::Abort);
        }
    }

    /// Ends a stream with an error that its client reads.
    pub fn end_stream(&mut self, stream: StreamId, error: ApiError) {
        if let Some(requests) = self.forget(stream) {
            self.events.push(StreamEvent::Fail { stream, error });
            self.end_requests(&requests, Event::Abort);
        }
    }

    /// When requests that take too long are looked for next; None if there are none, or nothing bounds them.
    pub fn next_look_for_late(&self) -> Option<Micros> {
        let is_empty = self.requests.is_empty();
        self.deadlines.next_look().filter(|_| !is_empty)
    }

    /// Ends the streams of requests that take too long.
    pub fn end_late(&mut self, now: Micros) {
        if !self.deadlines.is_due(now) {
            return;
        }
        let late = self.requests.values().filter_map(|live| {
            let error = self.deadlines.passed_by(live, now)?;
            Some((live.stream, error))
        });
        let late: Vec<_> = late.collect();
        for (stream, error) in late {
            self.end_stream(stream, error);
        }
    }

    /// Prompts find nothing of what was computed before.
    pub fn flush_cache(&mut self) {
        let flushed = self.scheduler.advance(Event::FlushCache, &mut self.outputs);
        flushed.expect("only results can be unexpected");
    }

    /// All requests that have not ended, in the order in which they came.
    pub fn list_requests(&self) -> Vec<ListedRequest> {
        let now = self.config.shared.clock.now();
        let listed = self.requests.iter().filter_map(|(request, live)| {
            let running = self.scheduler.is_running(*request)?;
            Some((
                *request,
                ListedRequest {
                    stream: live.stream,
                    replica: self.config.own.number,
                    running,
                    prompt_tokens: self.scheduler.prompt_len(*request)?,
                    output_tokens: self.scheduler.output(*request).len(),
                    seconds: since(live.received, now).as_secs_f64(),
                },
            ))
        });
        let mut listed: Vec<_> = listed.collect();
        listed.sort_by_key(|(request, _)| *request);
        listed.into_iter().map(|(_, listed)| listed).collect()
    }

    /// Ends a request at a stop string.
    pub fn stop(&mut self, request: RequestId) {
        self.end_requests(&[request], Event::Stop);
    }

    /// The frames of the next step, if credit is left, it is time, and there is something to do.
    pub fn next_step(&mut self, now: Micros) -> Option<&[Vec<u8>]> {
        if !self.has_credit() || self.next_plan_due().is_some_and(|time| now < time) {
            return None;
        }
        let PlannedStep {
            plan,
            step,
            new_slots,
        } = self.plan_step(now)?;
        if self.in_flight.is_empty() {
            self.oldest_since = now;
        }
        let awaits_masks = !step.awaiting.is_empty();
        self.in_flight.push_back(step);
        Some(self.writer.write(&plan, new_slots, None, awaits_masks))
    }

    /// When the next step is to be planned under a target for step times; None plans as soon as it can.
    pub fn next_plan_due(&self) -> Option<Micros> {
        self.limits().itl_target?;
        let last = self.in_flight.back().filter(|_| self.has_credit())?;
        let expected = self.scheduler.expected(StepId(last.step))?;
        let end = self.oldest_since.0.saturating_add(expected.0);
        Some(Micros(end.saturating_sub(LEAD.0)))
    }

    /// One more plan may be sent.
    pub fn has_credit(&self) -> bool {
        self.in_flight.len() < self.config.credit
    }

    /// Plans the next step, if there is something to do.
    pub fn plan_step(&mut self, now: Micros) -> Option<PlannedStep> {
        let plan = self.scheduler.plan(now);
        self.note_preempted(now);
        self.fail_rejected();
        let plan = plan?;
        let step = self.remember(&plan, now);
        let new_slots = plan.new_slots.iter().map(|new| NewSlot {
            slot: new.slot.0,
            next_output: new.next_output,
            sampling: self.requests[&new.request].sampling,
        });
        Some(PlannedStep {
            new_slots: NewSlots {
                slots: new_slots.collect(),
                adjustments: self.adjustments_of(&plan),
                scored_ids: self.scored_ids_of(&plan),
                pooled: self.pooled_of(&plan),
            },
            plan,
            step,
        })
    }

    fn note_preempted(&mut self, now: Micros) {
        for request in self.scheduler.take_preempted() {
            if let Some(live) = self.requests.get(&request) {
                live.times.note(Moment::Preempted, now);
            }
        }
    }

    fn adjustments_of(&self, plan: &Plan) -> Vec<Adjustment> {
        let asked = plan.new_slots.iter().filter_map(|new| {
            let adjustment = self.requests[&new.request].adjustment.as_deref()?;
            Some(Adjustment {
                slot: new.slot.0,
                output_ids: self.scheduler.output(new.request).to_vec(),
                ..adjustment.clone()
            })
        });
        asked.collect()
    }

    fn pooled_of(&self, plan: &Plan) -> Vec<PooledSlot> {
        let pooled = plan.new_slots.iter().filter_map(|new| {
            let pooling = self.requests[&new.request].pooled?.pooling;
            let slot = new.slot.0;
            Some(PooledSlot { slot, pooling })
        });
        pooled.collect()
    }

    fn scored_ids_of(&self, plan: &Plan) -> Vec<ScoredId> {
        let of_slot = |new: &plait_core::NewSlot| {
            let (slot, ids) = (new.slot.0, self.requests[&new.request].scored_ids.clone());
            (0..ids.len()).map(move |index| ScoredId {
                slot,
                id: ids[index],
            })
        };
        plan.new_slots.iter().flat_map(of_slot).collect()
    }

    /// The vote of `replica` on the step that was just planned, or on having none.
    pub fn vote(&self, planned: Option<&PlannedStep>, replica: u32, largest_graph: u32) -> Vote {
        let plan = planned.map(|planned| &planned.plan);
        self.scheduler.vote(plan, replica, largest_graph)
    }

    /// The frames of the step that the group takes: the planned one, or a dummy row. None if no replica has
    /// rows.
    pub fn apply_decision(
        &mut self,
        planned: Option<PlannedStep>,
        decision: &Decision,
        now: Micros,
    ) -> Option<&[Vec<u8>]> {
        let (plan, known) = planned
            .map(|planned| (planned.plan, (planned.step, planned.new_slots)))
            .unzip();
        let (step, new_slots) = known.unzip();
        let decided = self.scheduler.apply_decision(plan, decision)?;
        let expected = self.group_steps.launch(decision);
        let expected = expected.filter(|_| !self.first_uses.is_any_due());
        let limit = self.config.timeouts.of_step(decision.pad_tokens, expected);
        let mut step = step.unwrap_or_else(|| StepInFlight::new(&decided.plan, limit));
        step.limit = limit;
        if self.in_flight.is_empty() {
            self.oldest_since = now;
        }
        let awaits_masks = !step.awaiting.is_empty();
        self.in_flight.push_back(step);
        let new_slots = new_slots.unwrap_or_default();
        Some(
            self.writer
                .write(&decided.plan, new_slots, Some(decision), awaits_masks),
        )
    }

    /// The ranks are gone: every request is computed again by others, and goes on behind its last token.
    pub fn lose_ranks(&mut self) {
        self.in_flight.clear();
        self.masks.lose_ranks();
        self.first_uses = FirstUses::default();
        for live in self.requests.values_mut() {
            live.awaits_token = true;
        }
        for request in self.scheduler.lose_ranks() {
            self.fail_request(request, ApiError::took_workers_down());
        }
    }

    /// Ends the stream of a request that the scheduler has ended with an error.
    fn fail_request(&mut self, request: RequestId, error: ApiError) {
        let Some(live) = self.requests.remove(&request) else {
            return;
        };
        self.num_measured -= usize::from(live.wants_logprobs());
        self.masks.close(request);
        self.config.own.metrics.requests.finish(Ending::Error);
        let stream = live.stream;
        if let Some(mut others) = self.forget(stream) {
            others.retain(|other| *other != request);
            self.events.push(StreamEvent::Fail { stream, error });
            self.end_requests(&others, Event::Abort);
        }
    }

    /// Takes no new request.
    pub fn drain(&mut self) {
        self.scheduler.drain();
    }

    /// Ends every stream with an error. No step in flight counts any more.
    pub fn fail_all(&mut self, error: &ApiError) {
        self.in_flight.clear();
        self.scheduler.lose_ranks();
        for (request, _) in self.requests.drain() {
            self.config.own.metrics.requests.finish(Ending::Error);
            let ended = self
                .scheduler
                .advance(Event::Abort(request), &mut self.outputs);
            ended.expect("only results can be unexpected");
        }
        self.outputs.clear();
        for (stream, _) in self.streams.drain() {
            let error = error.clone();
            self.config.shared.routes.finish(stream);
            self.events.push(StreamEvent::Fail { stream, error });
        }
    }

    /// The events for the output thread.
    pub fn take_events(&mut self) -> Vec<StreamEvent> {
        std::mem::take(&mut self.events)
    }

    /// Copies the scheduler's counts to the metrics.
    pub fn publish(&mut self) {
        let own = &self.config.own;
        let stats = self.scheduler.stats();
        let model = self.scheduler.step_time_stats();
        own.metrics.scheduler.copy(&stats);
        own.metrics.losses.copy(&stats.counts);
        own.metrics.step_model.copy(&model, &stats.counts);
        own.status.set_idle(self.is_idle());
        self.warn_of_missed_target(stats.counts.num_decodes_over_target);
    }

    /// The log says once that decoding alone misses the ITL target.
    fn warn_of_missed_target(&mut self, num_missed: u64) {
        if num_missed > 0 && !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!(
                "steps that only decode take longer than --itl-target-ms, which leaves prompts a quarter of it after each \
                 {} steps: raise the target, or lower --max-seqs",
                self.config.settings.scheduler.prefill_starvation_steps
            );
        }
    }

    /// Passes KV events on.
    pub fn send_kv_events(&mut self) {
        if let Some(queue) = &self.config.kv_events {
            self.scheduler.take_kv_events(&mut self.kv_events);
            queue.put(&mut self.kv_events);
        }
    }

    fn forget(&mut self, stream: StreamId) -> Option<SmallVec<[RequestId; 1]>> {
        self.config.shared.routes.finish(stream);
        self.streams.remove(&stream)
    }

    /// The stream counts as one rejection, however many choices it has.
    fn refuse(&mut self, stream: StreamId, refusal: plait_core::Refusal) {
        self.config.shared.routes.finish(stream);
        let metrics = &self.config.own.metrics.requests;
        metrics.reject(Rejection::from(&refusal));
        let error = ApiError::from(refusal).retry_after(self.retry_after_seconds());
        self.events.push(StreamEvent::Fail { stream, error });
    }

    /// When all who wait now should have run, at the recent rate.
    fn retry_after_seconds(&self) -> u16 {
        let wait = self.scheduler.queue_clears_in();
        let seconds = wait.map_or(1, |wait| wait.0.div_ceil(1_000_000));
        u16::try_from(seconds).unwrap_or(u16::MAX)
    }

    /// Fails the streams of requests that left the queue unserved.
    fn fail_rejected(&mut self) {
        for Rejected { request, refusal } in self.scheduler.take_rejected() {
            let Some(live) = self.requests.remove(&request) else {
                continue;
            };
            self.num_measured -= usize::from(live.wants_logprobs());
            if let Some(mut others) = self.forget(live.stream) {
                others.retain(|other| *other != request);
                self.refuse(live.stream, refusal);
                self.end_requests(&others, Event::Abort);
            }
        }
    }

    fn end_requests(&mut self, requests: &[RequestId], event: fn(RequestId) -> Event<'static>) {
        for request in requests {
            let ended = self.scheduler.advance(event(*request), &mut self.outputs);
            ended.expect("only results can be unexpected");
        }
        self.emit_outputs(Micros(0), &mut Vec::new());
    }

    /// Keeps what the plan's result will be read with.
    fn remember(&mut self, plan: &Plan, now: Micros) -> StepInFlight {
        let queue = &self.config.own.metrics.latency.queue;
        for new in &plan.new_slots {
            if let Some(live) = self.requests.get_mut(&new.request) {
                live.begin(now);
                if new.waited.is_some() {
                    queue.observe(since(live.received, now));
                }
                self.first_uses.begin(new.request, live.way());
            }
        }
        for row in &plan.prefill {
            let live = self.requests.get_mut(&row.request);
            if let Some(num_tokens) = live.and_then(|live| live.prompt.advance(row)) {
                let request = row.request;
                self.events.push(StreamEvent::CachedTokens {
                    request,
                    num_tokens,
                });
            }
        }
        let is_known = !self.first_uses.is_any_due();
        let expected = self.scheduler.expected_if_alike(plan.step);
        let expected = expected.filter(|_| is_known);
        let limit = self.config.timeouts.of_step(plan.num_tokens(), expected);
        let mut step = StepInFlight::new(plan, limit);
        if self.num_measured > 0 {
            self.mark_measured(plan, &mut step);
        }
        let ends_pooled = |row: &&plait_core::PrefillRow| {
            let live = self.requests.get(&row.request);
            !row.lookahead && live.is_some_and(|live| live.pooled.is_some())
        };
        step.pooled = plan
            .prefill
            .iter()
            .filter(ends_pooled)
            .map(|row| row.request)
            .collect();
        step.awaiting = self.masks.rows_of(plan);
        step
    }

    fn mark_measured(&self, plan: &Plan, step: &mut StepInFlight) {
        let last_chunks = plan
            .prefill
            .iter()
            .filter(|row| row.is_last_chunk)
            .map(|row| row.request);
        let decoders = plan.decode.iter().map(|row| row.request);
        step.sampled = last_chunks
            .chain(decoders)
            .map(|request| self.requests[&request].sampling.logprobs)
            .collect();
        let measured = plan.prefill.iter().filter_map(|row| {
            let num_top = self.requests[&row.request].sampling.prompt_logprobs?;
            Some(MeasuredRow::new(row, num_top))
        });
        step.measured = measured.collect();
    }
}
