//! The KV cache: a page pool for each cache kind, and leases that hold pages of every kind.
//!
//! A cache kind is what one group of layers keeps of a token. It has pages of its own size, in a pool of
//! its own. Models have one kind today. A row needs pages of every kind. A prefix is cached as far as
//! every kind has it.
//!
//! A model may keep state of a fixed size for each slot too. It comes and goes with the slot, and is in no page. Then
//! a prefix is cached as far as a snapshot has the state at its end.

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::{SmallVec, smallvec};

use crate::ids::{PageId, SnapshotId, TenantId};
use crate::kv_event::KvEvent;
use crate::page_pool::{CacheHits, PageCounts, PageList, PagePool, ParkedPages};
use crate::prefix_hasher::{PageHash, PrefixHasher};
use crate::settings::{Settings, default_watermark};
use crate::slot_saves::{SaveRule, SlotSaves};
use crate::snapshot_pool::{SnapshotCounts, SnapshotPool};
use crate::state::Job;

/// One value for each cache kind. With one kind it allocates nothing.
pub(crate) type PerKind<T> = SmallVec<[T; 1]>;

/// Pages that one request holds, of every kind.
#[derive(Clone, Debug, Default)]
#[must_use = "a lease that is dropped loses its pages"]
pub(crate) struct Lease {
    lists: PerKind<PageList>,
    /// Tokens that fit the pages of every kind.
    num_tokens: u32,
    /// Computed tokens that fill the next unpublished page of any kind.
    next_full: u32,
}

impl Lease {
    /// Whether `num_computed` tokens fill an unpublished page.
    pub(crate) fn has_full_page(&self, num_computed: u32) -> bool {
        num_computed >= self.next_full
    }

    pub(crate) fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    /// Pages of each kind.
    pub(crate) fn num_pages(&self) -> PerKind<u32> {
        self.lists.iter().map(PageList::num_pages).collect()
    }

    /// The pages of each kind, in the order of the positions they cover.
    pub(crate) fn lists(&self) -> &[PageList] {
        &self.lists
    }
}

/// What a prompt finds in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefixHits {
    /// Leading tokens that every kind has, in whole pages of each.
    pub(crate) num_tokens: u32,
    /// Hit pages that no request holds. Leasing them leaves fewer for others.
    pub(crate) num_cached: PerKind<u32>,
    /// Leading tokens in pages of every kind; more than `num_tokens` if no snapshot has the slot state there.
    pub(crate) num_in_pages: u32,
}

/// What some leases would free if they were released. A page that several of them share counts once, one that
/// others hold too does not.
pub(crate) struct Released {
    /// Pages of each kind.
    pub(crate) num: PerKind<u32>,
    /// Pages that stay leased.
    kept: PerKind<FxHashSet<PageId>>,
    /// Leases that shared pages would lose.
    lost: PerKind<FxHashMap<PageId, u32>>,
}

/// Tokens in a page of each kind.
#[derive(Clone, Debug)]
pub(crate) struct PageSizes(PerKind<u32>);

impl PageSizes {
    pub(crate) fn of(settings: &Settings) -> Self {
        let others = settings.runtime.other_kinds.iter();
        let others = others.map(|kind| kind.page_size);
        Self(
            std::iter::once(settings.pages.page_size)
                .chain(others)
                .collect(),
        )
    }

    /// Pages of each kind that a lease lacks to hold `num_tokens` tokens.
    pub(crate) fn num_missing(&self, lease: &Lease, num_tokens: u32) -> PerKind<u32> {
        let each = self.0.iter().zip(&lease.lists);
        each.map(|(size, list)| num_tokens.div_ceil(*size).saturating_sub(list.num_pages()))
            .collect()
    }

    /// Least number of tokens that fills whole pages of every kind.
    fn common_multiple(&self) -> u32 {
        self.0.iter().copied().fold(1, common_multiple)
    }
}

/// The page pools of a replica.
#[derive(Clone, Debug)]
pub(crate) struct KvCache {
    pools: PerKind<PagePool>,
    page_sizes: PerKind<u32>,
    /// Pages kept free at admission.
    watermarks: PerKind<u32>,
    /// Cached prefixes are multiples of so many tokens: whole pages of every kind.
    prefix_tokens: u32,
    /// Of slot state, if the model keeps some.
    snapshots: Option<Snapshots>,
}

