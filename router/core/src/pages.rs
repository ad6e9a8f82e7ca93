//! The KV pool: every page is free, leased, cached or parked.

use std::collections::hash_map::Entry;
use std::fmt;

use rustc_hash::FxHashMap;

use crate::ids::PageId;
use crate::prefix::PageKey;
use crate::ring::Ring;

/// Pages that one request holds, in the order of the positions that they cover.
///
/// One list, because there is one kind of cache today; a model with several kinds has one list each.
#[derive(Clone, Debug, Default)]
#[must_use = "a lease that is dropped loses its pages"]
pub(crate) struct Lease {
    pages: Vec<PageId>,
    /// Leading pages that later prompts can find, or whose content others have published before.
    num_published: u32,
}

impl Lease {
    pub(crate) fn num_pages(&self) -> u32 {
        count(&self.pages)
    }

    pub(crate) fn num_published(&self) -> u32 {
        self.num_published
    }

    pub(crate) fn pages(&self) -> &[PageId] {
        &self.pages
    }
}

/// Pages whose request is gone while steps on the wire still name them.
#[derive(Clone, Debug)]
#[must_use = "parked pages that are dropped are lost"]
pub(crate) struct ParkedPages(Vec<PageId>);

/// What a prompt finds in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hits {
    /// Leading pages of the prompt that are there.
    pub(crate) num_pages: u32,
    /// Those of them that nobody holds: taking them leaves fewer for others.
    pub(crate) num_cached: u32,
}

impl Hits {
    fn and(self, page: &Page) -> Self {
        Self {
            num_pages: self.num_pages + 1,
            num_cached: self.num_cached + u32::from(page.num_leases == 0 && page.num_parkings == 0),
        }
    }
}

/// Counts of pages by state; they add up to the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// In nobody's hands.
    pub free: u32,
    /// In the leases of requests; one that several share counts once.
    pub leased: u32,
    /// Unreferenced, with content that a later prompt may find.
    pub cached: u32,
    /// Released, but named by a step on the wire.
    pub parked: u32,
}

#[derive(Clone, Debug, Default)]
struct Page {
    /// By what name prompts find it.
    key: Option<PageKey>,
    num_leases: u32,
    num_parkings: u32,
    /// The last lookup that found it.
    found_by: u64,
}

/// The last lookup: the head of the queue asks at every plan, mostly for what it asked for before.
#[derive(Clone, Debug, Default)]
struct Lookup {
    number: u64,
    /// The prompt's last name, which stands for all before it; none once the answer may be another.
    last: Option<PageKey>,
    /// The first name that no page has.
    missing: Option<PageKey>,
    hits: Hits,
}

impl Lookup {
    fn answers(&self, keys: &[PageKey]) -> bool {
        self.last.is_some() && self.last.as_ref() == keys.last()
    }

    /// A page that the lookup `found_by` found is cached now, or no longer.
    fn learn_of_page(&mut self, found_by: u64) {
        if found_by == self.number {
            self.last = None;
        }
    }

    /// A page got its name.
    fn learn_of_name(&mut self, name: PageKey) {
        if self.missing == Some(name) {
            self.last = None;
        }
    }
}

/// All pages of a replica. No operation looks at more pages than it moves.
#[derive(Clone)]
pub(crate) struct PagePool {
    pages: Vec<Page>,
    free: Vec<PageId>,
    /// The cached pages; the one that was released first is the first to go.
    cached: Ring,
    by_key: FxHashMap<PageKey, PageId>,
    lookup: Lookup,
    num_leased: u32,
    num_parked: u32,
    num_evicted: u64,
}

impl PagePool {
    pub(crate) fn new(num_pages: u32) -> Self {
        Self {
            pages: vec![Page::default(); num_pages as usize],
            free: (0..num_pages).rev().map(PageId).collect(),
            cached: Ring::new(num_pages),
            by_key: FxHashMap::default(),
            lookup: Lookup::default(),
            num_leased: 0,
            num_parked: 0,
            num_evicted: 0,
        }
    }

    /// Pages that a lease can have now: free ones, then cached ones.
    pub(crate) fn num_available(&self) -> u32 {
        count(&self.free) + self.cached.len()
    }

    pub(crate) fn num_parked(&self) -> u32 {
        self.num_parked
    }

    /// Cached pages that were given to others, since the start.
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

