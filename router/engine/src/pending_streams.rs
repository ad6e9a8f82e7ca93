//! Streams between submit and the driver, while their text is prepared.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use plait_openai::ApiError;

use crate::output_queue::StreamId;

/// The streams on their way to the driver, and whether new ones may come.
#[derive(Debug, Default)]
pub struct PendingStreams(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_closed: bool,
    streams: HashMap<StreamId, ClientState>,
}

#[derive(Debug)]
enum ClientState {
    Waits,
    /// It was at a driver, and is on its way to another one.
    Moves,
    /// An operator ends it while it moves: who takes it tells its client, in its response's own form.
    MovesToItsEnd(Box<ApiError>),
    Aborted,
}

impl ClientState {
    fn is_moving(&self) -> bool {
        matches!(self, Self::Moves | Self::MovesToItsEnd(_))
    }
}

/// A stream that an operator ends.
#[derive(Debug)]
pub enum EndedStream {
    /// Its client reads the error now: no driver has had it.
    Unanswered(ApiError),
    /// It has left its driver, or its client is gone. Nothing is left to do.
    Noted,
    /// It is not here.
    Elsewhere(ApiError),
}

/// A stream that comes from another driver.
#[derive(Debug)]
pub enum Arrival {
    /// Its client waits.
    Wanted,
    /// It ends with this error.
    Ends(Box<ApiError>),
    /// Its client is gone.
    Forgotten,
}

impl Arrival {
    /// What a client reads whose stream cannot go on for this reason; None if it is gone.
    pub fn error_or(self, reason: impl FnOnce() -> ApiError) -> Option<ApiError> {
        match self {
            Self::Wanted => Some(reason()),
            Self::Ends(error) => Some(*error),
            Self::Forgotten => None,
        }
    }
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

    /// Ends a stream for an operator.
    pub fn end(&self, stream: StreamId, error: ApiError) -> EndedStream {
        let mut state = self.lock();
        let Some(client) = state.streams.get_mut(&stream) else {
            return EndedStream::Elsewhere(error);
        };
        match client {
            ClientState::Waits => {
                *client = ClientState::Aborted;
                EndedStream::Unanswered(error)
            }
            ClientState::Moves => {
                *client = ClientState::MovesToItsEnd(Box::new(error));
                EndedStream::Noted
            }
            ClientState::MovesToItsEnd(_) | ClientState::Aborted => EndedStream::Noted,
        }
    }

    /// Whether the client still waits for this stream.
    pub fn is_wanted(&self, stream: StreamId) -> bool {
        matches!(self.lock().streams.get(&stream), Some(ClientState::Waits))
    }

    /// Removes a stream that no driver has had; returns whether its client still waits.
    pub fn leave(&self, stream: StreamId) -> bool {
        let client = self.lock().streams.remove(&stream);
        matches!(client, Some(ClientState::Waits))
    }

    /// Removes a stream that another driver had.
    pub fn arrive(&self, stream: StreamId) -> Arrival {
        match self.lock().streams.remove(&stream) {
            Some(ClientState::Moves) => Arrival::Wanted,
            Some(ClientState::MovesToItsEnd(error)) => Arrival::Ends(error),
            Some(ClientState::Waits | ClientState::Aborted) | None => Arrival::Forgotten,
        }
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
            .partition::<HashMap<_, _>, _>(|(_, client)| client.is_moving());
        state.streams = moving;
        let waiting = others
            .into_iter()
            .filter(|(_, client)| matches!(client, ClientState::Waits));
        waiting.map(|(stream, _)| stream).collect()
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
        assert!(matches!(streams.arrive(1), Arrival::Wanted));
        assert!(matches!(streams.arrive(2), Arrival::Forgotten));
        assert!(streams.is_drained());
    }

    #[test]
    fn who_takes_a_stream_that_an_operator_ended_on_its_way_tells_the_error() {
        let error = ApiError::ended_by_operator();
        let streams = PendingStreams::default();
        assert!(streams.enter(1));
        streams.set_out(2);
        streams.set_out(3);
        for (stream, is_told_now) in [(1, true), (1, false), (2, false), (2, false)] {
            let ended = streams.end(stream, error.clone());
            let is_unanswered = matches!(ended, EndedStream::Unanswered(_));
            assert_eq!(is_unanswered, is_told_now, "{ended:?}");
        }
        let elsewhere = streams.end(9, error.clone());
        assert!(matches!(elsewhere, EndedStream::Elsewhere(_)));
        assert_eq!(streams.clear(), [0; 0], "one is answered, the others move");
        let told = |stream| streams.arrive(stream).error_or(ApiError::took_workers_down);
        assert_eq!(told(2), Some(error));
        assert_eq!(told(3), Some(ApiError::took_workers_down()));
        assert_eq!(told(2), None, "once");
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
