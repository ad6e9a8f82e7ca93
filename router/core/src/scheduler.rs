//! The three verbs, and the rules by which a plan is made.

use rustc_hash::FxHashMap;

use crate::draft::Draft;
use crate::event::{Event, FinishReason, Output, UnexpectedResult};
use crate::flight::Flights;
use crate::ids::{Micros, RequestId, SlotId, StepId};
use crate::pages::PagePool;
use crate::plan::{DecodeRow, Plan, PrefillRow};
use crate::queue::Queue;
use crate::request::{Refusal, Request};
use crate::roster::Roster;
use crate::settings::{Settings, SettingsError};
use crate::state::{Job, Order, Phase, Queued};
use crate::stats::{Counts, Stats};
use crate::time_target::TimeTarget;

/// A chunk is not cut shorter than this for lack of tokens: a remainder of 3 in every plan would
/// take a prompt of 8,192 tokens through thousands of steps.
pub(crate) const MIN_CHUNK: u32 = 16;

/// Where a request is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Queue(Order),
    Slot(SlotId),
}

/// One replica's scheduler. It is a value: a clone goes on as the original would.
#[derive(Clone, Debug)]
pub struct Scheduler {
    pub(crate) settings: Settings,
    pub(crate) queue: Queue,
    pub(crate) roster: Roster,
    pub(crate) pages: PagePool,
    pub(crate) flights: Flights,
    pub(crate) counts: Counts,
    pub(crate) time_target: Option<TimeTarget>,
    pub(crate) places: FxHashMap<RequestId, Place>,
    /// Slots that the worker has not been told of yet.
    pub(crate) freed_slots: Vec<SlotId>,
    num_submitted: u64,
    pub(crate) last_step: StepId,
    is_draining: bool,
}

