//! Rule 4: the head of the queue is admitted into a slot with pages and its cached prefix.

use crate::ids::{Micros, RequestId, SlotId};
use crate::kv_cache::{KvCache, PerKind, PrefixHits};
use crate::outlook::JobSize;
use crate::plan::RestoredSlot;
use crate::plan_builder::{MIN_CHUNK, PlanBuilder};
use crate::prefix_sharing::{Chunk, waits_for_row};
use crate::queue::QueueKey;
use crate::running_set::add;
use crate::scheduler::{Location, Scheduler};
use crate::settings::Policy;
use crate::state::{Admission, Job, Queued};

/// What the head of the queue gets if it is admitted now.
pub(crate) struct QueueHead {
    key: QueueKey,
    pub(crate) size: JobSize,
    slot: SlotId,
    pub(crate) hits: PrefixHits,
    /// Tokens of its first chunk.
    length: u32,
}

/// Whether a waiting request can be admitted now.
enum NextInQueue {
    Admit(QueueHead),
    /// A row of this plan computes its next block.
    Wait(QueueKey),
    /// Neither it nor any request behind it.
    Stop,
}

/// Requests that wait for rows of this plan. The others may pass them, but leave them slots and pages.
struct Passed {
    /// Cache-aware: the requests that may be admitted, in order; None until it is asked for.
    ranked: Option<std::vec::IntoIter<QueueKey>>,
    last: Option<QueueKey>,
    num: usize,
    /// The first choice of the last one's prompt.
    last_prompt: Option<RequestId>,
    num_prompts: usize,
    num_pages: PerKind<u32>,
}

impl Passed {
    fn new(cache: &KvCache) -> Self {
        Self {
            ranked: None,
            last: None,
            num: 0,
            last_prompt: None,
            num_prompts: 0,
            num_pages: cache.no_pages(),
        }
    }
}

/// Prompts of which requests may be passed in one plan; a prompt may have many choices.
const MAX_PASSED: usize = 64;

/// Requests behind a blocked head that a plan looks at.
const NUM_LOOKED_AT: usize = 4;

impl Scheduler {
    /// Rule 4: admits waiting requests, strictly in order but for those that wait for rows of this plan.
    pub(crate) fn admit(&mut self, now: Micros, builder: &mut PlanBuilder) {
        let mut passed = Passed::new(&self.cache);
        loop {
            match self.next_in_queue(&mut passed, builder) {
                NextInQueue::Admit(head) => self.admit_head(&head, now, builder),
                NextInQueue::Wait(key) => self.pass(key, &mut passed),
                NextInQueue::Stop => return,
            }
        }
    }

    pub(crate) fn admit_head(&mut self, head: &QueueHead, now: Micros, builder: &mut PlanBuilder) {
        let Some(mut queued) = self.queue.remove(head.key) else {
            return;
        };
        self.queue.keep_choices(&queued);
        let num_expected = self.note_admission(head, builder);
        let admission = self.admission_of(queued.job(), head, num_expected);
        let slot = admission.slot;
        self.charge_admission(&mut queued, admission.num_cached);
        builder.append_pages(slot, &admission.lease, &admission.lease.num_pages());
        let snapshot = self.cache.pin_snapshot(admission.num_cached, queued.job());
        let restored = snapshot.map(|snapshot| RestoredSlot { slot, snapshot });
        builder.restored_slots.extend(restored);
        let start = admission.num_cached;
        let (running, new_slot) = queued.admit(admission, builder.step, now);
        self.locations
            .insert(running.job.id(), Location::Slot(slot));
        builder.push_new_slot(new_slot, running.job.num_slot_words());
        self.running.insert(running);
        let chunk = Chunk {
            start,
            length: head.length,
        };
        let has_row = self.prefill_row(slot, &chunk, builder);
        assert!(has_row, "admission saw free pages for the whole prompt");
    }

    /// Reserves a slot and pages for a request that the next ones pass.
    fn pass(&mut self, key: QueueKey, passed: &mut Passed) {
        if let Some(job) = self.queue.job(key) {
            let num_found = job.num_found.max(self.num_from_siblings(job));
            let num = self.cache.num_new_pages(num_found, job.num_known());
            add(&mut passed.num_pages, &num);
            let prompt = Some(job.first_choice());
            passed.num_prompts += usize::from(passed.last_prompt != prompt);
            passed.last_prompt = prompt;
        }
        passed.num += 1;
        passed.last = Some(key);
    }

    /// The first request behind those that were passed, with a slot, its first chunk and its cached prefix.
    fn next_in_queue(&mut self, passed: &mut Passed, builder: &mut PlanBuilder) -> NextInQueue {
        let is_blocked = self.running.num_held() > 0
            || builder.is_full()
            || builder.has_all_slot_words()
            || passed.num >= self.running.num_free_slots()
            || passed.num_prompts >= MAX_PASSED;
        let key = match passed.last {
            _ if is_blocked => None,
            _ if self.settings.scheduler.policy == Policy::CacheAware => {
                let ranked = &mut passed.ranked;
                ranked.get_or_insert_with(|| self.rank().into_iter()).next()
            }
            None => self.queue.first(),
            Some(last) => self.queue.after(last),
        };
        match key {
            Some(key) if self.waits_for_row(key, builder) => NextInQueue::Wait(key),
            Some(key) => self
                .admissible(key, passed, builder)
                .map_or(NextInQueue::Stop, NextInQueue::Admit),
            None => NextInQueue::Stop,
        }
    }

