//! Fair share: the virtual time of tenants, which decides who is admitted next.
//!
//! Work advances its tenant's time by cost over weight, and the system's time by cost over the weights of
//! all who are present (WF2Q+, Bennett and Zhang 1997). A tenant that begins to wait starts at the system's
//! time at least. So nobody gains by staying away, and no stream of newcomers holds the others back.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use rustc_hash::FxHashMap;

use crate::ids::TenantId;

/// Absent tenants whose debts are kept. Beyond it, the smallest debt is forgiven.
const MAX_DEBTS: usize = 1 << 16;
/// Virtual time of one microsecond of work at weight 1.
const TIME_PER_MICRO: f64 = 16_384.0;

/// A tenant's work in virtual time, or the system's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VirtualTime(pub(crate) u64);

/// A tenant with waiting or running requests.
#[derive(Clone, Copy, Debug)]
struct Present {
    time: VirtualTime,
    weight: NonZeroU32,
    num_requests: u64,
}

/// The virtual times of all tenants. Operations take O(log tenants).
#[derive(Clone, Debug, Default)]
pub(crate) struct FairShare {
    present: FxHashMap<TenantId, Present>,
    /// Of all who are present.
    total_weight: u64,
    system: VirtualTime,
    /// What is left of the last division by the total weight.
    remainder: u64,
    /// The largest time of any tenant so far.
    latest: VirtualTime,
    debts: Debts,
}

impl FairShare {
    /// A tenant submits one more request.
    pub(crate) fn enter(&mut self, tenant: TenantId, weight: NonZeroU32) {
        self.debts.forgive_until(self.system);
        let present = self.present.entry(tenant).or_insert_with(|| Present {
            time: self.debts.take(tenant).max(self.system),
            weight,
            num_requests: 0,
        });
        if present.num_requests == 0 {
            self.total_weight += u64::from(weight.get());
        } else {
            self.total_weight += u64::from(weight.get());
            self.total_weight -= u64::from(present.weight.get());
        }
        present.weight = weight;
        present.num_requests += 1;
    }

    /// A tenant that had no waiting request has one: time that it left unused is lost.
    pub(crate) fn start_waiting(&mut self, tenant: TenantId) {
        let system = self.system;
        let present = self.present_mut(tenant);
        present.time = present.time.max(system);
    }

    /// A tenant's request ended.
    pub(crate) fn leave(&mut self, tenant: TenantId) {
        let present = self.present_mut(tenant);
        present.num_requests -= 1;
        let Present {
            time,
            weight,
            num_requests,
        } = *present;
        if num_requests == 0 {
            self.present.remove(&tenant);
            self.total_weight -= u64::from(weight.get());
            if time > self.system {
                self.debts.add(tenant, time);
            }
        }
    }

    /// Work of a tenant that is present.
    pub(crate) fn charge(&mut self, tenant: TenantId, micros: f64) {
        #[expect(clippy::cast_sign_loss, reason = "the cast saturates")]
        let work = (micros * TIME_PER_MICRO) as u64;
        let present = self.present_mut(tenant);
        let time = present.time.0 + work / u64::from(present.weight.get());
        present.time = VirtualTime(time);
        self.latest = self.latest.max(VirtualTime(time));
        let shared = self.remainder + work;
        self.system.0 += shared / self.total_weight;
        self.remainder = shared % self.total_weight;
    }

    /// The virtual time of a tenant that is present.
    pub(crate) fn time(&self, tenant: TenantId) -> VirtualTime {
        self.present[&tenant].time
    }

    /// The least time of those who wait; None if nobody does.
    ///
    /// The system's time catches up with it. Work that nobody else waited for is no debt.
    pub(crate) fn catch_up(&mut self, least_waiting: Option<VirtualTime>) {
        self.system = self.system.max(least_waiting.unwrap_or(self.latest));
    }

    fn present_mut(&mut self, tenant: TenantId) -> &mut Present {
        let present = self.present.get_mut(&tenant);
        present.expect("a tenant is present while it has requests")
    }
}

/// Times of absent tenants that are ahead of the system's.
#[derive(Clone, Debug, Default)]
struct Debts {
    times: FxHashMap<TenantId, VirtualTime>,
    by_time: BTreeSet<(VirtualTime, TenantId)>,
}

