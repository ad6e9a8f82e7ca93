//! The three verbs, and the rules by which a plan is made.

use rustc_hash::FxHashMap;

use crate::draft::Draft;
use crate::event::{Event, FinishReason, Output, UnexpectedResult};
use crate::flight::Flights;
use crate::ids::{Micros, RequestId, SlotId, StepId};
use crate::pages::PagePool;
use crate::plan::{DecodeRow, Plan, PrefillRow};
use crate::prefix::Namer;
use crate::queue::{Queue, QueuePlace};
use crate::roster::Roster;
use crate::settings::{Policy, Settings, SettingsError};
use crate::shares::Shares;
use crate::state::Phase;
use crate::stats::{Counts, Stats};
use crate::time_target::TimeTarget;

/// A chunk is not cut shorter than this for lack of tokens: a remainder of 3 in every plan would
/// take a prompt of 8,192 tokens through thousands of steps.
pub(crate) const MIN_CHUNK: u32 = 16;

/// Where a request is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Queue(QueuePlace),
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
    /// Slots that lost pages since the last plan, with how many they keep.
    pub(crate) trimmed_slots: Vec<(SlotId, u32)>,
    pub(crate) num_submitted: u64,
    pub(crate) last_step: StepId,
    pub(crate) is_draining: bool,
    /// What tenants were served, where it decides who goes first.
    pub(crate) shares: Option<Shares>,
    /// Names full pages, where prefixes are kept.
    pub(crate) namer: Option<Namer>,
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
            trimmed_slots: Vec::new(),
            num_submitted: 0,
            last_step: StepId(0),
            is_draining: false,
            shares: (settings.policy == Policy::Fair).then(Shares::default),
            namer: settings.prefix_cache.map(Namer::new),
            settings,
        })
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

    /// How long a step on the wire should take by what earlier ones took; nothing without a step-time target.
    pub fn expected(&self, step: StepId) -> Option<Micros> {
        self.time_target.as_ref()?.expected(step)
    }

    /// Tokens of a request's prompt; nothing once it has ended.
    pub fn prompt_len(&self, request: RequestId) -> Option<u32> {
        let job = match self.places.get(&request)? {
            Place::Queue(place) => self.queue.job(*place)?,
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
            counts: Counts {
                num_evictions: self.pages.num_evicted(),
                ..self.counts
            },
        }
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

    /// Rule 2: every decoder in turn, one row each.
    fn decode(&mut self, draft: &mut Draft) {
        let mut num_asked = 0;
        self.roster.turns().begin_round();
        while let Some(slot) = self.roster.turns().next() {
            let running = self.roster.seated(slot);
            if running.last_step == draft.step {
                return;
            }
            let length = running.num_left().min(1 + self.settings.draft_width);
            if length > draft.num_tokens_left || draft.num_rows_left == 0 {
                return self.carry_over(num_asked, draft);
            }
            num_asked += 1;
            self.decode_row(slot, length, draft);
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

    /// How many of the `remaining` tokens from `start` on a chunk may take now; nothing where it would
    /// be cut too short.
    pub(crate) fn chunk_length(&self, start: u32, remaining: u32, draft: &Draft) -> Option<u32> {
        let most = remaining.min(self.settings.long_prefill);
        let least = most.min(MIN_CHUNK).min(self.settings.max_batch_tokens);
        let in_time = self.time_target.as_ref().map_or(u32::MAX, |target| {
            target.room(draft.step, &draft.work, start)
        });
        let length = most.min(draft.num_tokens_left).min(in_time);
        (length >= least && draft.num_rows_left > 0).then_some(length)
    }

    pub(crate) fn prefill_row(&mut self, slot: SlotId, length: u32, draft: &mut Draft) -> bool {
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
            .book_row(slot, draft.step, length, u32::from(is_last_chunk));
        true
    }

    fn decode_row(&mut self, slot: SlotId, length: u32, draft: &mut Draft) {
        let start = self.roster.seated(slot).num_planned;
        if !self.lease_pages(slot, start + length, draft) {
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
                length,
            },
        );
        self.roster.book_row(slot, draft.step, length, length);
    }

    fn carry_over(&mut self, num_asked: u32, draft: &Draft) {
        let num_left = u64::from(self.roster.turns().len().saturating_sub(num_asked));
        let carryover = &mut self.counts.carryover;
        let cause = if draft.num_rows_left > 0 {
            &mut carryover.tokens
        } else {
            &mut carryover.rows
        };
        *cause += num_left;
    }
}
