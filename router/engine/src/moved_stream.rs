//! Streams on their way from a replica without ranks to another one.
//!
//! The driver of the first releases the requests, its output thread adds the answer, and the driver of the second queues
//! them. Meanwhile the stream is among the pending ones: a drain waits for it, and an abort finds it there.

use std::sync::{Mutex, MutexGuard, PoisonError};

use plait_core::{MovedRequest, RequestId};

use crate::live_request::LiveRequest;
use crate::masks::ConstrainedAnswer;
use crate::output_queue::StreamId;
use crate::stream_times::TimedResponse;

/// A request that has left its scheduler.
#[derive(Debug)]
pub struct MovedChoice {
    /// What it was there.
    pub left_as: RequestId,
    /// Prompt, parameters and output.
    pub request: MovedRequest,
    /// What the driver knows of it.
    pub live: LiveRequest,
    /// If its tokens are sampled under masks.
    pub constrained: Option<ConstrainedAnswer>,
    /// Which choice of the answer it is; None if a stop string has ended that.
    pub choice: Option<usize>,
}

/// A stream that goes on in another replica.
#[derive(Debug)]
pub struct MovedStream {
    /// Which.
    pub stream: StreamId,
    /// The replica that takes it.
    pub target: u32,
    /// Writes its response; None if all of it has ended.
    pub response: Option<TimedResponse>,
    /// Those that the scheduler had.
    pub choices: Vec<MovedChoice>,
}

/// Streams for one replica's driver. As many as the other replicas have accepted at most.
#[derive(Debug, Default)]
pub struct MovedStreams(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_closed: bool,
    streams: Vec<MovedStream>,
}

impl MovedStreams {
    /// Adds a stream, or gives it back if nobody takes it any more.
    pub fn put(&self, moved: MovedStream) -> Result<(), MovedStream> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(moved);
        }
        state.streams.push(moved);
        Ok(())
    }

    /// All streams, in the order in which they came.
    pub fn take(&self) -> Vec<MovedStream> {
        std::mem::take(&mut self.lock().streams)
    }

    /// The driver has ended. Returns what it has not taken.
    pub fn close(&self) -> Vec<MovedStream> {
        self.lock().is_closed = true;
        self.take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
