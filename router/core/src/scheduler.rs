//! The three verbs, and the rules by which a plan is made.

use rustc_hash::FxHashMap;

use crate::event::{Event, FinishReason, Output, UnexpectedResult};
use crate::ids::{Micros, RequestId, SlotId, StepId, TokenId};
use crate::in_flight::InFlight;
use crate::itl_target::Pacing;
use crate::kv_cache::KvCache;
use crate::kv_event::KvEvent;
use crate::outlook::Outlook;
use crate::page_pool::PageCounts;
use crate::plan::{DecodeRow, Plan, PrefillRow, TrimmedSlot};
use crate::plan_builder::{MIN_CHUNK, PlanBuilder};
use crate::prefix_sharing::{Chunk, PrefixSharing};
use crate::prompt_share::PromptShare;
use crate::queue::{Queue, QueueKey};
use crate::running_set::RunningSet;
use crate::settings::{Limits, Settings, SettingsError};
use crate::state::{Job, Phase};
use crate::stats::{Counts, Stats};
use crate::step_times::StepTimeStats;

/// Where a request is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Location {
    Queue(QueueKey),
    Slot(SlotId),
}

/// One replica's scheduler. It is a value: a clone continues as the original would.
#[derive(Clone, Debug)]
pub struct Scheduler {
    pub(crate) settings: Settings,
    pub(crate) limits: Limits,
    pub(crate) queue: Queue,
    pub(crate) running: RunningSet,
    pub(crate) cache: KvCache,
    pub(crate) in_flight: InFlight,
    pub(crate) counts: Counts,
    pub(crate) pacing: Pacing,
    pub(crate) outlook: Outlook,
    pub(crate) locations: FxHashMap<RequestId, Location>,
    pub(crate) slot_changes: SlotChanges,
    pub(crate) last_step: StepId,
    pub(crate) is_draining: bool,
    pub(crate) prompt_share: PromptShare,
    pub(crate) sharing: PrefixSharing,
}

/// Changes of slots that no plan has named yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlotChanges {
    /// Slots that were freed.
    pub(crate) freed: Vec<SlotId>,
    /// Slots that lost pages.
    pub(crate) trimmed: Vec<TrimmedSlot>,
}

