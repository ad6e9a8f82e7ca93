//! The pages of one cache kind: every page is free, leased, cached or parked.

use std::collections::hash_map::Entry;
use std::fmt;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::eviction_order::{EvictionOrder, OwnList};
use crate::ids::{PageId, TenantId};
use crate::kv_event::{KvEvent, StoredPage};
use crate::prefix_hasher::PageHash;

/// Pages of one kind that one request holds, in the order of the positions they cover.
#[derive(Clone, Debug, Default)]
#[must_use = "a lease that is dropped loses its pages"]
pub(crate) struct PageList {
    pages: Vec<PageId>,
    /// Leading pages that later prompts can find, here or as another request's copy.
    num_published: u32,
}

impl PageList {
    pub(crate) fn num_pages(&self) -> u32 {
        count(&self.pages)
    }

    pub(crate) fn num_published(&self) -> u32 {
        self.num_published
    }

    /// The last `num` pages.
    pub(crate) fn last(&self, num: u32) -> &[PageId] {
        &self.pages[self.pages.len() - num as usize..]
    }
}

/// Pages of a request that has ended while steps in flight still use them.
#[derive(Clone, Debug)]
#[must_use = "parked pages that are dropped are lost"]
pub(crate) struct ParkedPages {
    pages: Vec<PageId>,
    tenant: TenantId,
}

/// What a prompt finds in the cache of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheHits {
    /// Leading pages of the prompt that are cached.
    pub(crate) num_pages: u32,
    /// Those that no request holds. Leasing them leaves fewer for others.
    pub(crate) num_cached: u32,
}

/// Counts of pages by state; they add up to the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Without content or user.
    pub free: u32,
    /// Leased by requests. A page that several share counts once.
    pub leased: u32,
    /// Held by no request, with content that later prompts may find.
    pub cached: u32,
    /// Released, but used by a step in flight.
    pub parked: u32,
}

#[derive(Clone, Debug, Default)]
struct Page {
    /// The hash by which prompts find it.
    hash: Option<PageHash>,
    num_leases: u32,
    num_parkings: u32,
    /// Its index in the last lookup, if it was found.
    found_at: u32,
}

impl Page {
    fn is_held(&self) -> bool {
        self.num_leases + self.num_parkings > 0
    }
}

/// The last lookup, kept current while pages change hands. The head of the queue asks at every plan,
/// mostly for the same prompt.
#[derive(Clone, Debug, Default)]
struct Lookup {
    /// The prompt's last hash, which covers all before it.
    last: Option<PageHash>,
    /// The prompt's cached pages, from the first on.
    found: Vec<PageId>,
    /// Those that no request holds.
    num_cached: u32,
    /// Hashes that were looked up.
    #[cfg(test)]
    num_probes: u32,
}

/// All pages of one kind. No operation visits more pages than it moves.
#[derive(Clone)]
pub(crate) struct PagePool {
    pages: Vec<Page>,
    free: Vec<PageId>,
    /// Cached pages in the order of eviction.
    cached: EvictionOrder,
    by_hash: FxHashMap<PageHash, PageId>,
    lookup: Lookup,
    num_leased: u32,
    num_parked: u32,
    num_evicted: u64,
    /// What the pages that prompts can find have gained and lost; None if nobody listens.
    events: Option<Vec<KvEvent>>,
    /// The hashes of evicted pages; None if nobody asks.
    evicted: Option<Vec<PageHash>>,
    /// Which cache kind this is.
    kind: u32,
}

impl PagePool {
    pub(crate) fn new(kind: u32, num_pages: u32) -> Self {
        Self {
            pages: vec![Page::default(); num_pages as usize],
            free: (0..num_pages).rev().map(PageId).collect(),
            cached: EvictionOrder::new(num_pages),
            by_hash: FxHashMap::default(),
            lookup: Lookup::default(),
            num_leased: 0,
            num_parked: 0,
            num_evicted: 0,
            events: None,
            evicted: None,
            kind,
        }
    }

    /// Records events from now on.
    pub(crate) fn record_events(&mut self) {
        self.events.get_or_insert_default();
    }

    /// Records which pages are evicted from now on.
    pub(crate) fn record_evicted(&mut self) {
        self.evicted.get_or_insert_default();
    }

    /// The hashes of the pages that were evicted since the last call.
    pub(crate) fn drain_evicted(&mut self) -> impl Iterator<Item = PageHash> {
        self.evicted
            .iter_mut()
            .flat_map(|evicted| evicted.drain(..))
    }

