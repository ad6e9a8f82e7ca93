//! Compilations that go on while nobody waits for them, by tenant.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Threads of one tenant.
const MAX_OF_ONE: usize = 2;
/// Threads of all, from which on a tenant has no second.
const MANY: usize = 4;

/// How many threads work on for each tenant. Each takes a core; none takes another tenant's place.
pub(crate) struct Abandoned(Mutex<BTreeMap<u64, usize>>);

impl Abandoned {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Whether the tenant may compile. One without any always may.
    pub(crate) fn may_begin(&self, tenant: u64) -> bool {
        let numbers = self.lock();
        let own = numbers.get(&tenant).copied().unwrap_or(0);
        let all: usize = numbers.values().sum();
        own < if all < MANY { MAX_OF_ONE } else { 1 }
    }

    pub(crate) fn add(&self, tenant: u64) {
        *self.lock().entry(tenant).or_default() += 1;
    }

    pub(crate) fn remove(&self, tenant: u64) {
        let mut numbers = self.lock();
        if let Some(own) = numbers.get_mut(&tenant) {
            *own -= 1;
        }
        numbers.retain(|_, own| *own > 0);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_left_two_behind_waits_and_nobody_else_does() {
        let abandoned = Abandoned::new();
        for _ in 0..MAX_OF_ONE {
            assert!(abandoned.may_begin(7));
            abandoned.add(7);
        }
        assert!(!abandoned.may_begin(7));
        assert!(abandoned.may_begin(8));
        abandoned.remove(7);
        assert!(abandoned.may_begin(7));
    }

    #[test]
    fn where_many_go_on_a_tenant_has_one_and_a_new_one_still_begins() {
        let abandoned = Abandoned::new();
        for tenant in 0..100 {
            assert!(abandoned.may_begin(tenant));
            abandoned.add(tenant);
        }
        assert!(!abandoned.may_begin(3));
        assert!(abandoned.may_begin(100));
        for tenant in 0..100 {
            abandoned.remove(tenant);
        }
        assert!(abandoned.lock().is_empty());
    }
}