    fn waits_for_row(&mut self, key: QueueKey, builder: &PlanBuilder) -> bool {
        let Some(job) = self.queue.job_mut(key).filter(|job| job.shares_pages()) else {
            return false;
        };
        if builder.computing.is_empty() {
            return false;
        }
        let hasher = &mut self.sharing.hasher;
        if job.num_found == 0 {
            job.num_found = self.cache.find(job, hasher).num_tokens;
        }
        waits_for_row(job, 0, &self.cache, hasher, builder)
    }

    /// The request with this key if it can be admitted now; else one of the next whose pages are free.
    fn admissible(
        &mut self,
        key: QueueKey,
        passed: &Passed,
        builder: &mut PlanBuilder,
    ) -> Option<QueueHead> {
        let head = self.fitting(key, builder)?;
        if self.has_pages(&head, passed) {
            return self.can_grow(key, &head.size, builder).then_some(head);
        }
        self.fitting_behind(key, passed, builder)
    }

    /// What a queued request would get now, with nobody before it; None if it cannot be admitted.
    pub(crate) fn fitting_now(
        &mut self,
        key: QueueKey,
        builder: &mut PlanBuilder,
    ) -> Option<QueueHead> {
        let head = self.fitting(key, builder)?;
        let nobody = Passed::new(&self.cache);
        self.has_pages(&head, &nobody).then_some(head)
    }

    /// What a queued request would get now, pages apart; None if no chunk of it fits the plan.
    fn fitting(&mut self, key: QueueKey, builder: &mut PlanBuilder) -> Option<QueueHead> {
        let slot = self.running.free_slot()?;
        if !self.target_carries(self.queue.job(key)?, builder) {
            self.counts.num_admissions_over_target += 1;
            return None;
        }
        let hits = self.find_hits(key)?;
        let job = self.queue.job_mut(key)?;
        job.num_found = hits.num_tokens;
        let size = JobSize::new(job, hits.num_tokens);
        let num_left = size.num_known() - hits.num_tokens;
        let length = self.chunk_length(hits.num_tokens, num_left, MIN_CHUNK, builder)?;
        Some(QueueHead {
            key,
            size,
            slot,
            hits,
            length,
        })
    }

    /// The first of the next requests whose pages are free. So many pass each head at most, and none
    /// passes one that was preempted.
    fn fitting_behind(
        &mut self,
        head: QueueKey,
        passed: &Passed,
        builder: &mut PlanBuilder,
    ) -> Option<QueueHead> {
        let most = self.settings.scheduler.max_skip_ahead;
        let has_run = !matches!(self.queue.get(head)?, Queued::Waiting { .. });
        let has_ranks = self.settings.scheduler.policy == Policy::CacheAware;
        if has_run || has_ranks || self.queue.job(head)?.num_overtaken >= most {
            return None;
        }
        let mut key = head;
        for _ in 0..NUM_LOOKED_AT {
            key = self.queue.after(key)?;
            if self.has_pages_uncached(key, passed) && !self.waits_for_row(key, builder) {
                let next = self.fitting(key, builder)?;
                let fits = self.can_grow(key, &next.size, builder);
                self.queue.job_mut(head)?.num_overtaken += u32::from(fits);
                return fits.then_some(next);
            }
        }
        None
    }

    /// Whether a request that has not run finds enough pages even without the cache.
    fn has_pages_uncached(&self, key: QueueKey, passed: &Passed) -> bool {
        let Some(Queued::Waiting { job, .. }) = self.queue.get(key) else {
            return false;
        };
        self.has_pages_for(job.num_known(), &self.cache.no_hits(), passed)
    }

    /// The cached prefix of a queued request.
    pub(crate) fn find_hits(&mut self, key: QueueKey) -> Option<PrefixHits> {
        let job = self.queue.job_mut(key)?;
        Some(match job.shares_pages() {
            true => self.cache.find(job, &mut self.sharing.hasher),
            false => self.cache.no_hits(),
        })
    }

    fn has_pages(&self, head: &QueueHead, passed: &Passed) -> bool {
        self.has_pages_for(head.size.num_known(), &head.hits, passed)
    }

    /// Whether enough pages are left for `num_known` tokens, beside the hits, the watermark and what
    /// running prefills and passed requests still need.
    fn has_pages_for(&self, num_known: u32, hits: &PrefixHits, passed: &Passed) -> bool {
        let mut reserved = passed.num_pages.clone();
        add(&mut reserved, self.running.num_prefill_pages());
        let released = self.cache.no_pages();
        self.has_pages_once(num_known, hits, &reserved, &released)
    }

    /// The same beside `reserved` pages of each kind, once `released` pages are free.
    pub(crate) fn has_pages_once(
        &self,
        num_known: u32,
        hits: &PrefixHits,
        reserved: &[u32],
        released: &[u32],
    ) -> bool {
        let keeps_watermark = !self.running.is_empty();
        self.cache
            .can_admit(num_known, hits, reserved, keeps_watermark, released)
    }

    /// Pins the cached prefix in the call that looked it up, so that no page can be evicted between.
    fn admission_of(&mut self, job: &Job, head: &QueueHead, num_expected: u64) -> Admission {
        let num_cached = head.hits.num_tokens;
        self.counts.count_lookup(job);
        self.counts.count_shared(job, num_cached);
        Admission {
            slot: head.slot,
            lease: self.cache.pin(job, num_cached),
            saves: self.cache.saves_of(job, &head.hits),
            num_cached,
            num_expected,
        }
    }
}
