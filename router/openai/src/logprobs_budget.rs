//! How many log-probabilities of prompts the answers under way may hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Log-probabilities of prompt tokens in all answers under way: about 200 MB of JSON, and as much again
/// until it is written.
const MAX_IN_ALL: usize = 1 << 21;

/// What is left for further answers. Clones share it.
#[derive(Clone, Debug)]
pub struct LogprobsBudget(Arc<AtomicUsize>);

/// An answer's share of the budget, until it is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: LogprobsBudget,
    num: usize,
}

impl Default for LogprobsBudget {
    fn default() -> Self {
        Self(Arc::new(AtomicUsize::new(MAX_IN_ALL)))
    }
}

impl LogprobsBudget {
    /// None if so many are not left.
    pub(crate) fn reserve(&self, num: usize) -> Option<Reservation> {
        let left = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(num)
            });
        left.ok().map(|_| Reservation {
            budget: self.clone(),
            num,
        })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.0.fetch_add(self.num, Ordering::Relaxed);
    }
}
