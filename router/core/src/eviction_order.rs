//! Cached pages in the order in which they are evicted, with a floor for each tenant.
//!
//! A tenant's pages that were released last stay in a list of its own, up to the floor: its part of half the
//! pool. Older ones move to a common list, from which pages are evicted first, longest there first. So no
//! tenant's traffic evicts all that another one has cached. With one tenant the order is that of release. A tenant
//! that releases nothing loses its floor slowly: it may never come back.

use rustc_hash::FxHashMap;

use crate::ids::TenantId;
use crate::index_list::IndexLists;

/// Tenants with a floor: those that released pages last.
const MAX_TENANTS: u32 = 64;
/// When others have released so many times the pool, a tenant that released nothing keeps half of its pages.
const POOLS_UNTIL_HALF: u64 = 64;
/// The list of pages above the floors.
const COMMON: u32 = MAX_TENANTS;

/// One tenant's own list. Its number is its index.
#[derive(Clone, Debug)]
struct Own {
    tenant: TenantId,
    num_pages: u32,
    last_release: u64,
    /// Pages were added to it since the last decay.
    is_in_use: bool,
}

/// All cached pages of a kind. Every operation is O(1), but for the 64 tenants.
#[derive(Clone, Debug)]
pub(crate) struct EvictionOrder {
    lists: IndexLists,
    own: Vec<Own>,
    by_tenant: FxHashMap<TenantId, u32>,
    num_tenants_with_pages: u32,
    num_releases: u64,
    len: u32,
    /// Pages that all floors together keep at most, at least one each.
    num_kept: u32,
    /// Pages to be added until the next decay, and from one to the next.
    num_until_decay: u64,
    decay_interval: u64,
}

/// The list that a tenant's pages go to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnList(u32);

