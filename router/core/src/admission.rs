//! The way in: into the queue (rule 0), and from the queue to a slot and pages (rule 4).

use crate::draft::Draft;
use crate::ids::{Micros, RequestId, SlotId, TenantId};
use crate::pages::Hits;
use crate::queue::QueuePlace;
use crate::request::{Refusal, Request};
use crate::scheduler::{Place, Scheduler};
use crate::settings::Settings;
use crate::state::{Job, Queued, Seat};

/// What the head of the queue can have now.
struct Room {
    place: QueuePlace,
    slot: SlotId,
    hits: Hits,
    /// Tokens of its first chunk.
    length: u32,
}

impl Scheduler {
    /// Takes a request into the queue, its output capped by the model's length and the pool.
    pub fn submit(&mut self, request: Request, now: Micros) -> Result<RequestId, Refusal> {
        let ids = self.submit_all(vec![request], now)?;
        Ok(ids[0])
    }

    /// Takes requests that belong together into the queue: all of them, or none.
    ///
    /// An empty queue takes any number, or as many at once could never be served.
    pub fn submit_all(
        &mut self,
        requests: Vec<Request>,
        now: Micros,
    ) -> Result<Vec<RequestId>, Refusal> {
        if self.is_draining {
            return Err(Refusal::Draining);
        }
        let num_due: Vec<u32> = requests
            .iter()
            .map(|request| num_due(request, &self.settings))
            .collect::<Result<_, _>>()?;
        let num_tokens = requests.iter().map(|it| it.prompt.len() as u64).sum();
        self.queue
            .check_room(requests.len(), num_tokens, &self.settings)?;
        let each = requests.into_iter().zip(num_due);
        Ok(each
            .map(|(request, num_due)| self.take_in(request, num_due, now))
            .collect())
    }

    fn take_in(&mut self, request: Request, num_due: u32, now: Micros) -> RequestId {
        let id = RequestId(self.num_submitted);
        self.num_submitted += 1;
        if let Some(shares) = &mut self.shares {
            shares.enter(request.tenant);
        }
        let job = Box::new(Job::new(id, request, num_due, self.settings.policy));
        self.enqueue(Queued::Waiting { job, since: now });
        id
    }

    pub(crate) fn enqueue(&mut self, queued: Queued) {
        let (job, is_fair) = (queued.job(), self.shares.is_some());
        let lane = if is_fair {
            job.tenant()
        } else {
            TenantId::default()
        };
        let order = job.order;
        let place = Place::Queue(QueuePlace { lane, order });
        self.places.insert(job.id(), place);
        self.queue.push(lane, queued);
    }

    /// Rule 4: the waiting requests, strictly in order.
    pub(crate) fn admit(&mut self, now: Micros, draft: &mut Draft) {
        while let Some(room) = self.room_for_first(draft) {
            let Some(mut queued) = self.queue.remove(room.place) else {
                return;
            };
            let seat = self.seat_for(queued.job_mut(), &room);
            let slot = seat.slot;
            self.charge_prompt(&mut queued, seat.num_cached);
            draft
                .appended_pages
                .extend(seat.lease.pages().iter().map(|page| (slot, *page)));
            let (running, new_slot) = queued.admit(seat, draft.step, now);
            self.places.insert(running.job.id(), Place::Slot(slot));
            draft.new_slots.push(new_slot);
            self.roster.seat(running);
            let has_row = self.prefill_row(slot, room.length, draft);
            assert!(has_row, "admission saw free pages for the whole prompt");
        }
    }

    /// A tenant is served its prompt at the admission, and nothing for coming back from a preemption.
    fn charge_prompt(&mut self, queued: &mut Queued, num_cached: u32) {
        let (Some(shares), Queued::Waiting { job, .. }) = (&mut self.shares, &*queued) else {
            return;
        };
        let (tenant, num_tokens) = (job.tenant(), job.prompt_len() - num_cached);
        queued.place_in_order(shares.num_served(tenant));
        shares.charge(tenant, num_tokens);
    }

    /// A slot, a first chunk and what the cache has for the head of the queue, where it can be admitted
    /// now.
    fn room_for_first(&mut self, draft: &Draft) -> Option<Room> {
        let slot = self.roster.free_slot()?;
        if self.roster.num_held() > 0 || draft.is_full() {
            return None;
        }
        let page_size = self.settings.page_size;
        let place = self.queue.first(self.shares.as_ref())?;
        let job = self.queue.job_mut(place)?;
        let num_known = job.num_known();
        let hits = self.namer.as_mut().map_or_else(Hits::default, |namer| {
            self.pages.find(job.cacheable_keys(page_size, namer))
        });
        let num_cached = hits.num_pages * page_size;
        let length = self.chunk_length(num_cached, num_known - num_cached, draft)?;
        let num_new = num_known.div_ceil(page_size) - hits.num_pages;
        self.has_pages(num_new, hits).then_some(Room {
            place,
            slot,
            hits,
            length,
        })
    }

    /// Whether `num_new` pages are left beside what prefills under way need, the watermark, and the hits.
    fn has_pages(&self, num_new: u32, hits: Hits) -> bool {
        let watermark = if self.roster.is_empty() {
            0
        } else {
            self.settings.watermark
        };
        let num_needed =
            u64::from(num_new) + u64::from(self.roster.num_prefill_pages()) + u64::from(watermark);
        num_needed <= u64::from(self.pages.num_available() - hits.num_cached)
    }

    /// Pins what the cache has in the same call that looked it up.
    fn seat_for(&mut self, job: &mut Job, room: &Room) -> Seat {
        let (num_hits, page_size) = (room.hits.num_pages, self.settings.page_size);
        let keys = self
            .namer
            .as_mut()
            .map_or(&[][..], |namer| job.keys(num_hits, page_size, namer));
        let num_cached = num_hits * page_size;
        self.counts.num_hit_tokens += u64::from(num_cached);
        Seat {
            slot: room.slot,
            lease: self.pages.pin(keys),
            num_cached,
        }
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