impl Debts {
    fn add(&mut self, tenant: TenantId, time: VirtualTime) {
        self.times.insert(tenant, time);
        self.by_time.insert((time, tenant));
        if self.times.len() > MAX_DEBTS {
            self.forgive_first();
        }
    }

    /// Removes a tenant's debt; the zero time if it has none.
    fn take(&mut self, tenant: TenantId) -> VirtualTime {
        let time = self.times.remove(&tenant).unwrap_or_default();
        self.by_time.remove(&(time, tenant));
        time
    }

    /// Forgets the debts that the system's time has passed.
    fn forgive_until(&mut self, system: VirtualTime) {
        while self
            .by_time
            .first()
            .is_some_and(|(time, _)| *time <= system)
        {
            self.forgive_first();
        }
    }

    fn forgive_first(&mut self) {
        if let Some((_, tenant)) = self.by_time.pop_first() {
            self.times.remove(&tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);
    const WEIGHT: NonZeroU32 = NonZeroU32::MIN;

    fn behind(fair_share: &FairShare, tenant: TenantId, other: TenantId) -> f64 {
        let (time, other) = (fair_share.time(tenant).0, fair_share.time(other).0);
        (other as f64 - time as f64) / TIME_PER_MICRO
    }

    #[test]
    fn a_newcomer_starts_level_with_those_who_wait() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE, WEIGHT);
        fair_share.charge(ONE, 100.0);
        fair_share.catch_up(Some(fair_share.time(ONE)));
        fair_share.enter(TWO, WEIGHT);
        assert_eq!(fair_share.time(TWO), fair_share.time(ONE));
    }

    #[test]
    fn a_tenant_that_leaves_in_debt_returns_in_debt() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE, WEIGHT);
        fair_share.enter(TWO, WEIGHT);
        fair_share.charge(ONE, 100.0);
        fair_share.leave(ONE);
        fair_share.charge(TWO, 30.0);
        fair_share.enter(ONE, WEIGHT);
        assert!((behind(&fair_share, TWO, ONE) - 70.0).abs() < 0.01);
    }

    #[test]
    fn work_that_nobody_waited_for_is_no_debt() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE, WEIGHT);
        fair_share.enter(TWO, WEIGHT);
        fair_share.charge(ONE, 100.0);
        fair_share.catch_up(None);
        fair_share.start_waiting(TWO);
        assert_eq!(fair_share.time(TWO), fair_share.time(ONE));
    }

    #[test]
    fn newcomers_do_not_hold_back_the_systems_time() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE, WEIGHT);
        fair_share.enter(TWO, WEIGHT);
        fair_share.charge(ONE, 100.0);
        for newcomer in 10..20 {
            fair_share.enter(TenantId(newcomer), WEIGHT);
            fair_share.charge(TenantId(newcomer), 100.0);
            fair_share.leave(TenantId(newcomer));
        }
        fair_share.start_waiting(TWO);
        assert!(behind(&fair_share, TWO, ONE) < 0.0);
    }

    #[test]
    fn time_runs_slower_for_a_larger_weight() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE, WEIGHT);
        fair_share.enter(TWO, NonZeroU32::new(4).unwrap());
        fair_share.charge(ONE, 100.0);
        fair_share.charge(TWO, 400.0);
        assert_eq!(fair_share.time(ONE), fair_share.time(TWO));
    }

    #[test]
    fn debts_are_bounded_and_the_smallest_is_forgiven() {
        let mut fair_share = FairShare::default();
        fair_share.enter(ONE, NonZeroU32::MAX);
        for i in 0..100_000 {
            let tenant = TenantId(10 + i);
            fair_share.enter(tenant, WEIGHT);
            fair_share.charge(tenant, 1e6 - f64::from(u32::try_from(i).unwrap()));
            fair_share.leave(tenant);
        }
        assert_eq!(fair_share.debts.times.len(), MAX_DEBTS);
        assert_eq!(fair_share.debts.by_time.len(), MAX_DEBTS);
        assert!(fair_share.debts.times.contains_key(&TenantId(10)));
        assert!(!fair_share.debts.times.contains_key(&TenantId(100_009)));
    }
}