    /// How many of a prompt's pages, from its first one on, are in the cache.
    ///
    /// A prompt that is looked up again costs nothing until one of these pages, or the one that is
    /// missing behind them, has changed hands.
    pub(crate) fn find(&mut self, keys: &[PageKey]) -> Hits {
        if !self.lookup.answers(keys) {
            self.look_up(keys);
        }
        debug_assert_eq!(self.lookup.hits, self.hits_of(keys));
        self.lookup.hits
    }

    fn hits_of(&self, keys: &[PageKey]) -> Hits {
        let found = keys.iter().map_while(|key| self.by_key.get(key));
        found.fold(Hits::default(), |hits, page| {
            hits.and(&self.pages[page.0 as usize])
        })
    }

    fn look_up(&mut self, keys: &[PageKey]) {
        let number = self.lookup.number + 1;
        let mut hits = Hits::default();
        for page in keys.iter().map_while(|key| self.by_key.get(key)) {
            let page = &mut self.pages[page.0 as usize];
            page.found_by = number;
            hits = hits.and(page);
        }
        self.lookup = Lookup {
            number,
            last: keys.last().copied(),
            missing: keys.get(hits.num_pages as usize).copied(),
            hits,
        };
    }

    /// A lease of pages that [`PagePool::find`] has just found.
    pub(crate) fn pin(&mut self, keys: &[PageKey]) -> Lease {
        let pages: Vec<PageId> = keys.iter().map(|key| self.by_key[key]).collect();
        for page in &pages {
            self.pin_page(*page);
        }
        let num_published = count(&pages);
        Lease {
            pages,
            num_published,
        }
    }

    /// Adds `num` available pages to a lease and shows them; the caller has seen that there are as many.
    pub(crate) fn grow<'a>(&mut self, lease: &'a mut Lease, num: u32) -> &'a [PageId] {
        let first = lease.pages.len();
        lease.pages.extend((0..num).map(|_| self.take()));
        self.num_leased += num;
        &lease.pages[first..]
    }

    /// Lets later prompts find the next page of a lease; its KV is computed and its tokens are final.
    ///
    /// Where another page has the name already, this one stays its lease's own.
    pub(crate) fn publish(&mut self, lease: &mut Lease, key: PageKey) {
        let page = lease.pages[lease.num_published as usize];
        lease.num_published += 1;
        if let Entry::Vacant(entry) = self.by_key.entry(key) {
            entry.insert(page);
            self.pages[page.0 as usize].key = Some(key);
            self.lookup.learn_of_name(key);
        }
    }

    /// Takes the pages behind the first `num` out of a lease.
    pub(crate) fn shrink(&mut self, lease: &mut Lease, num: u32) {
        for page in lease.pages.drain(num as usize..).rev() {
            self.pages[page.0 as usize].num_leases -= 1;
            self.num_leased -= 1;
            self.free.push(page);
        }
    }

    /// Releases a lease, its last page first: of one prompt the later pages are evicted before the
    /// earlier ones, without which they could not be found.
    pub(crate) fn release(&mut self, lease: Lease) {
        for page in lease.pages.into_iter().rev() {
            self.pages[page.0 as usize].num_leases -= 1;
            self.leave_lease(page);
        }
    }

    /// Takes a lease whose pages steps on the wire still name.
    pub(crate) fn park(&mut self, lease: Lease) -> ParkedPages {
        for page in &lease.pages {
            let state = &mut self.pages[page.0 as usize];
            state.num_leases -= 1;
            state.num_parkings += 1;
            if state.num_leases == 0 {
                self.num_leased -= 1;
                self.num_parked += 1;
            }
        }
        ParkedPages(lease.pages)
    }

    /// Lets parked pages go: the last step that named them is in.
    pub(crate) fn unpark(&mut self, parked: ParkedPages) {
        for page in parked.0.into_iter().rev() {
            let state = &mut self.pages[page.0 as usize];
            state.num_parkings -= 1;
            if state.num_parkings == 0 && state.num_leases == 0 {
                self.num_parked -= 1;
                self.settle(page);
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
            self.lookup.learn_of_page(state.found_by);
            self.cached.remove(page.0);
        }
    }

    /// A free page, else the one that has been cached for longest, for one lease.
    fn take(&mut self) -> PageId {
        let page = self.free.pop().unwrap_or_else(|| self.evict());
        self.pages[page.0 as usize].num_leases = 1;
        page
    }

    fn evict(&mut self) -> PageId {
        let page = self.cached.first().expect("the caller saw enough pages");
        self.cached.remove(page);
        let state = &mut self.pages[page as usize];
        self.lookup.learn_of_page(state.found_by);
        let key = state.key.take();
        self.by_key
            .remove(&key.expect("only pages with a name are cached"));
        self.num_evicted += 1;
        PageId(page)
    }

    /// One lease of the page is gone; parked or in other leases it stays where it is.
    fn leave_lease(&mut self, page: PageId) {
        let state = &self.pages[page.0 as usize];
        if state.num_leases > 0 {
            return;
        }
        self.num_leased -= 1;
        if state.num_parkings > 0 {
            self.num_parked += 1;
        } else {
            self.settle(page);
        }
    }

    /// Nobody names the page any more.
    fn settle(&mut self, page: PageId) {
        let state = &self.pages[page.0 as usize];
        if state.key.is_some() {
            self.lookup.learn_of_page(state.found_by);
            self.cached.push(page.0);
        } else {
            self.free.push(page);
        }
    }
}