/// The snapshots of slot state, and where they are taken.
#[derive(Clone, Debug)]
struct Snapshots {
    pool: SnapshotPool,
    rule: SaveRule,
}

impl KvCache {
    pub(crate) fn new(settings: &Settings, watermark: u32) -> Self {
        let page_sizes = PageSizes::of(settings);
        let mut cache = Self {
            pools: smallvec![PagePool::new(0, settings.runtime.num_pages)],
            watermarks: smallvec![watermark],
            prefix_tokens: page_sizes.common_multiple(),
            page_sizes: page_sizes.0,
            snapshots: None,
        };
        for (number, kind) in (1..).zip(&settings.runtime.other_kinds) {
            cache.pools.push(PagePool::new(number, kind.num_pages));
            cache.watermarks.push(default_watermark(kind.num_pages));
        }
        cache.snapshots = settings.runtime.num_snapshots.map(|num| Snapshots {
            pool: SnapshotPool::new(num),
            rule: SaveRule {
                page_size: cache.prefix_tokens,
                interval: settings.pages.snapshot_interval,
            },
        });
        if cache.keeps_slot_state() {
            cache.pools.iter_mut().for_each(PagePool::record_evicted);
        }
        cache
    }

    /// Whether the model keeps state for each slot that is in no page.
    pub(crate) fn keeps_slot_state(&self) -> bool {
        self.snapshots.is_some()
    }

    /// Whether so many pages of each kind can be leased now.
    pub(crate) fn has(&self, num: &[u32]) -> bool {
        let mut each = self.pools.iter().zip(num);
        each.all(|(pool, num)| pool.num_available() >= *num)
    }

    /// Tokens that a lease holds once it has all pages that can be leased now.
    pub(crate) fn num_tokens_with_free(&self, lease: &Lease) -> u32 {
        let each = self.pools.iter().zip(lease.lists()).zip(&self.page_sizes);
        let tokens = each.map(|((pool, list), size)| {
            (list.num_pages() + pool.num_available()).saturating_mul(*size)
        });
        tokens.min().unwrap_or(0)
    }

    /// The same once parked pages and `num_held` pages of each kind are free.
    pub(crate) fn will_have(&self, num: &[u32], num_held: &[u32]) -> bool {
        let mut each = self.pools.iter().zip(num.iter().zip(num_held));
        each.all(|(pool, (num, held))| pool.num_available() + pool.num_parked() + held >= *num)
    }

    /// Pages of each kind for the tokens from the first `num_cached`, which fill whole pages, to `num_tokens`.
    pub(crate) fn num_new_pages(&self, num_cached: u32, num_tokens: u32) -> PerKind<u32> {
        let sizes = self.page_sizes.iter();
        sizes
            .map(|size| num_tokens.div_ceil(*size) - num_cached / size)
            .collect()
    }

    /// Whether enough pages are left for `num_tokens` tokens beyond the hits, beside `reserved` pages of
    /// each kind and, if kept, the watermark, once `released` pages of each are free.
    pub(crate) fn can_admit(
        &self,
        num_tokens: u32,
        hits: &PrefixHits,
        reserved: &[u32],
        keeps_watermark: bool,
        released: &[u32],
    ) -> bool {
        self.pools.iter().enumerate().all(|(kind, pool)| {
            let size = self.page_sizes[kind];
            let num_new = num_tokens.div_ceil(size) - hits.num_tokens / size;
            let watermark = if keeps_watermark {
                self.watermarks[kind]
            } else {
                0
            };
            let num = u64::from(num_new) + u64::from(reserved[kind]) + u64::from(watermark);
            num <= u64::from(pool.num_available() - hits.num_cached[kind] + released[kind])
        })
    }

    /// No page of any kind.
    pub(crate) fn no_pages(&self) -> PerKind<u32> {
        smallvec![0; self.pools.len()]
    }

