//! Equal prefixes are shared while they are computed: by all requests with the prefix cache, without it by the
//! choices of one prompt.
//!
//! A prompt's pages are published when the step that computes them is launched. Steps run in order on the
//! device, and a step that fails ends the replica, so every later step may read them. Within a plan no row
//! reads what another one writes: a request whose next block a row of this plan computes waits for the next
//! plan. It waits only while another request's row is in the very plan, so it cannot wait for ever.
//!
//! Pages are of no use without the slot state behind them, which a snapshot has once its step's result is in. So a
//! model with slot state publishes with the result, and what it shares it finds at admission.

use rustc_hash::FxHashMap;

use crate::ids::{RequestId, SlotId};
use crate::kv_cache::KvCache;
use crate::plan_builder::PlanBuilder;
use crate::prefix_hasher::{HashSeed, PrefixHasher};
use crate::scheduler::Scheduler;
use crate::state::{Job, Running};

/// What sharing keeps beside the pages.
#[derive(Clone, Debug)]
pub(crate) struct PrefixSharing {
    /// Hashes full pages.
    pub(crate) hasher: PrefixHasher,
    /// Without a prefix cache: living choices of the prompts that have several, by the first one.
    pub(crate) num_choices: FxHashMap<RequestId, u32>,
}

impl PrefixSharing {
    pub(crate) fn new(seed: HashSeed) -> Self {
        Self {
            hasher: PrefixHasher::new(seed),
            num_choices: FxHashMap::default(),
        }
    }
}

/// The next tokens of a running prefill. Between those planned before and `start` it adopts published pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) start: u32,
    pub(crate) length: u32,
}

impl Scheduler {
    /// What a running prefill computes in this plan; None if it gets no row.
    pub(crate) fn next_chunk(&mut self, slot: SlotId, builder: &mut PlanBuilder) -> Option<Chunk> {
        let running = self.running.at_mut(slot);
        let planned = running.num_planned;
        let (mut start, mut remaining) = (planned, running.num_to_prefill());
        let job = &mut running.job;
        if job.shares_pages() && !self.cache.keeps_slot_state() {
            let hasher = &mut self.sharing.hasher;
            if waits_for_row(job, planned, &self.cache, hasher, builder) {
                return None;
            }
            let block_end = self.cache.block_end(planned);
            if self.cache.is_block_start(planned) {
                start = self.cache.find_from(planned, job, hasher).num_tokens;
                remaining -= start - planned;
            } else if self
                .cache
                .has_block(self.cache.block_end(block_end), job, hasher)
            {
                remaining = remaining.min(block_end - planned);
            }
        }
        let shortest = self.shortest_chunk(slot);
        let length = self.chunk_length(start, remaining, shortest, builder)?;
        Some(Chunk { start, length })
    }

    /// Adopts the pages before a chunk and leases those for its tokens. If false, its row must wait.
    pub(crate) fn lease_chunk(
        &mut self,
        slot: SlotId,
        chunk: &Chunk,
        builder: &mut PlanBuilder,
    ) -> bool {
        let planned = self.running.at(slot).num_planned;
        if chunk.start > planned {
            if !self.free_pages_to_adopt(slot, chunk, builder) {
                return false;
            }
            let (lease, num) = self.running.adopt(slot, chunk.start, &mut self.cache);
            builder.append_pages(slot, lease, &num);
            let running = self.running.at_mut(slot);
            running.num_shared += chunk.start - planned;
            self.counts
                .count_shared(&running.job, chunk.start - planned);
        }
        self.lease_pages(slot, chunk.start + chunk.length, builder)
    }

    /// Makes room for the pages of a chunk and for those to adopt that no request holds. A request that gives
    /// way may have held some.
    fn free_pages_to_adopt(
        &mut self,
        slot: SlotId,
        chunk: &Chunk,
        builder: &mut PlanBuilder,
    ) -> bool {
        let (start, end) = (chunk.start, chunk.start + chunk.length);
        loop {
            let running = self.running.at(slot);
            let mut num = self.cache.num_new_pages(start, end);
            let num_cached = self
                .cache
                .num_cached_of(running.num_planned, start, &running.job);
            num.iter_mut()
                .zip(&num_cached)
                .for_each(|(num, cached)| *num += cached);
            if self.cache.has(&num) {
                return true;
            }
            if !self.free_pages_for(slot, &num, builder) {
                return false;
            }
        }
    }

    /// Tells the requests that come later in this plan which block a row computes.
    pub(crate) fn announce(&mut self, slot: SlotId, start: u32, builder: &mut PlanBuilder) {
        if self.cache.keeps_slot_state() {
            return;
        }
        let job = &mut self.running.at_mut(slot).job;
        let num_shared = job.num_known().min(job.num_shareable_tokens());
        let (end, hasher) = (self.cache.block_end(start), &mut self.sharing.hasher);
        let hash = self.cache.block_hash(end, num_shared, job, hasher);
        builder.computing.extend(hash);
    }

    /// Publishes the pages that the last plan's prefill rows fill. The next call does it, so that the plan is
    /// sent first.
    pub(crate) fn publish_launched(&mut self) {
        for (slot, end) in std::mem::take(&mut self.in_flight.unpublished) {
            self.publish(slot, end);
        }
    }

    /// Publishes the pages that a request's first `num_tokens` tokens fill, which are computed or in flight.
    #[inline]
    pub(crate) fn publish(&mut self, slot: SlotId, num_tokens: u32) {
        let Running { job, lease, .. } = self.running.at_mut(slot);
        if !lease.has_full_page(num_tokens) {
            return; // as after most tokens
        }
        let num_tokens = num_tokens.min(job.num_shareable_tokens());
        if lease.has_full_page(num_tokens) {
            self.cache
                .publish(lease, job, num_tokens, &mut self.sharing.hasher);
        }
    }
}

/// Whether a row of this plan computes the block that a request needs next, behind its first `num_tokens` and
/// what it can find. Each block that is found is looked up once.
pub(crate) fn waits_for_row(
    job: &mut Job,
    num_tokens: u32,
    cache: &KvCache,
    hasher: &mut PrefixHasher,
    builder: &PlanBuilder,
) -> bool {
    if builder.computing.is_empty() {
        return false;
    }
    // Whole blocks only: a preempted request takes it back to the queue.
    job.num_found = job.num_found.max(cache.block_start(num_tokens));
    while cache.has_block(cache.block_end(job.num_found), job, hasher) {
        job.num_found = cache.block_end(job.num_found);
    }
    let end = cache.block_end(job.num_found);
    let hash = cache.block_hash(end, job.num_cacheable_tokens(), job, hasher);
    hash.is_some_and(|hash| builder.computing.contains(&hash))
}