/// The pages by state, each set in the order in which it is used.
impl fmt::Debug for PagePool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |page: u32| (PageId(page), self.pages[page as usize].key);
        let mut held: Vec<_> = self.by_key.iter().collect();
        held.retain(|(_, page)| {
            let state = &self.pages[page.0 as usize];
            state.num_leases + state.num_parkings > 0
        });
        held.sort_unstable();
        let cached: Vec<_> = self.cached.iter().map(named).collect();
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
    use crate::prefix::{HashSeed, Namer};

    const NUM_KEYS: u32 = 6;

    fn keys() -> Vec<PageKey> {
        let mut namer = Namer::new(HashSeed([1, 2]));
        let root = Some(namer.root(0));
        let chain = std::iter::successors(root, |parent| Some(namer.child(*parent, &[7])));
        chain.skip(1).take(NUM_KEYS as usize).collect()
    }

    /// A pool that keeps the first pages of a prompt.
    fn pool_with(num_cached: u32, keys: &[PageKey]) -> PagePool {
        let mut pool = PagePool::new(8);
        let mut lease = Lease::default();
        pool.grow(&mut lease, num_cached);
        for key in &keys[..num_cached as usize] {
            pool.publish(&mut lease, *key);
        }
        pool.release(lease);
        pool
    }

    fn looks_up_again(pool: &mut PagePool, keys: &[PageKey]) -> bool {
        let before = pool.lookup.number;
        pool.find(keys);
        pool.lookup.number > before
    }

    #[test]
    fn a_prompt_is_looked_up_once_while_nothing_of_it_changes() {
        let keys = keys();
        let mut pool = pool_with(3, &keys);
        assert!(looks_up_again(&mut pool, &keys));
        assert!(!looks_up_again(&mut pool, &keys));
        let mut others = Lease::default();
        pool.grow(&mut others, 1);
        pool.publish(&mut others, keys[5]);
        assert!(!looks_up_again(&mut pool, &keys));
        pool.release(others);
        assert!(!looks_up_again(&mut pool, &keys));
    }

    #[test]
    fn a_page_that_was_found_and_changes_hands_is_seen() {
        let keys = keys();
        let mut pool = pool_with(3, &keys);
        pool.find(&keys);
        let lease = pool.pin(&keys[..1]);
        assert_eq!(pool.find(&keys).num_cached, 2);
        pool.release(lease);
        assert_eq!(pool.find(&keys).num_cached, 3);
        let mut others = Lease::default();
        pool.grow(&mut others, 6);
        assert_eq!(pool.find(&keys).num_pages, 2);
        pool.release(others);
    }

    #[test]
    fn the_page_that_was_missing_is_seen_when_it_comes() {
        let keys = keys();
        let mut pool = pool_with(3, &keys);
        pool.find(&keys);
        let mut lease = pool.pin(&keys[..3]);
        pool.grow(&mut lease, 1);
        pool.publish(&mut lease, keys[3]);
        assert_eq!(pool.find(&keys).num_pages, 4);
        pool.release(lease);
    }

    #[test]
    fn another_prompt_is_looked_up_anew() {
        let keys = keys();
        let mut pool = pool_with(3, &keys);
        pool.find(&keys);
        assert_eq!(pool.find(&keys[..2]).num_pages, 2);
        assert_eq!(pool.find(&[]).num_pages, 0);
    }
}
