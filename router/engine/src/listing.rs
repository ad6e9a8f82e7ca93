//! The requests of a replica, as its driver lists them for an operator who asks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::output_queue::StreamId;

/// Longest wait for drivers, which may be in the middle of a plan.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

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

/// What the drivers of all replicas have answered.
#[derive(Debug, Default, Serialize)]
pub struct ListedReplicas {
    /// By replica.
    pub requests: Vec<ListedRequest>,
    /// Replicas whose drivers have not answered in time.
    pub silent_replicas: Vec<u32>,
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

    /// How many answers have come. Whoever asks from now on waits for one more.
    pub fn num_answers(&self) -> u64 {
        self.lock().num_answers
    }

    /// Waits for an answer after the first `num_before`; None if none came until `deadline`.
    pub fn wait(&self, num_before: u64, deadline: Instant) -> Option<Vec<ListedRequest>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), left, |state| state.num_answers == num_before);
        let (state, _timed_out) = waited.unwrap_or_else(PoisonError::into_inner);
        (state.num_answers > num_before).then(|| state.requests.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_gets_the_answer_that_follows_or_none_in_time() {
        let listing = Listing::default();
        listing.answer(vec![]);
        let num_before = listing.num_answers();
        assert_eq!(listing.wait(num_before, Instant::now()), None);
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
            scope.spawn(|| listing.answer(vec![answer]));
            let deadline = Instant::now() + Duration::from_secs(60);
            assert_eq!(listing.wait(num_before, deadline), Some(vec![listed]));
        });
    }
}
