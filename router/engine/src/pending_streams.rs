//! Streams between submit and the driver, while their text is prepared.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::output_queue::StreamId;

/// The streams on their way to the driver, and whether new ones may come.
#[derive(Debug, Default)]
pub struct PendingStreams(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_closed: bool,
    streams: HashMap<StreamId, ClientState>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientState {
    Waits,
    /// It was at a driver, and is on its way to another one.
    Moves,
    Aborted,
}

impl PendingStreams {
    /// Adds a stream; false if no new ones may come.
    pub fn enter(&self, stream: StreamId) -> bool {
        let mut state = self.lock();
        if !state.is_closed {
            state.streams.insert(stream, ClientState::Waits);
        }
        !state.is_closed
    }

    /// Adds a stream that leaves its driver for another one, whether new ones may come or not.
    pub fn set_out(&self, stream: StreamId) {
        self.lock().streams.insert(stream, ClientState::Moves);
    }

    /// Notes that the client is gone; false if the stream is not here.
    pub fn abort(&self, stream: StreamId) -> bool {
        let mut state = self.lock();
        let client = state.streams.get_mut(&stream);
        client
            .map(|client| *client = ClientState::Aborted)
            .is_some()
    }

    /// Whether the client still waits for this stream.
    pub fn is_wanted(&self, stream: StreamId) -> bool {
        self.lock().streams.get(&stream) == Some(&ClientState::Waits)
    }

    /// Removes the stream; returns whether its client still waits.
    pub fn leave(&self, stream: StreamId) -> bool {
        let client = self.lock().streams.remove(&stream);
        matches!(client, Some(ClientState::Waits | ClientState::Moves))
    }

    /// No new streams from now on.
    pub fn close(&self) {
        self.lock().is_closed = true;
    }

    /// Closes, and removes every stream but those between two drivers, who end them; returns those whose clients wait.
    pub fn clear(&self) -> Vec<StreamId> {
        let mut state = self.lock();
        state.is_closed = true;
        let (moving, others) = std::mem::take(&mut state.streams)
            .into_iter()
            .partition::<HashMap<_, _>, _>(|(_, client)| *client == ClientState::Moves);
        state.streams = moving;
        let others = others.into_iter();
        others
            .filter_map(|(stream, client)| (client == ClientState::Waits).then_some(stream))
            .collect()
    }

    /// Whether no stream is here, and none may come.
    pub fn is_drained(&self) -> bool {
        let state = self.lock();
        state.is_closed && state.streams.is_empty()
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
        let streams = PendingStreams::default();
        assert!(streams.enter(1) && streams.enter(2));
        assert!(streams.abort(1));
        assert!(!streams.leave(1), "its client is gone");
        assert!(streams.leave(2));
        assert!(!streams.abort(2), "the driver has it now");
    }

    #[test]
    fn clearing_gives_those_who_wait_once() {
        let streams = PendingStreams::default();
        assert!(streams.enter(1) && streams.enter(2));
        assert!(streams.abort(1));
        assert_eq!(streams.clear(), [2]);
        assert!(
            !streams.is_wanted(2) && !streams.leave(2),
            "it was answered"
        );
        assert!(!streams.enter(3));
    }

    #[test]
    fn a_stream_between_two_drivers_is_kept_until_one_has_it() {
        let streams = PendingStreams::default();
        streams.close();
        streams.set_out(1);
        streams.set_out(2);
        assert!(streams.abort(2));
        assert_eq!(streams.clear(), [0; 0], "they have their drivers' error");
        assert!(!streams.is_drained());
        assert!(streams.leave(1) && !streams.leave(2));
        assert!(streams.is_drained());
    }

    #[test]
    fn closing_keeps_what_came_before() {
        let streams = PendingStreams::default();
        assert!(streams.enter(1));
        streams.close();
        assert!(!streams.enter(2));
        assert!(!streams.is_empty());
        assert!(streams.leave(1));
        assert!(streams.is_empty());
    }
}