    /// The device has lost all pages. No lease is left.
    pub(crate) fn forget_all(&mut self) {
        let (kind, num_pages) = (self.kind, u32::try_from(self.pages.len()));
        let mut events = self.events.take();
        if let Some(events) = &mut events {
            let hashes = self.pages.iter().filter_map(|page| page.hash);
            events.extend(hashes.map(|hash| KvEvent::Removed { kind, hash }));
        }
        *self = Self {
            events,
            evicted: self.evicted.take().map(|_| Vec::new()),
            num_evicted: self.num_evicted,
            ..Self::new(kind, num_pages.expect("pages have numbers of a u32"))
        };
    }

    /// Moves the events since the last call to `into`, in order.
    pub(crate) fn take_events(&mut self, into: &mut Vec<KvEvent>) {
        into.extend(self.events.iter_mut().flat_map(|events| events.drain(..)));
    }

    /// Pages that can be leased now: free and cached ones.
    pub(crate) fn num_available(&self) -> u32 {
        count(&self.free) + self.cached.len()
    }

    pub(crate) fn num_parked(&self) -> u32 {
        self.num_parked
    }

    /// Cached pages that were evicted, since the start.
    pub(crate) fn num_evicted(&self) -> u64 {
        self.num_evicted
    }

    pub(crate) fn counts(&self) -> PageCounts {
        PageCounts {
            free: count(&self.free),
            leased: self.num_leased,
            cached: self.cached.len(),
            parked: self.num_parked,
        }
    }

    /// Number of a prompt's leading pages that are cached.
    ///
    /// Each page is found once. Asking for the same prompt again costs one look-up, of the missing
    /// hash, even while a full cache evicts pages.
    pub(crate) fn find(&mut self, hashes: &[PageHash]) -> CacheHits {
        if self.lookup.last.as_ref() != hashes.last() {
            self.lookup.last = hashes.last().copied();
            self.lookup.found.clear();
            self.lookup.num_cached = 0;
        }
        self.find_more(hashes);
        let hits = CacheHits {
            num_pages: count(&self.lookup.found),
            num_cached: self.lookup.num_cached,
        };
        debug_assert_eq!(hits, self.hits_of(hashes));
        hits
    }

    /// Continues after the pages already found.
    fn find_more(&mut self, hashes: &[PageHash]) {
        for hash in &hashes[self.lookup.found.len()..] {
            #[cfg(test)]
            {
                self.lookup.num_probes += 1;
            }
            let Some(page) = self.by_hash.get(hash) else {
                return;
            };
            let state = &mut self.pages[page.0 as usize];
            state.found_at = count(&self.lookup.found);
            self.lookup.found.push(*page);
            self.lookup.num_cached += u32::from(!state.is_held());
        }
    }

    /// Of the leading pages of these hashes, those that no request holds.
    pub(crate) fn num_cached_of(&self, hashes: &[PageHash]) -> u32 {
        self.hits_of(hashes).num_cached
    }

    /// The leading pages of these hashes. Unlike [`PagePool::find`], it leaves the head's lookup alone.
    pub(crate) fn hits_of(&self, hashes: &[PageHash]) -> CacheHits {
        let found = hashes.iter().map_while(|hash| self.by_hash.get(hash));
        found.fold(CacheHits::default(), |hits, page| CacheHits {
            num_pages: hits.num_pages + 1,
            num_cached: hits.num_cached + u32::from(!self.pages[page.0 as usize].is_held()),
        })
    }

    /// Whether prompts can find a page by this hash.
    pub(crate) fn has_page(&self, hash: PageHash) -> bool {
        self.by_hash.contains_key(&hash)
    }

    /// Leases pages that were just found.
    pub(crate) fn pin(&mut self, hashes: &[PageHash]) -> PageList {
        let mut lease = PageList {
            pages: Vec::with_capacity(hashes.len()),
            num_published: 0,
        };
        self.pin_more(&mut lease, hashes);
        lease
    }

    /// Appends pages that were just found to a lease whose own pages are all published.
    pub(crate) fn pin_more(&mut self, lease: &mut PageList, hashes: &[PageHash]) {
        debug_assert_eq!(lease.num_published, lease.num_pages());
        for hash in hashes {
            let page = self.by_hash[hash];
            self.pin_page(page);
            lease.pages.push(page);
        }
        lease.num_published = lease.num_pages();
    }