    /// No lease, where a request is to keep the first `num_kept` tokens that it has found.
    pub(crate) fn nothing_released(&self, job: &Job, num_kept: u32) -> Released {
        let each = self.pools.iter().zip(&self.page_sizes).enumerate();
        let kept =
            each.map(|(kind, (pool, size))| pool.pages_of(job.known_hashes(kind, num_kept / size)));
        Released {
            num: self.no_pages(),
            kept: kept.collect(),
            lost: smallvec![FxHashMap::default(); self.pools.len()],
        }
    }

    /// Counts one more lease.
    pub(crate) fn count_released(&self, released: &mut Released, lease: &Lease) {
        for (kind, (pool, list)) in self.pools.iter().zip(&lease.lists).enumerate() {
            let (kept, lost) = (&released.kept[kind], &mut released.lost[kind]);
            released.num[kind] += pool.num_released_by(list, kept, lost);
        }
    }

    /// What a request without a prefix cache finds.
    pub(crate) fn no_hits(&self) -> PrefixHits {
        PrefixHits {
            num_tokens: 0,
            num_cached: self.no_pages(),
            num_in_pages: 0,
        }
    }

    /// The cached prefix of a request's tokens.
    pub(crate) fn find(&mut self, job: &mut Job, hasher: &mut PrefixHasher) -> PrefixHits {
        let num_tokens = job.num_cacheable_tokens();
        let mut hits: PerKind<CacheHits> = PerKind::new();
        for (kind, pool) in self.pools.iter_mut().enumerate() {
            let page_size = self.page_sizes[kind];
            let hashes = job.page_hashes(kind, num_tokens / page_size, page_size, hasher);
            hits.push(pool.find(hashes));
        }
        let hits = self.common_hits(&hits, job);
        self.up_to_snapshot(hits, job)
    }

    /// The hits up to the last snapshot among them.
    fn up_to_snapshot(&self, hits: PrefixHits, job: &Job) -> PrefixHits {
        let Some(snapshots) = &self.snapshots else {
            return hits;
        };
        let page_size = self.page_sizes[0];
        let hashes = job.known_hashes(0, hits.num_tokens / page_size);
        let num_pages = snapshots.pool.num_restorable(hashes);
        let num_tokens = u32::try_from(num_pages).expect("no more than were found") * page_size;
        if num_tokens == hits.num_tokens {
            return hits;
        }
        PrefixHits {
            num_tokens,
            num_cached: self.num_cached_of(0, num_tokens, job),
            num_in_pages: hits.num_in_pages,
        }
    }

    /// What the cache has of a request's tokens behind its first `start`, which fill whole pages of every
    /// kind.
    pub(crate) fn find_from(
        &self,
        start: u32,
        job: &mut Job,
        hasher: &mut PrefixHasher,
    ) -> PrefixHits {
        let num_tokens = job.num_cacheable_tokens().max(start);
        let mut end = num_tokens;
        for (kind, (pool, size)) in self.pools.iter().zip(&self.page_sizes).enumerate() {
            let hashes = job.page_hashes(kind, num_tokens / size, *size, hasher);
            let first = start / size;
            let found = pool.hits_of(&hashes[first as usize..]);
            end = end.min((first + found.num_pages) * size);
        }
        let num_tokens = end - end % self.prefix_tokens;
        PrefixHits {
            num_tokens,
            num_cached: self.num_cached_of(start, num_tokens, job),
            num_in_pages: num_tokens,
        }
    }

    /// Pages of each kind from `start` to `end` that no request holds. They are published.
    pub(crate) fn num_cached_of(&self, start: u32, end: u32, job: &Job) -> PerKind<u32> {
        let each = self.pools.iter().zip(&self.page_sizes).enumerate();
        each.map(|(kind, (pool, size))| {
            let hashes = &job.known_hashes(kind, end / size)[(start / size) as usize..];
            pool.num_cached_of(hashes)
        })
        .collect()
    }

    /// Where the block ends that holds a position. A block is the least number of tokens that requests
    /// share: whole pages of every kind.
    pub(crate) fn block_end(&self, position: u32) -> u32 {
        self.block_start(position) + self.prefix_tokens
    }

    pub(crate) fn block_start(&self, position: u32) -> u32 {
        position - position % self.prefix_tokens
    }

    pub(crate) fn is_block_start(&self, position: u32) -> bool {
        position.is_multiple_of(self.prefix_tokens)
    }

