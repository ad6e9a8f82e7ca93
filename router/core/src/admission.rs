//! Rule 4: the head of the queue is admitted into a slot with pages and its cached prefix.

use crate::ids::{Micros, SlotId};
use crate::kv_cache::PrefixHits;
use crate::plan_builder::PlanBuilder;
use crate::queue::QueueKey;
use crate::scheduler::{Location, Scheduler};
use crate::state::{Admission, Job};

/// What the head of the queue gets if it is admitted now.
struct QueueHead {
    key: QueueKey,
    slot: SlotId,
    hits: PrefixHits,
    /// Tokens of its first chunk.
    length: u32,
}

impl Scheduler {
    /// Rule 4: admits waiting requests, strictly in order.
    pub(crate) fn admit(&mut self, now: Micros, builder: &mut PlanBuilder) {
        while let Some(head) = self.admissible_head(builder) {
            let Some(mut queued) = self.queue.remove(head.key) else {
                return;
            };
            let admission = self.admission_of(queued.job(), &head);
            let slot = admission.slot;
            self.charge_admission(&mut queued, admission.num_cached);
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

    /// The head of the queue with a slot, its first chunk and its cached prefix, if it can be admitted
    /// now.
    fn admissible_head(&mut self, builder: &PlanBuilder) -> Option<QueueHead> {
        let slot = self.running.free_slot()?;
        if self.running.num_held() > 0 || builder.is_full() {
            return None;
        }
        let key = self.queue.first()?;
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
}