    /// Adds `num` pages to a lease. The caller has checked that so many are available.
    pub(crate) fn grow(&mut self, lease: &mut PageList, num: u32) {
        lease.pages.extend((0..num).map(|_| self.take()));
        self.num_leased += num;
    }

    /// Publishes the next page of a lease. Its tokens are final, and its KV is computed or in flight.
    ///
    /// If another page has the hash already, that one stays the published copy. `describe` gives the page
    /// to listeners.
    pub(crate) fn publish(
        &mut self,
        lease: &mut PageList,
        hash: PageHash,
        describe: impl FnOnce() -> StoredPage,
    ) {
        let page = lease.pages[lease.num_published as usize];
        lease.num_published += 1;
        if let Entry::Vacant(entry) = self.by_hash.entry(hash) {
            entry.insert(page);
            self.pages[page.0 as usize].hash = Some(hash);
            if let Some(events) = &mut self.events {
                events.push(KvEvent::Stored(describe()));
            }
        }
    }

    /// Frees the pages of a lease after the first `num`.
    pub(crate) fn shrink(&mut self, lease: &mut PageList, num: u32) {
        for page in lease.pages.drain(num as usize..).rev() {
            self.pages[page.0 as usize].num_leases -= 1;
            self.num_leased -= 1;
            self.free.push(page);
        }
    }

    /// Releases a lease, last page first. A prompt's later pages are then evicted before the
    /// earlier ones, without which nothing could find them.
    pub(crate) fn release(&mut self, lease: PageList, tenant: TenantId) {
        let list = self.cached.own_list(tenant);
        for page in lease.pages.into_iter().rev() {
            self.pages[page.0 as usize].num_leases -= 1;
            self.leave_lease(page, list);
        }
    }

    /// The published pages with these hashes.
    pub(crate) fn pages_of(&self, hashes: &[PageHash]) -> FxHashSet<PageId> {
        hashes.iter().map(|hash| self.by_hash[hash]).collect()
    }

    /// Pages that no request holds once this lease too is gone, beside those `kept`. `lost` counts the leases that
    /// shared pages have lost so far.
    pub(crate) fn num_released_by(
        &self,
        lease: &PageList,
        kept: &FxHashSet<PageId>,
        lost: &mut FxHashMap<PageId, u32>,
    ) -> u32 {
        let is_last = |page: &&PageId| match self.pages[page.0 as usize].num_leases {
            1 => true,
            num_leases => {
                let num_lost = lost.entry(**page).or_default();
                *num_lost += 1;
                *num_lost == num_leases
            }
        };
        let others = lease.pages.iter().filter(|page| !kept.contains(page));
        let num = others.filter(is_last).count();
        u32::try_from(num).expect("a pool is made from a u32 of pages")
    }

    /// Parks the pages of a lease that steps in flight still use.
    pub(crate) fn park(&mut self, lease: PageList, tenant: TenantId) -> ParkedPages {
        for page in &lease.pages {
            let state = &mut self.pages[page.0 as usize];
            state.num_leases -= 1;
            state.num_parkings += 1;
            if state.num_leases == 0 {
                self.num_leased -= 1;
                self.num_parked += 1;
            }
        }
        let pages = lease.pages;
        ParkedPages { pages, tenant }
    }

    /// Frees parked pages: the last step that used them is complete.
    pub(crate) fn unpark(&mut self, parked: ParkedPages) {
        let list = self.cached.own_list(parked.tenant);
        for page in parked.pages.into_iter().rev() {
            let state = &mut self.pages[page.0 as usize];
            state.num_parkings -= 1;
            if state.num_parkings == 0 && state.num_leases == 0 {
                self.num_parked -= 1;
                self.return_page(page, list);
            }
        }
    }

    fn pin_page(&mut self, page: PageId) {
        let state = &mut self.pages[page.0 as usize];
        state.num_leases += 1;
        if state.num_leases > 1 {
            return;
        }
        self.num_leased += 1;
        if state.num_parkings > 0 {
            self.num_parked -= 1;
        } else {
            self.lookup.num_cached -= u32::from(self.is_found(page));
            self.cached.remove(page.0);
        }
    }

    /// Takes a free page, or else evicts one.
    fn take(&mut self) -> PageId {
        let page = self.free.pop().unwrap_or_else(|| self.evict());
        self.pages[page.0 as usize].num_leases = 1;
        page
    }

