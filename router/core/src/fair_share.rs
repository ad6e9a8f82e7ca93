//! Fair share: how many tokens each tenant was served, as far as it decides who goes next.
//!
//! A tenant that comes back, or comes for the first time, starts level with the least served of those
//! who are there: nobody saves up a claim by staying away (virtual token counters, Sheng et al., OSDI
//! 2024). Who was served more than that when it left still owes it on return.

use rustc_hash::FxHashMap;

use crate::ids::TenantId;

/// Absent tenants whose debts are remembered; beyond, the smallest debt is forgiven.
const MAX_DEBTS: usize = 4096;

/// A tenant with requests that wait or run.
#[derive(Clone, Copy, Debug)]
struct Present {
    num_served: u64,
    num_requests: u64,
}

/// What all tenants were served.
#[derive(Clone, Debug, Default)]
pub(crate) struct FairShare {
    present: FxHashMap<TenantId, Present>,
    /// What absent tenants were served, where it is more than the floor.
    debts: FxHashMap<TenantId, u64>,
    /// What the least served of those present was served; it never sinks.
    floor: u64,
}

impl FairShare {
    /// One more request of a tenant.
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

    /// One request of a tenant ended.
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

    /// Tokens that a present tenant was served.
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
    fn who_leaves_in_debt_comes_back_in_debt() {
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
    fn what_was_served_while_nobody_else_was_there_is_no_debt() {
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
