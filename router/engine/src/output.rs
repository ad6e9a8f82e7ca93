//! The output thread: tokens in, packed records for Python out.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use plait_core::{FinishReason, RequestId, TokenId};
use plait_openai::{ApiError, Pushed, ResponseState, TokenLogprobs};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::mailbox::Mail;
use crate::metrics::Ending;
use crate::moved_stream::MovedStream;
use crate::output_queue::{self, LAST, StreamId};
use crate::shared::{ReplicaShared, Shared};
use crate::stream_times::{Moment, TimedResponse};

/// The driver's event for a stream.
#[derive(Debug)]
pub enum StreamEvent {
    /// Its requests are in the scheduler's queue.
    Open {
        /// Which.
        stream: StreamId,
        /// Writes its response.
        response: TimedResponse,
        /// One for each choice.
        requests: SmallVec<[RequestId; 1]>,
    },
    /// Log-probabilities of a request's prompt.
    PromptLogprobs {
        /// Whose.
        request: RequestId,
        /// Position of the first record's token.
        first_position: u32,
        /// One for each position.
        records: Vec<TokenLogprobs>,
    },
    /// A request's prompt is pooled.
    Embedding {
        /// Whose.
        request: RequestId,
        /// As the worker computed it.
        embedding: Vec<f32>,
    },
    /// A request was admitted, and the prefix cache had some of its prompt.
    CachedTokens {
        /// Whose.
        request: RequestId,
        /// Tokens of it.
        num_tokens: u32,
    },
    /// A request's next output tokens.
    Tokens {
        /// Whose.
        request: RequestId,
        /// Which.
        tokens: SmallVec<[TokenId; 2]>,
        /// The last of them ends the output.
        ends_with_stop_id: bool,
        /// One for each token, if the request asked for them.
        logprobs: Option<Vec<TokenLogprobs>>,
    },
    /// A request ended.
    Finished {
        /// Which.
        request: RequestId,
        /// Why.
        reason: FinishReason,
    },
    /// Its requests have left the scheduler, and go on in another replica.
    Move(MovedStream),
    /// Its requests are in the scheduler's queue. Another replica has written its response so far.
    Reopen {
        /// Which.
        stream: StreamId,
        /// Writes its response.
        response: TimedResponse,
        /// Those that have not ended, with their choices.
        choices: Vec<(RequestId, usize)>,
    },
    /// The stream ends with an error, opened or not.
    Fail {
        /// Which.
        stream: StreamId,
        /// What its client reads.
        error: ApiError,
    },
    /// The client is gone.
    Forget(StreamId),
}

/// A stream whose response is being written.
struct OpenResponse {
    response: TimedResponse,
    requests: SmallVec<[RequestId; 1]>,
}

/// The response that a request belongs to.
#[derive(Clone, Copy)]
struct ChoiceLocation {
    stream: StreamId,
    choice: usize,
}

/// Owns the responses of a replica's open streams.
pub struct Output {
    shared: Arc<Shared>,
    replica: Arc<ReplicaShared>,
    streams: FxHashMap<StreamId, OpenResponse>,
    choices: FxHashMap<RequestId, ChoiceLocation>,
    records: Vec<u8>,
    bodies: Sender<EndedResponse>,
}

/// An answer of which only the body is still to be written.
pub struct EndedResponse {
    stream: StreamId,
    response: TimedResponse,
}

/// Writes bodies that would hold up the output thread, until that has ended.
pub fn write_bodies(shared: &Shared, ended: &Receiver<EndedResponse>) {
    let mut records = Vec::new();
    for EndedResponse {
        stream,
        mut response,
    } in ended
    {
        output_queue::append_record(&mut records, stream, |payload| {
            response.write_body(payload);
            ((), LAST)
        });
        shared.output_queue.put(&mut records);
    }
}

fn gone_wrong() -> ApiError {
    ApiError::internal("the server failed and cannot go on; its log says why")
}

impl Output {
    /// No streams. `bodies` goes to [`write_bodies`].
    pub fn new(
        shared: Arc<Shared>,
        replica: Arc<ReplicaShared>,
        bodies: Sender<EndedResponse>,
    ) -> Self {
        Self {
            shared,
            replica,
            streams: FxHashMap::default(),
            choices: FxHashMap::default(),
            records: Vec::new(),
            bodies,
        }
    }

    /// Writes batches until the driver has ended; wakes Python once a batch.
    pub fn run(mut self, batches: &Receiver<Vec<StreamEvent>>) {
        for batch in batches {
            self.replica.made_room();
            for event in batch {
                self.write(event);
            }
            if !self.records.is_empty() {
                self.shared.output_queue.put(&mut self.records);
            }
        }
        self.fail_rest();
    }

    /// A driver that panicked has not ended its streams.
    fn fail_rest(&mut self) {
        for moved in self.replica.moved_streams.close() {
            self.fail_moved(moved);
        }
        let error = gone_wrong();
        let streams: Vec<StreamId> = self.streams.keys().copied().collect();
        for stream in streams {
            self.fail(stream, &error);
        }
        self.shared.output_queue.put(&mut self.records);
    }

    /// Ends a stream with an event of its own API, or else with an error record.
    fn fail(&mut self, stream: StreamId, error: &ApiError) {
        let open = self.streams.get_mut(&stream);
        let is_told = open.is_some_and(|open| {
            output_queue::append_record(&mut self.records, stream, |payload| {
                let is_told = open.response.fail(error, payload);
                (is_told, if is_told { LAST } else { 0 })
            })
        });
        // An error is the last record of its stream, of use too.
        self.forget(stream, Ending::Error);
        if !is_told {
            output_queue::append_error(&mut self.records, stream, error);
        }
    }

