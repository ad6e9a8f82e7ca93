//! Policy `cache-aware`: the longest cached prefix goes first (SGLang's `lpm`, longest prefix match).
//!
//! A plan compares the [`WINDOW`] requests that waited longest, not the whole queue. Preempted requests go
//! first, and so does one that [`MAX_OVERTAKEN`] others have overtaken. So no request waits for ever.

use std::cmp::Reverse;

use crate::kv_cache::KvCache;
use crate::prefix_hasher::PrefixHasher;
use crate::queue::QueueKey;
use crate::scheduler::Scheduler;
use crate::state::{Job, Queued};

/// Waiting requests that a plan compares.
const WINDOW: usize = 64;
/// Later requests that may be admitted before one.
const MAX_OVERTAKEN: u64 = 256;

impl Scheduler {
    /// The requests that waited longest, in the order in which they may be admitted.
    pub(crate) fn rank(&mut self) -> Vec<QueueKey> {
        let num_left_queue = self.queue.num_submitted - u64::from(self.queue.room.num_requests());
        let mut ranked = Vec::with_capacity(WINDOW);
        for (key, queued) in self.queue.leading(WINDOW) {
            let goes_first = matches!(queued, Queued::Preempted { .. })
                || num_left_queue >= queued.job().id().0 + MAX_OVERTAKEN;
            let job = queued.job_mut();
            let num_found = update_num_found(job, &self.cache, &mut self.sharing.hasher);
            ranked.push((!goes_first, Reverse(num_found), key));
        }
        ranked.sort_by_key(|(goes_first, num_found, _)| (*goes_first, *num_found));
        ranked.into_iter().map(|(.., key)| key).collect()
    }
}

/// Goes on from what was found last time. Pages are evicted from a prompt's end.
fn update_num_found(job: &mut Job, cache: &KvCache, hasher: &mut PrefixHasher) -> u32 {
    while job.num_found > 0 && !cache.has_block(job.num_found, job, hasher) {
        job.num_found = cache.block_start(job.num_found - 1);
    }
    while cache.has_block(cache.block_end(job.num_found), job, hasher) {
        job.num_found = cache.block_end(job.num_found);
    }
    job.num_found
}
