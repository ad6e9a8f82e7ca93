//! Fair share: tokens served to each tenant, which decide who is admitted next.
//!
//! A new or returning tenant starts level with the least served of those present, so nobody gains by
//! staying away (virtual token counters, Sheng et al., OSDI 2024). A tenant that left with more than
//! that still owes it when it returns.

use rustc_hash::FxHashMap;

use crate::ids::TenantId;

/// Absent tenants whose debts are kept. Beyond it, the smallest debt is dropped.
const MAX_DEBTS: usize = 4096;

/// A tenant with waiting or running requests.
#[derive(Clone, Copy, Debug)]
struct Present {
    num_served: u64,
    num_requests: u64,
}

/// Tokens served to all tenants.
#[derive(Clone, Debug, Default)]
pub(crate) struct FairShare {
    present: FxHashMap<TenantId, Present>,
    /// Tokens served to absent tenants, if more than the floor.
    debts: FxHashMap<TenantId, u64>,
    /// Tokens served to the least served tenant present. It never sinks.
    floor: u64,
}

impl FairShare {
    /// A tenant submits one more request.
    pub(crate) fn enter(&mut self, tenant: TenantId) {
        if !self.present.contains_key(&tenant) {
            self.raise_floor();
            let owed = self.debts.remove(&tenant).unwrap_or(0);
            let present = Present {
                num_served: owed.max(self.floor),
                num_requests: 0,
            };
            self.present.insert(tenant, present);
        }
        self.present_mut(tenant).num_requests += 1;
    }

    /// A tenant's request ended.
    pub(crate) fn leave(&mut self, tenant: TenantId) {
        let present = self.present_mut(tenant);
        present.num_requests -= 1;
        let Present {
            num_served,
            num_requests,
        } = *present;
        if num_requests == 0 {
            self.raise_floor();
            self.present.remove(&tenant);
            self.remember(tenant, num_served);
        }
    }

    pub(crate) fn charge(&mut self, tenant: TenantId, num_tokens: u32) {
        self.present_mut(tenant).num_served += u64::from(num_tokens);
    }

    /// Tokens served to a tenant that is present.
    pub(crate) fn num_served(&self, tenant: TenantId) -> u64 {
        self.present[&tenant].num_served
    }

    fn present_mut(&mut self, tenant: TenantId) -> &mut Present {
        let present = self.present.get_mut(&tenant);
        present.expect("a tenant is present while it has requests")
    }

    fn raise_floor(&mut self) {
        let least = self.present.values().map(|it| it.num_served).min();
        self.floor = self.floor.max(least.unwrap_or(0));
    }

    fn remember(&mut self, tenant: TenantId, num_served: u64) {
        self.debts.insert(tenant, num_served);
        self.debts.retain(|_, served| *served > self.floor);
        if self.debts.len() > MAX_DEBTS {
            let least = self
                .debts
                .iter()
                .min_by_key(|(tenant, it)| (**it, **tenant));
            let least = least.map(|(tenant, _)| *tenant);
            least.and_then(|tenant| self.debts.remove(&tenant));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);

    #[test]
    fn a_newcomer_starts_level_with_the_least_served() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE);
        fair_share.charge(ONE, 100);
        fair_share.enter(TWO);
        assert_eq!(fair_share.num_served(TWO), 100);
    }

    #[test]
    fn a_tenant_that_leaves_in_debt_returns_in_debt() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE);
        fair_share.enter(TWO);
        fair_share.charge(ONE, 100);
        fair_share.leave(ONE);
        fair_share.charge(TWO, 30);
        fair_share.enter(ONE);
        assert_eq!(
            (fair_share.num_served(ONE), fair_share.num_served(TWO)),
            (100, 30)
        );
    }

    #[test]
    fn tokens_served_without_competition_are_no_debt() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE);
        fair_share.charge(ONE, 100);
        fair_share.leave(ONE);
        fair_share.enter(TWO);
        fair_share.enter(ONE);
        assert_eq!(fair_share.num_served(ONE), fair_share.num_served(TWO));
        assert!(fair_share.debts.is_empty());
    }

    #[test]
    fn debts_are_bounded_and_the_smallest_is_forgiven() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE);
        for i in 0..5000 {
            let tenant = TenantId(10 + i);
            fair_share.enter(tenant);
            fair_share.charge(tenant, 10_000 - u32::try_from(i).unwrap());
            fair_share.leave(tenant);
        }
        assert_eq!(fair_share.debts.len(), MAX_DEBTS);
        assert!(fair_share.debts.contains_key(&TenantId(10)));
        assert!(!fair_share.debts.contains_key(&TenantId(5009)));
    }
}