    fn write(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::Open {
                stream,
                response,
                requests,
            } => self.open(stream, response, requests.into_iter().zip(0..)),
            StreamEvent::Move(moved) => self.hand_over(moved),
            StreamEvent::Reopen {
                stream,
                response,
                choices,
            } => self.open(stream, response, choices.into_iter()),
            StreamEvent::PromptLogprobs {
                request,
                first_position,
                records,
            } => {
                if let Some((at, open)) = self.find(request) {
                    open.response
                        .push_prompt_logprobs(at.choice, first_position, &records);
                }
            }
            StreamEvent::Embedding { request, embedding } => {
                if let Some((at, open)) = self.find(request) {
                    open.response.set_embedding(at.choice, embedding);
                }
            }
            StreamEvent::CachedTokens {
                request,
                num_tokens,
            } => {
                if let Some((at, open)) = self.find(request) {
                    open.response.set_cached_tokens(at.choice, num_tokens);
                }
            }
            StreamEvent::Tokens {
                request,
                tokens,
                ends_with_stop_id,
                logprobs,
            } => {
                self.push(request, &tokens, ends_with_stop_id, logprobs.as_deref());
            }
            StreamEvent::Finished { request, reason } => self.finish(request, reason),
            StreamEvent::Fail { stream, error } => self.fail(stream, &error),
            StreamEvent::Forget(stream) => self.forget(stream, Ending::Abort),
        }
    }

    fn open(
        &mut self,
        stream: StreamId,
        response: TimedResponse,
        choices: impl Iterator<Item = (RequestId, usize)>,
    ) {
        let requests = choices.map(|(request, choice)| {
            let at = ChoiceLocation { stream, choice };
            self.choices.insert(request, at);
            request
        });
        let requests = requests.collect();
        self.streams
            .insert(stream, OpenResponse { response, requests });
    }

    /// Adds the response of a stream that goes on in another replica. Choices that a stop string has ended are not here.
    fn hand_over(&mut self, mut moved: MovedStream) {
        let open = self.streams.remove(&moved.stream);
        moved.response = open.map(|open| open.response);
        for choice in &mut moved.choices {
            choice.choice = self.choices.remove(&choice.left_as).map(|at| at.choice);
        }
        // What was written here stands before what is written there.
        if !self.records.is_empty() {
            self.shared.output_queue.put(&mut self.records);
        }
        if let Err(moved) = self.shared.hand_over(moved) {
            self.fail_moved(moved);
        }
    }

    /// Nobody takes the stream any more.
    fn fail_moved(&mut self, moved: MovedStream) {
        let stream = moved.stream;
        self.shared.routes.finish(stream);
        let error = self.shared.arrive(stream).error_or(gone_wrong);
        if let Some(response) = moved.response {
            self.open(stream, response, std::iter::empty());
            match error {
                Some(error) => self.fail(stream, &error),
                None => self.forget(stream, Ending::Abort),
            }
        }
    }

    fn push(
        &mut self,
        request: RequestId,
        tokens: &[TokenId],
        ends_with_stop_id: bool,
        logprobs: Option<&[TokenLogprobs]>,
    ) {
        let mut records = std::mem::take(&mut self.records);
        let pushed = self.find(request).map(|(at, open)| {
            output_queue::append_record(&mut records, at.stream, |payload| {
                (
                    open.response
                        .push(at.choice, tokens, ends_with_stop_id, logprobs, payload),
                    0,
                )
            })
        });
        self.records = records;
        if pushed == Some(Pushed::StopString) {
            self.replica.mailbox.put(Mail::StopString(request));
            self.finish(request, FinishReason::Stop);
        }
    }

    /// Ends one choice. A request that a stop string ended before is not here any more.
    fn finish(&mut self, request: RequestId, reason: FinishReason) {
        let mut records = std::mem::take(&mut self.records);
        let ended = self.find(request).map(|(at, open)| {
            let state = output_queue::append_record(&mut records, at.stream, |payload| {
                let state = open.response.finish(at.choice, reason, payload);
                let is_last = state == ResponseState::Ended && !open.response.defers_body();
                (state, if is_last { LAST } else { 0 })
            });
            let calls = open.response.call_counts(at.choice);
            (at.stream, state, calls)
        });
        self.records = records;
        self.choices.remove(&request);
        if let Some((stream, state, calls)) = ended {
            self.replica.metrics.requests.count_calls(calls);
            if state == ResponseState::Ended {
                self.end(stream, reason.into());
            }
        }
    }

    fn end(&mut self, stream: StreamId, ending: Ending) {
        let Some(OpenResponse { response, .. }) = self.streams.remove(&stream) else {
            return;
        };
        self.append_used(stream, &response, ending);
        if response.defers_body() {
            // The thread that writes bodies ends after this one.
            let _sent = self.bodies.send(EndedResponse { stream, response });
        }
    }

    fn forget(&mut self, stream: StreamId, ending: Ending) {
        let Some(OpenResponse { response, requests }) = self.streams.remove(&stream) else {
            return;
        };
        self.append_used(stream, &response, ending);
        for request in requests {
            self.choices.remove(&request);
        }
    }

    fn append_used(&mut self, stream: StreamId, response: &TimedResponse, ending: Ending) {
        let times = &response.times;
        times.note(Moment::End, self.shared.clock.now());
        let num_tokens = response.num_tokens();
        output_queue::append_used(&mut self.records, stream, num_tokens, ending, times);
    }

    fn find(&mut self, request: RequestId) -> Option<(ChoiceLocation, &mut OpenResponse)> {
        let at = *self.choices.get(&request)?;
        let open = self.streams.get_mut(&at.stream)?;
        Some((at, open))
    }
}