    fn evict(&mut self) -> PageId {
        let page = PageId(self.cached.first().expect("the caller saw enough pages"));
        self.drop_match(page);
        self.cached.remove(page.0);
        let hash = self.pages[page.0 as usize].hash;
        let hash = hash.expect("only pages with a hash are cached");
        self.remove_hash(page, hash);
        if let Some(evicted) = &mut self.evicted {
            evicted.push(hash);
        }
        self.num_evicted += 1;
        page
    }

    /// Lets nobody find the pages with these hashes any more. Those that nobody holds are free.
    pub(crate) fn unpublish(&mut self, hashes: &[PageHash]) {
        for hash in hashes {
            let Some(page) = self.by_hash.get(hash).copied() else {
                continue;
            };
            self.drop_match(page);
            self.remove_hash(page, *hash);
            if !self.pages[page.0 as usize].is_held() {
                self.cached.remove(page.0);
                self.free.push(page);
            }
        }
    }

    /// Lets nobody find any page any more.
    pub(crate) fn unpublish_all(&mut self) {
        let hashes: Vec<PageHash> = self.by_hash.keys().copied().collect();
        self.unpublish(&hashes);
    }

    fn remove_hash(&mut self, page: PageId, hash: PageHash) {
        self.pages[page.0 as usize].hash = None;
        self.by_hash.remove(&hash);
        if let Some(events) = &mut self.events {
            let kind = self.kind;
            events.push(KvEvent::Removed { kind, hash });
        }
    }

    /// Cuts the last lookup before this page.
    fn drop_match(&mut self, page: PageId) {
        if self.is_found(page) {
            let first = self.pages[page.0 as usize].found_at;
            for lost in self.lookup.found.drain(first as usize..) {
                self.lookup.num_cached -= u32::from(!self.pages[lost.0 as usize].is_held());
            }
        }
    }

    /// Whether the last lookup found this page.
    fn is_found(&self, page: PageId) -> bool {
        let index = self.pages[page.0 as usize].found_at;
        self.lookup.found.get(index as usize) == Some(&page)
    }

    /// One lease of the page is gone. Parked or shared, it stays where it is.
    fn leave_lease(&mut self, page: PageId, list: OwnList) {
        let state = &self.pages[page.0 as usize];
        if state.num_leases > 0 {
            return;
        }
        self.num_leased -= 1;
        if state.num_parkings > 0 {
            self.num_parked += 1;
        } else {
            self.return_page(page, list);
        }
    }

    /// Nothing uses the page any more.
    fn return_page(&mut self, page: PageId, list: OwnList) {
        let state = &self.pages[page.0 as usize];
        if state.hash.is_some() {
            self.lookup.num_cached += u32::from(self.is_found(page));
            self.cached.push(page.0, list);
        } else {
            self.free.push(page);
        }
    }
}

/// The pages by state, each set in its order of use.
impl fmt::Debug for PagePool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with_hash = |page: u32| (PageId(page), self.pages[page as usize].hash);
        let mut held: Vec<_> = self.by_hash.iter().collect();
        held.retain(|(_, page)| self.pages[page.0 as usize].is_held());
        held.sort_unstable();
        let lists = self.cached.iter();
        let cached: Vec<Vec<_>> = lists.map(|list| list.map(with_hash).collect()).collect();
        formatter
            .debug_struct("PagePool")
            .field("cached", &cached)
            .field("held", &held)
            .field("free", &self.free)
            .finish_non_exhaustive()
    }
}

