//! Streams between submit and the driver, while their text is prepared.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::output_queue::StreamId;

/// The streams on their way to the driver, and whether new ones may come.
#[derive(Debug, Default)]
pub struct Intake(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_closed: bool,
    streams: HashMap<StreamId, Wish>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Wanted,
    Aborted,
}

impl Intake {
    /// Adds a stream; false if no new ones may come.
    pub fn enter(&self, stream: StreamId) -> bool {
        let mut state = self.lock();
        if !state.is_closed {
            state.streams.insert(stream, Wish::Wanted);
        }
        !state.is_closed
    }

    /// Notes that the client is gone; false if the stream is not here.
    pub fn abort(&self, stream: StreamId) -> bool {
        let mut state = self.lock();
        let wish = state.streams.get_mut(&stream);
        wish.map(|wish| *wish = Wish::Aborted).is_some()
    }

    /// Whether the client still waits for this stream.
    pub fn is_wanted(&self, stream: StreamId) -> bool {
        self.lock().streams.get(&stream) == Some(&Wish::Wanted)
    }

    /// Removes the stream; returns whether its client still waits.
    pub fn leave(&self, stream: StreamId) -> bool {
        self.lock().streams.remove(&stream) == Some(Wish::Wanted)
    }

    /// No new streams from now on.
    pub fn close(&self) {
        self.lock().is_closed = true;
    }

    /// Closes, and removes every stream; returns those whose clients wait.
    pub fn clear(&self) -> Vec<StreamId> {
        let mut state = self.lock();
        state.is_closed = true;
        let streams = state.streams.drain();
        streams
            .filter_map(|(stream, wish)| (wish == Wish::Wanted).then_some(stream))
            .collect()
    }

    /// Whether no stream is here.
    pub fn is_empty(&self) -> bool {
        self.lock().streams.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abort_finds_a_stream_only_while_it_is_here() {
        let intake = Intake::default();
        assert!(intake.enter(1) && intake.enter(2));
        assert!(intake.abort(1));
        assert!(!intake.leave(1), "its client is gone");
        assert!(intake.leave(2));
        assert!(!intake.abort(2), "the driver has it now");
    }

    #[test]
    fn a_cleared_intake_gives_those_who_wait_once() {
        let intake = Intake::default();
        assert!(intake.enter(1) && intake.enter(2));
        assert!(intake.abort(1));
        assert_eq!(intake.clear(), [2]);
        assert!(!intake.is_wanted(2) && !intake.leave(2), "it was answered");
        assert!(!intake.enter(3));
    }

    #[test]
    fn a_closed_intake_keeps_what_came_before() {
        let intake = Intake::default();
        assert!(intake.enter(1));
        intake.close();
        assert!(!intake.enter(2));
        assert!(!intake.is_empty());
        assert!(intake.leave(1));
        assert!(intake.is_empty());
    }
}
