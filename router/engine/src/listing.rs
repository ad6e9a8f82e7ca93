//! The requests of a replica, as its driver lists them for an operator who asks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;

use crate::output_queue::StreamId;

/// Longest wait for a driver, which may be in the middle of a plan.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// One request that has not ended. A stream has one for each choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ListedRequest {
    /// Whose answer it is part of.
    pub stream: StreamId,
    /// Its replica.
    pub replica: u32,
    /// Whether it has a slot; else it waits.
    pub running: bool,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens sampled so far.
    pub output_tokens: usize,
    /// Since it came.
    pub seconds: f64,
}

/// A question and its answer, between those who ask and the driver.
#[derive(Debug, Default)]
pub struct Listing {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    num_answers: u64,
    requests: Vec<ListedRequest>,
}

impl Listing {
    /// The driver's answer to all who wait.
    pub fn answer(&self, requests: Vec<ListedRequest>) {
        let mut state = self.lock();
        state.requests = requests;
        state.num_answers += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Asks with `ask` and waits; None if no answer came within `PATIENCE`.
    pub fn read(&self, ask: impl FnOnce()) -> Option<Vec<ListedRequest>> {
        let state = self.lock();
        let num_before = state.num_answers;
        ask();
        let waited = self
            .changed
            .wait_timeout_while(state, PATIENCE, |state| state.num_answers == num_before);
        let (state, timed_out) = waited.unwrap_or_else(PoisonError::into_inner);
        (!timed_out.timed_out()).then(|| state.requests.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_gets_the_answer_that_follows() {
        let listing = Listing::default();
        listing.answer(vec![]);
        let listed = ListedRequest {
            stream: 3,
            replica: 0,
            running: true,
            prompt_tokens: 5,
            output_tokens: 2,
            seconds: 0.5,
        };
        std::thread::scope(|scope| {
            let answer = listed.clone();
            let read = listing.read(|| {
                scope.spawn(|| listing.answer(vec![answer]));
            });
            assert_eq!(read, Some(vec![listed]));
        });
    }
}
