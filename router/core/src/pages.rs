//! The KV pool: every page is free, leased, cached or parked.

use crate::ids::PageId;

/// Pages that one request holds, in the order of the positions that they cover.
///
/// One list, because there is one kind of cache today; a model with several kinds has one list each.
#[derive(Clone, Debug, Default)]
#[must_use = "a lease that is dropped loses its pages"]
pub(crate) struct Lease {
    pages: Vec<PageId>,
}

impl Lease {
    pub(crate) fn num_pages(&self) -> u32 {
        count(&self.pages)
    }
}

/// Pages whose request is gone while steps on the wire still name them.
#[derive(Clone, Debug)]
#[must_use = "parked pages that are dropped are lost"]
pub(crate) struct ParkedPages(Vec<PageId>);

/// Counts of pages by state; they add up to the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// In nobody's hands.
    pub free: u32,
    /// In the lease of a request.
    pub leased: u32,
    /// Unreferenced, with content that a later prompt may find.
    pub cached: u32,
    /// Released, but named by a step on the wire.
    pub parked: u32,
}

/// All pages of a replica. No operation looks at more pages than it moves.
#[derive(Clone, Debug)]
pub(crate) struct PagePool {
    free: Vec<PageId>,
    num_leased: u32,
    num_parked: u32,
}

impl PagePool {
    pub(crate) fn new(num_pages: u32) -> Self {
        Self {
            free: (0..num_pages).rev().map(PageId).collect(),
            num_leased: 0,
            num_parked: 0,
        }
    }

    pub(crate) fn num_free(&self) -> u32 {
        count(&self.free)
    }

    pub(crate) fn num_parked(&self) -> u32 {
        self.num_parked
    }

    pub(crate) fn counts(&self) -> PageCounts {
        PageCounts {
            free: self.num_free(),
            leased: self.num_leased,
            cached: 0,
            parked: self.num_parked,
        }
    }

    /// Adds `num` free pages to a lease and shows them; the caller has seen that there are as many.
    pub(crate) fn grow<'a>(&mut self, lease: &'a mut Lease, num: u32) -> &'a [PageId] {
        let first = lease.pages.len();
        let kept = self.free.len() - num as usize;
        lease.pages.extend(self.free.drain(kept..).rev());
        self.num_leased += num;
        &lease.pages[first..]
    }

    /// Frees a lease, its last page first.
    pub(crate) fn release(&mut self, lease: Lease) {
        self.num_leased -= lease.num_pages();
        self.free.extend(lease.pages.into_iter().rev());
    }

    /// Takes a lease whose pages steps on the wire still name.
    pub(crate) fn park(&mut self, lease: Lease) -> ParkedPages {
        self.num_leased -= lease.num_pages();
        self.num_parked += lease.num_pages();
        ParkedPages(lease.pages)
    }

    /// Frees parked pages: the last step that named them is in.
    pub(crate) fn unpark(&mut self, parked: ParkedPages) {
        self.num_parked -= count(&parked.0);
        self.free.extend(parked.0.into_iter().rev());
    }
}

fn count(pages: &[PageId]) -> u32 {
    u32::try_from(pages.len()).expect("a pool is made from a u32 of pages")
}