    /// Hash of the block that ends at `end`, if its tokens are among the request's first `num_tokens`.
    pub(crate) fn block_hash(
        &self,
        end: u32,
        num_tokens: u32,
        job: &mut Job,
        hasher: &mut PrefixHasher,
    ) -> Option<PageHash> {
        let page_size = self.page_sizes[0];
        let num_pages = end / page_size;
        (end <= num_tokens)
            .then(|| job.page_hashes(0, num_pages, page_size, hasher)[num_pages as usize - 1])
    }

    /// Whether prompts can find the block that ends at `end`.
    pub(crate) fn has_block(&self, end: u32, job: &mut Job, hasher: &mut PrefixHasher) -> bool {
        let start = end - self.prefix_tokens;
        end <= job.num_cacheable_tokens()
            && self
                .pools
                .iter()
                .zip(&self.page_sizes)
                .enumerate()
                .all(|(kind, (pool, size))| {
                    let hashes = job.page_hashes(kind, end / size, *size, hasher);
                    hashes[(start / size) as usize..]
                        .iter()
                        .all(|hash| pool.has_page(*hash))
                })
    }

    /// The prefix that all kinds have.
    fn common_hits(&self, hits: &[CacheHits], job: &Job) -> PrefixHits {
        let each = hits.iter().zip(&self.page_sizes);
        let found = each.map(|(hits, size)| hits.num_pages * size).min();
        let num_tokens = found.map_or(0, |found| found - found % self.prefix_tokens);
        let each = hits.iter().zip(&self.page_sizes).enumerate();
        let num_cached = each.map(|(kind, (hits, size))| {
            let num_pages = num_tokens / size;
            if num_pages == hits.num_pages {
                hits.num_cached
            } else {
                self.pools[kind].num_cached_of(job.known_hashes(kind, num_pages))
            }
        });
        PrefixHits {
            num_tokens,
            num_cached: num_cached.collect(),
            num_in_pages: num_tokens,
        }
    }

    /// Leases the first `num_tokens` tokens, which [`KvCache::find`] has just found.
    pub(crate) fn pin(&mut self, job: &Job, num_tokens: u32) -> Lease {
        let each = self.pools.iter_mut().zip(&self.page_sizes).enumerate();
        let lists =
            each.map(|(kind, (pool, size))| pool.pin(job.known_hashes(kind, num_tokens / size)));
        let mut lease = Lease {
            lists: lists.collect(),
            num_tokens,
            next_full: 0,
        };
        self.find_next_full(&mut lease);
        lease
    }

    /// Adds the pages up to `num_tokens` to a lease whose own pages are full and published.
    /// [`KvCache::find_from`] has just found them. Returns the number of pages of each kind.
    pub(crate) fn pin_more(
        &mut self,
        lease: &mut Lease,
        job: &Job,
        num_tokens: u32,
    ) -> PerKind<u32> {
        let mut num = PerKind::new();
        let each = self.pools.iter_mut().zip(&self.page_sizes).enumerate();
        for ((kind, (pool, size)), list) in each.zip(&mut lease.lists) {
            let num_before = list.num_pages();
            let hashes = job.known_hashes(kind, num_tokens / size);
            pool.pin_more(list, &hashes[num_before as usize..]);
            num.push(list.num_pages() - num_before);
        }
        lease.num_tokens = num_tokens;
        self.find_next_full(lease);
        num
    }

    fn find_next_full(&self, lease: &mut Lease) {
        let each = lease.lists.iter().zip(&self.page_sizes);
        let full = each.map(|(list, size)| (list.num_published() + 1).saturating_mul(*size));
        lease.next_full = full.min().unwrap_or(u32::MAX);
    }

    /// Adds pages of each kind to a lease. The caller has checked that so many are available.
    pub(crate) fn grow(&mut self, lease: &mut Lease, num: &[u32]) {
        for ((pool, list), num) in self.pools.iter_mut().zip(&mut lease.lists).zip(num) {
            pool.grow(list, *num);
        }
        self.recount(lease);
        if let Some(snapshots) = &mut self.snapshots {
            let evicted = self.pools.iter_mut().flat_map(PagePool::drain_evicted);
            evicted.for_each(|hash| snapshots.pool.forget(hash));
        }
    }