impl Scheduler {
    /// A scheduler with an empty pool. Fails if no request could ever run.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        let limits = settings.limits()?;
        Ok(Self {
            queue: Queue::new(settings.scheduler.policy),
            running: RunningSet::new(&settings),
            cache: KvCache::new(&settings, limits.watermark),
            in_flight: InFlight::default(),
            counts: Counts::default(),
            pacing: Pacing::new(&settings, &limits),
            outlook: Outlook::new(),
            locations: FxHashMap::default(),
            slot_changes: SlotChanges::default(),
            last_step: StepId(0),
            is_draining: false,
            prompt_share: PromptShare::default(),
            sharing: PrefixSharing::new(settings.runtime.hash_seed),
            settings,
            limits,
        })
    }

    /// Plans the next step; None if no request can have a row now.
    ///
    /// It may be called while earlier steps are in flight. The caller chooses how many.
    pub fn plan(&mut self, now: Micros) -> Option<Plan> {
        self.publish_launched();
        self.queue.preempted.clear();
        self.expire(now);
        let mut builder = PlanBuilder::new(StepId(self.last_step.0 + 1), &self.limits);
        builder.num_prompt_tokens_left = self.prompt_share.of(self.limits.max_batch_tokens);
        if self.has_trial() {
            if self.num_in_flight() > 0 {
                return None;
            }
            self.schedule_trial(now, &mut builder);
        }
        if !self.has_trial() {
            self.schedule_all(now, &mut builder);
        }
        if builder.is_empty() {
            return None;
        }
        let num_tokens = self.limits.max_batch_tokens - builder.num_tokens_left;
        self.outlook.served.observe_plan(num_tokens, now);
        Some(self.launch(builder))
    }

    fn schedule_all(&mut self, now: Micros, builder: &mut PlanBuilder) {
        self.make_way(builder);
        if self.settings.scheduler.mixed {
            self.schedule_starved_prefill(builder);
            self.schedule_decodes(builder);
            self.schedule_prefills(builder);
            self.admit(now, builder);
        } else {
            self.schedule_prefills(builder);
            self.admit(now, builder);
            if builder.is_empty() {
                self.schedule_decodes(builder);
            }
        }
    }

    /// Takes an event, and appends what follows to `outputs`, in order.
    ///
    /// Aborting or stopping a request that has ended is no error: the two cross on their way. After
    /// an error nothing has changed.
    pub fn advance(
        &mut self,
        event: Event<'_>,
        outputs: &mut Vec<Output>,
    ) -> Result<(), UnexpectedResult> {
        self.publish_launched();
        match event {
            Event::Result(result) => self.complete(&result, outputs)?,
            Event::Measured { step, elapsed } => {
                self.pacing.measure(step, elapsed);
            }
            Event::MaskReady(request) => self.note_mask(request),
            Event::Abort(request) => self.end(request, FinishReason::Abort, outputs),
            Event::Stop(request) => self.end(request, FinishReason::Stop, outputs),
            Event::FlushCache => self.flush_cache(),
        }
        Ok(())
    }

    fn flush_cache(&mut self) {
        self.publish_launched(); // else the next plan would publish what was computed before
        self.cache.unpublish_all();
        self.queue.for_each(Job::forget_cached);
    }

    /// Records from now on which pages prompts can find. The caller must take the events.
    pub fn record_kv_events(&mut self) {
        self.cache.record_events();
    }

    /// Moves the events since the last call to `into`. Those of one cache kind are in order.
    pub fn take_kv_events(&mut self, into: &mut Vec<KvEvent>) {
        self.cache.take_events(into);
    }

    /// The limits that follow from the settings.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes no new requests. Those already taken are served to their end.
    pub fn drain(&mut self) {
        self.is_draining = true;
    }

    /// Nothing waits, runs or is in flight.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.running.is_empty() && self.num_in_flight() == 0
    }

    /// Number of steps in flight.
    pub fn num_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Expected time of a step in flight; None if no step with such rows was measured.
    pub fn expected(&self, step: StepId) -> Option<Micros> {
        self.pacing.times.expected(step)
    }

    /// Expected time of a step in flight; None unless steps that did half as much or more were measured
    /// lately.
    pub fn expected_if_alike(&self, step: StepId) -> Option<Micros> {
        self.pacing.times.expected_if_alike(step)
    }

    /// What has been learned of step times.
    pub fn step_time_stats(&self) -> StepTimeStats {
        self.pacing.times.stats()
    }

    /// Tokens of a request's prompt; None once it has ended.
    pub fn prompt_len(&self, request: RequestId) -> Option<u32> {
        self.job(request).map(Job::prompt_len)
    }

    /// Tokens that a request may come to, with its prompt's; None once it has ended.
    pub fn most_tokens(&self, request: RequestId) -> Option<u64> {
        self.job(request).map(Job::most_tokens)
    }

    /// The output so far of a request that has not ended.
    pub fn output(&self, request: RequestId) -> &[TokenId] {
        self.job(request).map_or(&[], Job::output)
    }

    fn job(&self, request: RequestId) -> Option<&Job> {
        match self.locations.get(&request)? {
            Location::Queue(key) => self.queue.job(*key),
            Location::Slot(slot) => self.running.get(*slot).map(|running| &*running.job),
        }
    }

    /// Whether the request has a slot; None once it has ended.
    pub fn is_running(&self, request: RequestId) -> Option<bool> {
        let location = self.locations.get(&request)?;
        Some(matches!(location, Location::Slot(_)))
    }

    /// Counts for the metrics.
    pub fn stats(&self) -> Stats {
        Stats {
            num_waiting: self.queue.room.num_requests(),
            num_running: self.running.len(),
            num_in_flight: self.num_in_flight(),
            pages: self.cache.counts(0),
            snapshots: self.cache.snapshot_counts(),
            counts: Counts {
                num_evictions: self.cache.num_evicted(),
                ..self.counts
            },
        }
    }

    /// Pages of one cache kind by state. Kinds count from 0.
    pub fn page_counts(&self, kind: usize) -> PageCounts {
        self.cache.counts(kind)
    }

    /// Rule 1, the starvation grant: a prefill without a row for too long goes first, with one page at
    /// most, or a part of the ITL target.
    fn schedule_starved_prefill(&mut self, builder: &mut PlanBuilder) {
        let Some(slot) = self.running.first_prefill() else {
            return;
        };
        let running = self.running.at(slot);
        if builder.step.0 - running.last_step.0
            <= u64::from(self.settings.scheduler.prefill_starvation_steps)
        {
            return;
        }
        let (start, left) = (running.num_planned, running.num_to_prefill());
        let in_time = self.pacing.grant(start);
        let most = in_time
            .max(self.settings.pages.page_size)
            .min(self.limits.long_prefill_token_threshold)
            .min(self.limits.max_batch_tokens);
        let length = left.min(most);
        if self.prefill_row(slot, &Chunk { start, length }, builder) {
            self.counts.num_starvation_grants += 1;
        }
    }

    /// Rule 2: one row for every decoder, round-robin.
    fn schedule_decodes(&mut self, builder: &mut PlanBuilder) {
        let mut num_asked = 0;
        let num_rows = self.running.decode_queue().len().min(builder.num_rows_left);
        builder.decode.reserve(num_rows as usize);
        self.running.decode_queue().begin_round();
        while let Some(slot) = self.running.decode_queue().next() {
            let running = self.running.at(slot);
            if running.last_step == builder.step {
                return;
            }
            let length = running
                .num_left()
                .min(1 + self.settings.runtime.draft_width);
            if builder.is_full() {
                return self.count_carryover(num_asked, builder);
            }
            num_asked += 1;
            if length > builder.num_tokens_left {
                self.counts.carryover.tokens += 1;
                self.running.decode_queue().pass(slot);
                continue;
            }
            self.decode_row(slot, length, builder);
        }
    }

    /// Rule 3: running prefills, in order, while tokens are left. Where time cuts one, none follows.
    fn schedule_prefills(&mut self, builder: &mut PlanBuilder) {
        let mut next = self.running.first_prefill();
        while let Some(slot) = next {
            let running = self.running.at(slot);
            let order = running.job.order;
            let has_row = running.last_step == builder.step;
            let chunk = if has_row {
                None
            } else {
                self.next_chunk(slot, builder)
            };
            if chunk.is_some_and(|chunk| !self.prefill_row(slot, &chunk, builder)) {
                return;
            }
            next = self
                .running
                .prefill_after(order)
                .filter(|_| !builder.is_full());
        }
    }

    /// How short time may cut the next chunk of a running prefill.
    pub(crate) fn shortest_chunk(&self, slot: SlotId) -> u32 {
        let is_first = self.running.first_prefill() == Some(slot);
        let start = self.running.at(slot).num_planned;
        let Pacing { times, target } = &self.pacing;
        let target = target.as_ref().filter(|_| is_first);
        target.map_or(MIN_CHUNK, |target| target.shortest_chunk(times, start))
    }

    /// Tokens of the `remaining` ones from `start` on that a chunk may take now; None if the chunk
    /// would be too short. If time cuts it, even below `shortest`, the plan is out of time.
    pub(crate) fn chunk_length(
        &self,
        start: u32,
        remaining: u32,
        shortest: u32,
        builder: &mut PlanBuilder,
    ) -> Option<u32> {
        let most = remaining.min(self.limits.long_prefill_token_threshold);
        let in_tokens = most
            .min(builder.num_tokens_left)
            .min(builder.num_prompt_tokens_left);
        let in_time = self.pacing.prefill_budget(builder, start);
        builder.is_out_of_time = in_time < in_tokens;
        let shortest = if builder.is_out_of_time {
            shortest
        } else {
            MIN_CHUNK
        };
        let least = most.min(shortest).min(self.limits.max_batch_tokens);
        let length = in_tokens.min(in_time);
        (length >= least && builder.num_rows_left > 0).then_some(length)
    }

    pub(crate) fn prefill_row(
        &mut self,
        slot: SlotId,
        chunk: &Chunk,
        builder: &mut PlanBuilder,
    ) -> bool {
        let chunk = self.shrink_to_free_pages(slot, chunk);
        let Chunk { start, length } = chunk;
        if !self.lease_chunk(slot, &chunk, builder) {
            return false;
        }
        self.announce(slot, start, builder);
        let job = &mut self.running.at_mut(slot).job;
        let (order, end) = (job.order, start + length);
        let is_last_chunk = job.samples_at(end);
        if is_last_chunk && job.is_masked() {
            builder.masked.insert(slot);
        }
        let lookahead = !is_last_chunk && job.wants_lookahead(end);
        let prompt_logprobs = job.claim_prompt_positions(start, end);
        let request = job.id();
        builder.push_prefill(
            order,
            PrefillRow {
                request,
                slot,
                start,
                length,
                is_last_chunk,
                lookahead,
                prompt_logprobs,
            },
        );
        self.charge_chunk(slot);
        self.running
            .schedule_row(slot, builder.step, length, u32::from(is_last_chunk));
        self.save_boundaries(slot, end, builder);
        true
    }

    fn decode_row(&mut self, slot: SlotId, length: u32, builder: &mut PlanBuilder) {
        let running = self.running.at(slot);
        let (start, next_save) = (running.num_planned, running.next_save);
        if !self.lease_pages(slot, start + length, builder) {
            self.counts.carryover.pages += 1;
            if self
                .running
                .get(slot)
                .is_some_and(|running| running.phase == Phase::Decoding)
            {
                self.running.decode_queue().pass(slot);
            }
            return;
        }
        let job = &self.running.at(slot).job;
        if job.is_masked() {
            builder.masked.insert(slot);
        }
        builder.push_decode(
            job.order,
            DecodeRow {
                request: job.id(),
                slot,
                start,
                length,
            },
        );
        self.charge_decode_row(slot, start, length);
        self.running
            .schedule_row(slot, builder.step, length, length);
        if next_save <= start + length {
            self.save_boundaries(slot, start + length, builder);
        }
    }

    fn count_carryover(&mut self, num_asked: u32, builder: &PlanBuilder) {
        let num_left = u64::from(self.running.decode_queue().len().saturating_sub(num_asked));
        let carryover = &mut self.counts.carryover;
        let cause = if builder.num_rows_left > 0 {
            &mut carryover.tokens
        } else {
            &mut carryover.rows
        };
        *cause += num_left;
    }
}