impl Scheduler {
    /// A scheduler with an empty pool; fails where no request could ever run.
    pub fn new(settings: Settings) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self {
            queue: Queue::default(),
            roster: Roster::new(&settings),
            pages: PagePool::new(settings.num_pages),
            flights: Flights::default(),
            counts: Counts::default(),
            time_target: TimeTarget::new(&settings),
            places: FxHashMap::default(),
            freed_slots: Vec::new(),
            num_submitted: 0,
            last_step: StepId(0),
            is_draining: false,
            settings,
        })
    }

    /// Takes a request into the queue, its output capped by the model's length and the pool.
    pub fn submit(&mut self, request: Request, now: Micros) -> Result<RequestId, Refusal> {
        if self.is_draining {
            return Err(Refusal::Draining);
        }
        let num_due = num_due(&request, &self.settings)?;
        self.queue
            .check_room(request.prompt.len(), &self.settings)?;
        let id = RequestId(self.num_submitted);
        self.num_submitted += 1;
        let job = Box::new(Job::new(id, request, num_due));
        self.enqueue(Queued::Waiting { job, since: now });
        Ok(id)
    }

    /// Decides the next step; nothing where no request can have a row now.
    ///
    /// May be called while earlier steps have no result yet. How many may be in flight is the
    /// caller's choice.
    pub fn plan(&mut self, now: Micros) -> Option<Plan> {
        let mut draft = Draft::new(StepId(self.last_step.0 + 1), &self.settings);
        if self.settings.mixed {
            self.grant(&mut draft);
            self.decode(&mut draft);
            self.resume(&mut draft);
            self.admit(now, &mut draft);
        } else {
            self.resume(&mut draft);
            self.admit(now, &mut draft);
            if draft.is_empty() {
                self.decode(&mut draft);
            }
        }
        (!draft.is_empty()).then(|| self.launch(draft))
    }

    /// Takes in what happened. What follows from it is appended to `outputs`, in order.
    ///
    /// An abort or a stop of a request that has ended is no error: the two cross on their way.
    /// After an error nothing has changed.
    pub fn advance(
        &mut self,
        event: Event<'_>,
        outputs: &mut Vec<Output>,
    ) -> Result<(), UnexpectedResult> {
        match event {
            Event::Result(result) => self.land(&result, outputs)?,
            Event::Measured { step, elapsed } => {
                if let Some(target) = &mut self.time_target {
                    target.measure(step, elapsed);
                }
            }
            Event::Abort(request) => self.end(request, FinishReason::Abort, outputs),
            Event::Stop(request) => self.end(request, FinishReason::Stop, outputs),
        }
        Ok(())
    }

    /// Closes submission; what was taken is served to its end.
    pub fn drain(&mut self) {
        self.is_draining = true;
    }

    /// Nothing waits, runs or is on the wire.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.roster.is_empty() && self.num_in_flight() == 0
    }

    /// Steps on the wire.
    pub fn num_in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Tokens of a request's prompt; nothing once it has ended.
    pub fn prompt_len(&self, request: RequestId) -> Option<u32> {
        let job = match self.places.get(&request)? {
            Place::Queue(order) => self.queue.get(*order)?.job(),
            Place::Slot(slot) => &self.roster.get(*slot)?.job,
        };
        Some(job.prompt_len())
    }

    /// Counts for the metrics.
    pub fn stats(&self) -> Stats {
        Stats {
            num_waiting: self.queue.len(),
            num_running: self.roster.len(),
            num_in_flight: self.num_in_flight(),
            pages: self.pages.counts(),
            counts: self.counts,
        }
    }

    pub(crate) fn enqueue(&mut self, queued: Queued) {
        let order = queued.job().order;
        self.places.insert(queued.job().id(), Place::Queue(order));
        self.queue.push(queued);
    }

    /// Rule 1: a prefill that had no row for too long comes before the decoders, with a page at most.
    fn grant(&mut self, draft: &mut Draft) {
        let Some(slot) = self.roster.first_prefill() else {
            return;
        };
        let running = self.roster.seated(slot);
        if draft.step.0 - running.last_step.0 <= u64::from(self.settings.starvation_steps) {
            return;
        }
        let settings = &self.settings;
        let most = settings
            .page_size
            .min(settings.long_prefill)
            .min(settings.max_batch_tokens);
        let length = running.num_to_prefill().min(most);
        if self.prefill_row(slot, length, draft) {
            self.counts.num_starvation_grants += 1;
        }
    }

    /// Rule 2: every decoder in turn, one token and one row each.
    fn decode(&mut self, draft: &mut Draft) {
        let mut num_asked = 0;
        self.roster.turns().begin_round();
        while let Some(slot) = self.roster.turns().next() {
            if self.roster.seated(slot).last_step == draft.step {
                return;
            }
            if draft.is_full() {
                return self.carry_over(num_asked, draft);
            }
            num_asked += 1;
            self.decode_row(slot, draft);
        }
    }

    /// Rule 3: the prefills under way, in order, as long as tokens are left.
    fn resume(&mut self, draft: &mut Draft) {
        let mut next = self.roster.first_prefill();
        while let Some(slot) = next {
            let running = self.roster.seated(slot);
            let order = running.job.order;
            let has_row = running.last_step == draft.step;
            let length = self
                .chunk_length(running.num_planned, running.num_to_prefill(), draft)
                .filter(|_| !has_row);
            if length.is_some_and(|length| !self.prefill_row(slot, length, draft)) {
                return;
            }
            next = self
                .roster
                .prefill_after(order)
                .filter(|_| !draft.is_full());
        }
    }

    /// Rule 4: the waiting requests, strictly in order.
    fn admit(&mut self, now: Micros, draft: &mut Draft) {
        while let Some((slot, length)) = self.room_for_first(draft) {
            let Some(queued) = self.queue.pop_first() else {
                return;
            };
            let (running, new_slot) = queued.admit(slot, draft.step, now);
            self.places.insert(running.job.id(), Place::Slot(slot));
            draft.new_slots.push(new_slot);
            self.roster.seat(running);
            let has_row = self.prefill_row(slot, length, draft);
            assert!(has_row, "admission saw free pages for the whole prompt");
        }
    }

    /// A slot and a chunk length for the head of the queue, where it can be admitted now.
    fn room_for_first(&self, draft: &Draft) -> Option<(SlotId, u32)> {
        let num_tokens = self.queue.first()?.job().num_known();
        let slot = self.roster.free_slot()?;
        let length = self.chunk_length(0, num_tokens, draft)?;
        let watermark = if self.roster.is_empty() {
            0
        } else {
            self.settings.watermark
        };
        let own_pages = num_tokens.div_ceil(self.settings.page_size);
        let num_pages = u64::from(own_pages)
            + u64::from(self.roster.num_prefill_pages())
            + u64::from(watermark);
        let can_admit =
            self.roster.num_held() == 0 && num_pages <= u64::from(self.pages.num_free());
        can_admit.then_some((slot, length))
    }

    /// How many of the `remaining` tokens from `start` on a chunk may take now; nothing where it would
    /// be cut too short.
    fn chunk_length(&self, start: u32, remaining: u32, draft: &Draft) -> Option<u32> {
        let most = remaining.min(self.settings.long_prefill);
        let least = most.min(MIN_CHUNK).min(self.settings.max_batch_tokens);
        let in_time = self.time_target.as_ref().map_or(u32::MAX, |target| {
            target.room(draft.step, &draft.work, start)
        });
        let length = most.min(draft.num_tokens_left).min(in_time);
        (length >= least && draft.num_rows_left > 0).then_some(length)
    }

    fn prefill_row(&mut self, slot: SlotId, length: u32, draft: &mut Draft) -> bool {
        let start = self.roster.seated(slot).num_planned;
        if !self.lease_pages(slot, start + length, draft) {
            return false;
        }
        let job = &mut self.roster.seated_mut(slot).job;
        let (order, end) = (job.order, start + length);
        let is_last_chunk = end == job.num_known();
        let lookahead = !is_last_chunk && job.wants_lookahead(end);
        let prompt_logprobs = job.claim_prompt_positions(start, end);
        let request = job.id();
        draft.push_prefill(
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
        self.roster
            .book_row(slot, draft.step, length, is_last_chunk);
        true
    }

    fn decode_row(&mut self, slot: SlotId, draft: &mut Draft) {
        let start = self.roster.seated(slot).num_planned;
        if !self.lease_pages(slot, start + 1, draft) {
            self.counts.carryover.pages += 1;
            if self
                .roster
                .get(slot)
                .is_some_and(|running| running.phase == Phase::Decoding)
            {
                self.roster.turns().pass(slot);
            }
            return;
        }
        let job = &self.roster.seated(slot).job;
        draft.push_decode(
            job.order,
            DecodeRow {
                request: job.id(),
                slot,
                start,
            },
        );
        self.roster.book_row(slot, draft.step, 1, true);
    }

    fn carry_over(&mut self, num_asked: u32, draft: &Draft) {
        let num_left = u64::from(self.roster.turns().len().saturating_sub(num_asked));
        let carryover = &mut self.counts.carryover;
        let cause = if draft.num_tokens_left == 0 {
            &mut carryover.tokens
        } else {
            &mut carryover.rows
        };
        *cause += num_left;
    }
}

/// Rule 0: output tokens that a request gets at most.
fn num_due(request: &Request, settings: &Settings) -> Result<u32, Refusal> {
    let (prompt, num_pool) = (request.prompt.len(), settings.pool_tokens());
    if prompt == 0 {
        return Err(Refusal::EmptyPrompt);
    }
    if request.max_tokens == 0 {
        return Err(Refusal::NoOutput);
    }
    let room_in = |limit: u64| limit.checked_sub(prompt as u64).filter(|room| *room > 0);
    let in_model = room_in(settings.max_model_len.into()).ok_or(Refusal::TooLongForModel {
        prompt,
        limit: settings.max_model_len,
    })?;
    let in_pool = room_in(num_pool).ok_or(Refusal::TooLongForPool {
        prompt,
        limit: num_pool,
    })?;
    let num = u64::from(request.max_tokens).min(in_model).min(in_pool);
    Ok(u32::try_from(num).expect("no more than max_tokens"))
}