    /// Takes back pages after the first `num_tokens` tokens. `on_trim` gets the kind, the number of pages
    /// kept, and the number taken.
    pub(crate) fn trim(
        &mut self,
        lease: &mut Lease,
        num_tokens: u32,
        mut on_trim: impl FnMut(u32, u32, u32),
    ) {
        let each = self.pools.iter_mut().zip(&mut lease.lists);
        for (kind, ((pool, list), size)) in (0..).zip(each.zip(&self.page_sizes)) {
            let num_kept = num_tokens.div_ceil(*size);
            let num_taken = list.num_pages() - num_kept;
            if num_taken > 0 {
                pool.shrink(list, num_kept);
                on_trim(kind, num_kept, num_taken);
            }
        }
        self.recount(lease);
    }

    fn recount(&self, lease: &mut Lease) {
        let each = lease.lists.iter().zip(&self.page_sizes);
        let held = each.map(|(list, size)| list.num_pages().saturating_mul(*size));
        lease.num_tokens = held.min().unwrap_or(0);
    }

    /// Publishes the pages that `num_computed` tokens fill, so that later prompts find them. The tokens are
    /// computed or in flight.
    pub(crate) fn publish(
        &mut self,
        lease: &mut Lease,
        job: &mut Job,
        num_computed: u32,
        hasher: &mut PrefixHasher,
    ) {
        let each = self
            .pools
            .iter_mut()
            .zip(&mut lease.lists)
            .zip(&self.page_sizes);
        for (kind, ((pool, list), size)) in each.enumerate() {
            while (list.num_published() + 1) * size <= num_computed {
                let page = list.num_published();
                let hash = job.page_hashes(kind, page + 1, *size, hasher)[page as usize];
                pool.publish(list, hash, || job.stored_page(kind, page, *size));
            }
        }
        self.find_next_full(lease);
    }

    /// Hashes the full pages of a prompt that has not run.
    pub(crate) fn hash_prompt(&self, job: &mut Job, hasher: &mut PrefixHasher) {
        for (kind, size) in self.page_sizes.iter().enumerate() {
            job.page_hashes(kind, job.prompt_len() / size, *size, hasher);
        }
    }

    /// Nobody finds a request's pages and snapshots any more.
    pub(crate) fn unpublish(&mut self, job: &Job) {
        for (kind, pool) in self.pools.iter_mut().enumerate() {
            pool.unpublish(job.all_known_hashes(kind));
        }
        if let Some(snapshots) = &mut self.snapshots {
            let hashes = job.all_known_hashes(0).iter();
            hashes.for_each(|hash| snapshots.pool.forget(*hash));
        }
    }