impl EvictionOrder {
    pub(crate) fn new(num_pages: u32) -> Self {
        Self {
            lists: IndexLists::new(num_pages, MAX_TENANTS + 1),
            own: Vec::new(),
            by_tenant: FxHashMap::default(),
            num_tenants_with_pages: 0,
            num_releases: 0,
            len: 0,
            num_kept: num_pages / 2,
            num_until_decay: POOLS_UNTIL_HALF * u64::from(num_pages),
            decay_interval: POOLS_UNTIL_HALF * u64::from(num_pages),
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The list of a tenant that releases pages. The tenant that has not for longest gives way.
    pub(crate) fn own_list(&mut self, tenant: TenantId) -> OwnList {
        self.num_releases += 1;
        let list = match self.by_tenant.get(&tenant) {
            Some(list) => *list,
            None => self.take_list(tenant),
        };
        self.own[list as usize].last_release = self.num_releases;
        OwnList(list)
    }

    fn take_list(&mut self, tenant: TenantId) -> u32 {
        let own = Own {
            tenant,
            num_pages: 0,
            last_release: 0,
            is_in_use: false,
        };
        let list = (0..).zip(&self.own).min_by_key(|(_, it)| it.last_release);
        let list = match list {
            Some((list, _)) if self.own.len() == MAX_TENANTS as usize => list,
            _ => {
                self.own.push(own);
                self.by_tenant.insert(tenant, self.last_list());
                return self.last_list();
            }
        };
        self.demote(list, 0);
        self.by_tenant.remove(&self.own[list as usize].tenant);
        self.own[list as usize] = own;
        self.by_tenant.insert(tenant, list);
        list
    }

    fn last_list(&self) -> u32 {
        u32::try_from(self.own.len() - 1).expect("at most MAX_TENANTS")
    }

    /// Adds a page that its tenant has released.
    pub(crate) fn push(&mut self, page: u32, OwnList(list): OwnList) {
        self.lists.push(list, page);
        self.len += 1;
        self.num_tenants_with_pages += u32::from(self.own[list as usize].num_pages == 0);
        self.own[list as usize].num_pages += 1;
        self.own[list as usize].is_in_use = true;
        self.demote(list, (self.num_kept / self.num_tenants_with_pages).max(1));
        self.num_until_decay -= 1;
        if self.num_until_decay == 0 {
            self.num_until_decay = self.decay_interval;
            self.decay();
        }
    }

    fn decay(&mut self) {
        for list in 0..=self.last_list() {
            let own = &mut self.own[list as usize];
            if !std::mem::take(&mut own.is_in_use) {
                let num_left = own.num_pages / 2;
                self.demote(list, num_left);
            }
        }
    }

    /// Moves the pages of a list that were released first to the common list, until `num_left` are left.
    fn demote(&mut self, list: u32, num_left: u32) {
        while self.own[list as usize].num_pages > num_left
            && let Some(page) = self.lists.first(list)
        {
            self.remove(page);
            self.lists.push(COMMON, page);
            self.len += 1;
        }
    }

    pub(crate) fn remove(&mut self, page: u32) {
        self.lists.remove(page);
        self.len -= 1;
        if let Some(own) = self.own.get_mut(self.lists.list_of(page) as usize) {
            own.num_pages -= 1;
            self.num_tenants_with_pages -= u32::from(own.num_pages == 0);
        }
    }

    /// The page that is evicted next: one above the floors, else one of the tenant with the most pages.
    pub(crate) fn first(&self) -> Option<u32> {
        self.lists.first(COMMON).or_else(|| {
            let most = (0..).zip(&self.own).max_by_key(|(_, own)| own.num_pages);
            most.and_then(|(list, _)| self.lists.first(list))
        })
    }

    /// The pages of each list, the common one first, each in its order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = impl Iterator<Item = u32>> {
        let own = 0..u32::try_from(self.own.len()).expect("at most MAX_TENANTS");
        std::iter::once(COMMON)
            .chain(own)
            .map(|list| self.lists.iter(list))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUM_PAGES: u32 = 64;

    /// Releases `num` pages from `first` on.
    fn release(order: &mut EvictionOrder, tenant: u64, first: u32, num: u32) {
        let list = order.own_list(TenantId(tenant));
        (first..first + num).for_each(|page| order.push(page, list));
    }

    fn evict(order: &mut EvictionOrder) -> u32 {
        let page = order.first().unwrap();
        order.remove(page);
        page
    }

    #[test]
    fn one_tenants_pages_are_evicted_in_the_order_of_release() {
        let mut order = EvictionOrder::new(NUM_PAGES);
        release(&mut order, 1, 0, NUM_PAGES);
        order.remove(5);
        release(&mut order, 1, 5, 1);
        let expected: Vec<u32> = (0..NUM_PAGES).filter(|it| *it != 5).chain([5]).collect();
        let evicted: Vec<u32> = (0..NUM_PAGES).map(|_| evict(&mut order)).collect();
        assert_eq!(evicted, expected);
        assert_eq!(order.len(), 0);
    }

    #[test]
    fn a_tenant_keeps_its_floor_however_many_pages_another_one_caches() {
        let mut order = EvictionOrder::new(NUM_PAGES);
        release(&mut order, 1, 0, 20);
        release(&mut order, 2, 20, 44);
        for _ in 0..1_000 {
            let page = evict(&mut order);
            assert!(
                !(4..20).contains(&page),
                "{page} is one of the 16 that it keeps"
            );
            release(&mut order, 2, page, 1);
        }
    }

    #[test]
    fn a_tenant_that_left_loses_its_floor_by_and_by() {
        let mut order = EvictionOrder::new(NUM_PAGES);
        release(&mut order, 1, 0, 20);
        release(&mut order, 2, 20, 44);
        let mut turn_over = |num_pools: u64| {
            for _ in 0..num_pools * u64::from(NUM_PAGES) {
                let page = evict(&mut order);
                release(&mut order, 2, page, 1);
            }
            order.own[0].num_pages
        };
        assert_eq!(turn_over(POOLS_UNTIL_HALF), 20, "it was in use at first");
        assert_eq!(turn_over(POOLS_UNTIL_HALF), 10);
        assert_eq!(turn_over(5 * POOLS_UNTIL_HALF), 0);
    }

    #[test]
    fn who_keeps_more_than_its_floor_loses_pages_first() {
        let mut order = EvictionOrder::new(NUM_PAGES);
        release(&mut order, 1, 0, 30);
        release(&mut order, 2, 30, 3);
        for page in 0..27 {
            assert_eq!(evict(&mut order), page);
        }
    }

    #[test]
    fn the_tenants_that_have_a_floor_are_bounded() {
        let mut order = EvictionOrder::new(1_000);
        for tenant in 0..500 {
            release(&mut order, u64::from(tenant), 2 * tenant, 2);
        }
        assert_eq!(order.own.len(), MAX_TENANTS as usize);
        assert_eq!(order.by_tenant.len(), MAX_TENANTS as usize);
        assert_eq!(order.len(), 1_000);
        assert_eq!(evict(&mut order), 0);
    }
}
