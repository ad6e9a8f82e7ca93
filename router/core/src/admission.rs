//! Admission: into the queue (rule 0), then into a slot with pages (rule 4).

use crate::ids::{Micros, RequestId, SlotId, TenantId};
use crate::kv_cache::PrefixHits;
use crate::plan_builder::PlanBuilder;
use crate::queue::QueueKey;
use crate::request::{Refusal, Request};
use crate::scheduler::{Location, Scheduler};
use crate::state::{Admission, Job, Queued};

/// What the head of the queue gets if it is admitted now.
struct QueueHead {
    key: QueueKey,
    slot: SlotId,
    hits: PrefixHits,
    /// Tokens of its first chunk.
    length: u32,
}

impl Scheduler {
    /// Puts a request into the queue. The model's length and the pool cap its output.
    pub fn submit(&mut self, request: Request, now: Micros) -> Result<RequestId, Refusal> {
        let ids = self.submit_all(vec![request], now)?;
        Ok(ids[0])
    }

    /// Puts requests that belong together into the queue: all or none.
    ///
    /// An empty queue takes any number, because so many at once could never be served otherwise.
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
            .map(|request| self.num_due(request))
            .collect::<Result<_, _>>()?;
        let num_tokens = requests.iter().map(|it| it.prompt.len() as u64).sum();
        self.queue
            .check_room(requests.len(), num_tokens, &self.settings.scheduler)?;
        let each = requests.into_iter().zip(num_due);
        Ok(each
            .map(|(request, num_due)| self.take_in(request, num_due, now))
            .collect())
    }

    fn take_in(&mut self, request: Request, num_due: u32, now: Micros) -> RequestId {
        let id = RequestId(self.num_submitted);
        self.num_submitted += 1;
        if let Some(fair_share) = &mut self.fair_share {
            fair_share.enter(request.tenant);
        }
        let job = Box::new(Job::new(
            id,
            request,
            num_due,
            self.settings.scheduler.policy,
        ));
        self.enqueue(Queued::Waiting { job, since: now });
        id
    }

    pub(crate) fn enqueue(&mut self, queued: Queued) {
        let (job, is_fair) = (queued.job(), self.fair_share.is_some());
        let lane = if is_fair {
            job.tenant()
        } else {
            TenantId::default()
        };
        let order = job.order;
        let location = Location::Queue(QueueKey { lane, order });
        self.locations.insert(job.id(), location);
        self.queue.push(lane, queued);
    }

    /// Rule 4: admits waiting requests, strictly in order.
    pub(crate) fn admit(&mut self, now: Micros, builder: &mut PlanBuilder) {
        while let Some(head) = self.admissible_head(builder) {
            let Some(mut queued) = self.queue.remove(head.key) else {
                return;
            };
            let admission = self.admission_of(queued.job(), &head);
            let slot = admission.slot;
            self.charge_prompt(&mut queued, admission.num_cached);
            builder.append_pages(slot, &admission.lease, &admission.lease.num_pages());
            let (running, new_slot) = queued.admit(admission, builder.step, now);
            self.locations
                .insert(running.job.id(), Location::Slot(slot));
            builder.new_slots.push(new_slot);
            self.running.insert(running);
            let has_row = self.prefill_row(slot, head.length, builder);
            assert!(has_row, "admission saw free pages for the whole prompt");
        }
    }

    /// Charges a tenant for the prompt at admission. A return from preemption is free.
    fn charge_prompt(&mut self, queued: &mut Queued, num_cached: u32) {
        let (Some(fair_share), Queued::Waiting { job, .. }) = (&mut self.fair_share, &*queued)
        else {
            return;
        };
        let (tenant, num_tokens) = (job.tenant(), job.prompt_len() - num_cached);
        queued.set_num_served(fair_share.num_served(tenant));
        fair_share.charge(tenant, num_tokens);
    }

    /// The head of the queue with a slot, its first chunk and its cached prefix, if it can be admitted
    /// now.
    fn admissible_head(&mut self, builder: &PlanBuilder) -> Option<QueueHead> {
        let slot = self.running.free_slot()?;
        if self.running.num_held() > 0 || builder.is_full() {
            return None;
        }
        let key = self.queue.first(self.fair_share.as_ref())?;
        let job = self.queue.job_mut(key)?;
        let num_known = job.num_known();
        let hits = match &mut self.prefix_hasher {
            Some(hasher) => self.cache.find(job, hasher),
            None => self.cache.no_hits(),
        };
        let num_left = num_known - hits.num_tokens;
        let length = self.chunk_length(hits.num_tokens, num_left, builder)?;
        self.has_pages(num_known, &hits).then_some(QueueHead {
            key,
            slot,
            hits,
            length,
        })
    }

    /// Whether enough pages are left for `num_known` tokens, beside the hits, the watermark and what
    /// running prefills still need.
    fn has_pages(&self, num_known: u32, hits: &PrefixHits) -> bool {
        let reserved = self.running.num_prefill_pages();
        let keeps_watermark = !self.running.is_empty();
        self.cache
            .can_admit(num_known, hits, reserved, keeps_watermark)
    }

    /// Pins the cached prefix in the call that looked it up, so that no page can be evicted between.
    fn admission_of(&mut self, job: &Job, head: &QueueHead) -> Admission {
        let num_cached = head.hits.num_tokens;
        self.counts.num_hit_tokens += u64::from(num_cached);
        Admission {
            slot: head.slot,
            lease: self.cache.pin(job, num_cached),
            num_cached,
        }
    }

    /// Rule 0: output tokens that a request may get.
    fn num_due(&self, request: &Request) -> Result<u32, Refusal> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        if request.max_tokens == 0 {
            return Err(Refusal::NoOutput);
        }
        let left_of = |limit: u64| limit.checked_sub(prompt as u64).filter(|left| *left > 0);
        let limit = self.settings.runtime.max_model_len;
        let in_model = left_of(limit.into()).ok_or(Refusal::TooLongForModel { prompt, limit })?;
        let limit = self.limits.pool_tokens;
        let in_pool = left_of(limit).ok_or(Refusal::TooLongForPool { prompt, limit })?;
        let num = u64::from(request.max_tokens).min(in_model).min(in_pool);
        Ok(u32::try_from(num).expect("no more than max_tokens"))
    }
}