fn count(pages: &[PageId]) -> u32 {
    u32::try_from(pages.len()).expect("a pool is made from a u32 of pages")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix_hasher::{HashSeed, PrefixHasher};

    const NUM_HASHES: u32 = 6;

    fn sample_page_hashes() -> Vec<PageHash> {
        let mut hasher = PrefixHasher::new(HashSeed([1, 2]));
        let root = Some(hasher.root(0));
        let chain = std::iter::successors(root, |parent| Some(hasher.child(*parent, &[7])));
        chain.skip(1).take(NUM_HASHES as usize).collect()
    }

    /// A pool that keeps the first pages of a prompt.
    fn pool_with(num_cached: u32, hashes: &[PageHash]) -> PagePool {
        let mut pool = PagePool::new(0, 8);
        let mut lease = PageList::default();
        pool.grow(&mut lease, num_cached);
        for hash in &hashes[..num_cached as usize] {
            publish(&mut pool, &mut lease, *hash);
        }
        pool.release(lease, TenantId(0));
        pool
    }

    fn publish(pool: &mut PagePool, lease: &mut PageList, hash: PageHash) {
        pool.publish(lease, hash, || unreachable!("nobody listens"));
    }

    /// Hashes that a lookup probes.
    fn num_probes(pool: &mut PagePool, hashes: &[PageHash]) -> u32 {
        let before = pool.lookup.num_probes;
        pool.find(hashes);
        pool.lookup.num_probes - before
    }

    #[test]
    fn a_prompt_that_is_looked_up_again_costs_the_name_that_is_missing() {
        let hashes = sample_page_hashes();
        let mut pool = pool_with(3, &hashes);
        assert_eq!(num_probes(&mut pool, &hashes), 4);
        assert_eq!(num_probes(&mut pool, &hashes), 1);
        let lease = pool.pin(&hashes[..2]);
        assert_eq!(num_probes(&mut pool, &hashes), 1);
        pool.release(lease, TenantId(0));
        assert_eq!(num_probes(&mut pool, &hashes), 1);
    }

    #[test]
    fn a_full_cache_that_loses_the_prompts_pages_one_by_one_costs_no_more() {
        let hashes = sample_page_hashes();
        let mut pool = pool_with(6, &hashes);
        assert_eq!(pool.find(&hashes).num_pages, 6);
        let mut others = PageList::default();
        pool.grow(&mut others, 2);
        for num_left in (0..6).rev() {
            pool.grow(&mut others, 1);
            assert_eq!(num_probes(&mut pool, &hashes), 1);
            assert_eq!(pool.find(&hashes).num_pages, num_left);
        }
        pool.release(others, TenantId(0));
    }

    #[test]
    fn a_page_that_was_found_and_changes_hands_is_seen() {
        let hashes = sample_page_hashes();
        let mut pool = pool_with(3, &hashes);
        assert_eq!(pool.find(&hashes).num_cached, 3);
        let lease = pool.pin(&hashes[..1]);
        assert_eq!(pool.find(&hashes).num_cached, 2);
        let parked = pool.park(lease, TenantId(0));
        assert_eq!(pool.find(&hashes).num_cached, 2);
        pool.unpark(parked);
        assert_eq!(pool.find(&hashes).num_cached, 3);
    }

    /// Another request published the first page, so it is evicted before those after it.
    #[test]
    fn pages_after_one_that_is_evicted_are_found_again_when_it_comes_back() {
        let hashes = sample_page_hashes();
        let mut pool = pool_with(1, &hashes);
        let mut lease = PageList::default();
        pool.grow(&mut lease, 3);
        for hash in &hashes[..3] {
            publish(&mut pool, &mut lease, *hash);
        }
        assert_eq!(pool.find(&hashes).num_pages, 3);
        let mut others = PageList::default();
        pool.grow(&mut others, 5);
        let nothing = CacheHits::default();
        assert_eq!(pool.find(&hashes), nothing);
        pool.release(lease, TenantId(0));
        assert_eq!(pool.find(&hashes), nothing);
        pool.release(others, TenantId(0));
        let mut again = PageList::default();
        pool.grow(&mut again, 1);
        publish(&mut pool, &mut again, hashes[0]);
        let (num_pages, num_cached) = (3, 2);
        let hits = CacheHits {
            num_pages,
            num_cached,
        };
        assert_eq!(pool.find(&hashes), hits);
        pool.release(again, TenantId(0));
    }

    #[test]
    fn the_page_that_was_missing_is_seen_when_it_comes() {
        let hashes = sample_page_hashes();
        let mut pool = pool_with(3, &hashes);
        let mut lease = pool.pin(&hashes[..3]);
        assert_eq!(pool.find(&hashes).num_pages, 3);
        pool.grow(&mut lease, 1);
        publish(&mut pool, &mut lease, hashes[3]);
        assert_eq!(pool.find(&hashes).num_pages, 4);
        pool.release(lease, TenantId(0));
    }

    #[test]
    fn another_prompt_is_looked_up_anew() {
        let hashes = sample_page_hashes();
        let mut pool = pool_with(3, &hashes);
        pool.find(&hashes);
        assert_eq!(pool.find(&hashes[..2]).num_pages, 2);
        assert_eq!(pool.find(&[]).num_pages, 0);
        assert_eq!(pool.find(&hashes).num_pages, 3);
    }
}