    /// Nobody finds any page or snapshot any more. Requests keep theirs.
    pub(crate) fn unpublish_all(&mut self) {
        self.pools.iter_mut().for_each(PagePool::unpublish_all);
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.pool.unpublish_all();
        }
    }

    pub(crate) fn release(&mut self, lease: Lease, tenant: TenantId) {
        for (pool, list) in self.pools.iter_mut().zip(lease.lists) {
            pool.release(list, tenant);
        }
    }

    /// Parks the pages of a lease that steps in flight still use.
    pub(crate) fn park(&mut self, lease: Lease, tenant: TenantId) -> PerKind<ParkedPages> {
        let each = self.pools.iter_mut().zip(lease.lists);
        each.map(|(pool, list)| pool.park(list, tenant)).collect()
    }

    /// Frees parked pages: the last step that used them is complete.
    pub(crate) fn unpark(&mut self, parked: PerKind<ParkedPages>) {
        for (pool, pages) in self.pools.iter_mut().zip(parked) {
            pool.unpark(pages);
        }
    }

    /// Records from now on what prompts can find.
    pub(crate) fn record_events(&mut self) {
        self.pools.iter_mut().for_each(PagePool::record_events);
    }

    /// Moves the events since the last call to `into`. Each kind's are in order.
    pub(crate) fn take_events(&mut self, into: &mut Vec<KvEvent>) {
        for pool in &mut self.pools {
            pool.take_events(into);
        }
    }

    /// The device has lost all pages. No lease is left.
    pub(crate) fn forget_all(&mut self) {
        self.pools.iter_mut().for_each(PagePool::forget_all);
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.pool.forget_all();
        }
    }

    pub(crate) fn snapshot_counts(&self) -> SnapshotCounts {
        let snapshots = self.snapshots.as_ref();
        snapshots.map_or_else(SnapshotCounts::default, |it| it.pool.counts())
    }

    /// What becomes of the slot state of a request that is admitted with these hits; None if nobody may find it.
    pub(crate) fn saves_of(&self, job: &Job, hits: &PrefixHits) -> Option<Box<SlotSaves>> {
        let snapshots = self.snapshots.as_ref().filter(|_| job.shares_pages())?;
        Some(Box::new(SlotSaves::new(
            snapshots.rule,
            hits.num_tokens,
            job.num_known(),
            hits.num_in_pages,
        )))
    }

    /// The snapshot at the end of the first `num_tokens` tokens, which [`KvCache::find`] has just found. It is kept
    /// until the step that restores it is complete.
    pub(crate) fn pin_snapshot(&mut self, num_tokens: u32, job: &Job) -> Option<SnapshotId> {
        let snapshots = self.snapshots.as_mut().filter(|_| num_tokens > 0)?;
        let hashes = job.known_hashes(0, num_tokens / self.page_sizes[0]);
        hashes.last().map(|hash| snapshots.pool.pin(*hash))
    }

    pub(crate) fn unpin_snapshot(&mut self, snapshot: SnapshotId) {
        self.snapshot_pool().unpin(snapshot);
    }

    /// Whether prompts can find the snapshot at the end of a request's first `num_tokens` tokens.
    pub(crate) fn has_snapshot(
        &self,
        num_tokens: u32,
        job: &mut Job,
        hasher: &mut PrefixHasher,
    ) -> bool {
        let page_size = self.page_sizes[0];
        let hashes = job.page_hashes(0, num_tokens / page_size, page_size, hasher);
        let pool = self.snapshots.as_ref().map(|it| &it.pool);
        pool.zip(hashes.last())
            .is_some_and(|(pool, hash)| pool.has(*hash))
    }

    /// A snapshot to save to; None if steps in flight use all.
    pub(crate) fn take_snapshot(&mut self) -> Option<SnapshotId> {
        self.snapshot_pool().take()
    }

    /// Lets prompts find what was saved at the end of the first `num_tokens` tokens, whose pages are published.
    pub(crate) fn publish_snapshot(
        &mut self,
        snapshot: SnapshotId,
        num_tokens: u32,
        job: &Job,
    ) -> PageHash {
        let hashes = job.known_hashes(0, num_tokens / self.page_sizes[0]);
        let hash = *hashes.last().expect("it was saved at the end of a page");
        self.snapshot_pool().publish(snapshot, hash, job.tenant());
        hash
    }

    pub(crate) fn discard_snapshot(&mut self, snapshot: SnapshotId) {
        self.snapshot_pool().discard(snapshot);
    }

    /// A newer snapshot of the same request takes the place of one.
    pub(crate) fn replace_snapshot(&mut self, hash: PageHash) {
        self.snapshot_pool().replace(hash);
    }

    /// Parks `num` snapshots that steps in flight save and nobody wants.
    pub(crate) fn park_snapshots(&mut self, num: u32) {
        if let Some(snapshots) = &mut self.snapshots {
            snapshots.pool.park(num);
        }
    }

    /// The last of these steps is complete.
    pub(crate) fn unpark_snapshots(&mut self, snapshots: Vec<SnapshotId>) {
        for snapshot in snapshots {
            self.snapshot_pool().unpark(snapshot);
        }
    }

    fn snapshot_pool(&mut self) -> &mut SnapshotPool {
        let snapshots = self.snapshots.as_mut();
        &mut snapshots
            .expect("only models with slot state have snapshots")
            .pool
    }

    pub(crate) fn counts(&self, kind: usize) -> PageCounts {
        self.pools[kind].counts()
    }

    /// Cached pages that were evicted, since the start.
    pub(crate) fn num_evicted(&self) -> u64 {
        self.pools.iter().map(PagePool::num_evicted).sum()
    }
}

fn common_multiple(a: u32, b: u32) -> u32 {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a / divisor * b
}
