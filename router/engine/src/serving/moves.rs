//! Streams that leave a replica without ranks, and those that come to this one.

use plait_core::RequestId;
use plait_openai::ApiError;

use super::Serving;
use crate::metrics::Ending;
use crate::moved_stream::{MovedChoice, MovedStream};
use crate::output::StreamEvent;
use crate::output_queue::StreamId;

impl Serving {
    /// Whether the stream has requests here.
    pub fn has(&self, stream: StreamId) -> bool {
        self.streams.contains_key(&stream)
    }

    /// The streams that may leave, by arrival: no thread fills a mask of theirs. Nothing may run.
    pub fn movable_streams(&self) -> Vec<StreamId> {
        let streams = self.streams.iter().filter(|(_, requests)| {
            let mut requests = requests.iter();
            requests.all(|request| self.masks.may_leave(*request))
        });
        let mut streams: Vec<_> = streams
            .map(|(stream, requests)| (requests.iter().min().copied(), *stream))
            .collect();
        streams.sort_unstable();
        streams.into_iter().map(|(_, stream)| stream).collect()
    }

    /// Tokens that the longest of a stream's requests may come to.
    pub fn most_tokens(&self, stream: StreamId) -> u64 {
        let requests = self.streams.get(&stream).into_iter().flatten();
        let tokens = requests.filter_map(|request| self.scheduler.most_tokens(*request));
        tokens.max().unwrap_or(0)
    }

    /// Whether a stream stays until its mask has come.
    pub fn awaits_mask_to_move(&self) -> bool {
        let mut requests = self.streams.values().flatten();
        requests.any(|request| !self.masks.may_leave(*request))
    }

    /// Sends a stream to another replica, behind its events so far.
    pub fn give_away(&mut self, stream: StreamId) {
        let Some(requests) = self.streams.remove(&stream) else {
            return;
        };
        let shared = self.config.shared.clone();
        shared.pending_streams.set_out(stream);
        let leaving = requests.iter().map(|request| self.release(*request));
        let choices: Vec<MovedChoice> = leaving.collect();
        let target = shared
            .routes
            .move_away(stream, choices.iter().map(|it| &it.request));
        let own = &self.config.own;
        let target = target.unwrap_or(own.number);
        if target != own.number {
            own.metrics.losses.num_moved.inc_by(choices.len() as u64);
        }
        self.events.push(StreamEvent::Move(MovedStream {
            stream,
            target,
            response: None,
            choices,
        }));
    }

    fn release(&mut self, request: RequestId) -> MovedChoice {
        let moved = self.scheduler.release(request);
        let live = self.requests.remove(&request);
        let (released, live) = moved
            .zip(live)
            .expect("all requests of a replica without ranks wait");
        self.num_measured -= usize::from(live.wants_logprobs());
        MovedChoice {
            left_as: request,
            request: released,
            live,
            constrained: self.masks.leave(request),
            choice: None,
        }
    }

    /// Queues the requests of a stream that another replica had.
    pub fn take_over(&mut self, moved: MovedStream) {
        let MovedStream {
            stream,
            response,
            choices,
            ..
        } = moved;
        self.streams.entry(stream).or_default();
        let (mut reopened, mut ended, mut refused) = (Vec::new(), Vec::new(), None);
        for choice in choices {
            let of_answer = choice.choice;
            match self.enter(stream, choice) {
                Ok((request, is_complete)) => {
                    if is_complete || of_answer.is_none() {
                        ended.push(request);
                    }
                    reopened.extend(of_answer.map(|it| (request, it)));
                }
                Err(error) => refused = Some(error),
            }
        }
        if let Some(response) = response {
            self.events.push(StreamEvent::Reopen {
                stream,
                response,
                choices: reopened,
            });
        }
        if let Some(error) = refused {
            return self.end_stream(stream, error);
        }
        ended.into_iter().for_each(|request| self.stop(request));
    }

    /// Queues a request. Returns its number, and whether its answer is complete.
    fn enter(
        &mut self,
        stream: StreamId,
        choice: MovedChoice,
    ) -> Result<(RequestId, bool), ApiError> {
        let MovedChoice {
            request,
            mut live,
            constrained,
            ..
        } = choice;
        let request = self.scheduler.take_over(request).map_err(|refusal| {
            self.config.own.metrics.requests.finish(Ending::Error);
            ApiError::from(refusal)
        })?;
        live.awaits_token = true;
        self.num_measured += usize::from(live.wants_logprobs());
        self.requests.insert(request, live);
        self.streams.entry(stream).or_default().push(request);
        let is_complete = constrained.is_some_and(|answer| self.masks.open(request, answer));
        Ok((request, is_complete))
    }
}
