//! The KV pool: every page is free, leased, cached or parked.

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
}

/// All pages of a replica. No operation looks at more pages than it moves.
#[derive(Clone)]
pub(crate) struct PagePool {
    pages: Vec<Page>,
    free: Vec<PageId>,
    /// The cached pages; the one that was released first is the first to go.
    cached: Ring,
    by_key: FxHashMap<PageKey, PageId>,
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
    pub(crate) fn find(&self, keys: &[PageKey]) -> Hits {
        let mut hits = Hits::default();
        for page in keys.iter().map_while(|key| self.by_key.get(key)) {
            let page = &self.pages[page.0 as usize];
            hits.num_pages += 1;
            hits.num_cached += u32::from(page.num_leases == 0 && page.num_parkings == 0);
        }
        hits
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
        self.by_key.entry(key).or_insert_with(|| {
            self.pages[page.0 as usize].key = Some(key);
            page
        });
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
        let key = self.pages[page as usize].key.take();
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
        match self.pages[page.0 as usize].key {
            Some(_) => self.cached.push(page.0),
            None => self.free.push(page),
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
