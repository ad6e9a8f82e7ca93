//! Streams of a replica without ranks go on in another one, where there is one that serves.

use plait_core::Availability;
use plait_openai::ApiError;

use super::{EventLoop, Stage};
use crate::metrics::Ending;
use crate::moved_stream::MovedStream;
use crate::output::StreamEvent;
use crate::output_queue::StreamId;
use crate::pending_streams::Arrival;

impl EventLoop {
    /// Other replicas take what waits here for ranks.
    pub(super) fn move_streams_if_down(&mut self) {
        if matches!(
            self.stage,
            Stage::Down { .. } | Stage::Handshaking { kept: Some(_), .. }
        ) {
            self.move_streams();
        }
    }

    /// The same; no request may run here.
    pub(super) fn move_streams(&mut self) {
        let (shared, number) = (self.driver.shared.clone(), self.own().number);
        let Some(serving) = self.serving_mut() else {
            return;
        };
        if !serving.is_idle() && shared.routes.has_other(number, 0) {
            let mut streams = serving.movable_streams();
            streams.retain(|it| shared.routes.has_other(number, serving.most_tokens(*it)));
            if !streams.is_empty() {
                let num_streams = streams.len();
                tracing::info!(
                    replica = number,
                    "{num_streams} streams go on in other replicas"
                );
            }
            streams
                .into_iter()
                .for_each(|stream| serving.give_away(stream));
        }
    }

    /// Takes the streams that other replicas could not go on with.
    pub(super) fn take_moved(&mut self) {
        for moved in self.own().moved_streams.take() {
            let stream = moved.stream;
            let Some(serving) = self.serving_mut() else {
                self.send_on(moved);
                continue;
            };
            serving.take_over(moved);
            match self.shared().arrive(stream) {
                Arrival::Wanted => {}
                Arrival::Ends(error) => self.end_stream(stream, *error),
                Arrival::Forgotten => self.abort(stream),
            }
        }
    }

    /// This replica has ended since the stream was sent here.
    fn send_on(&mut self, mut moved: MovedStream) {
        let own = self.own().number;
        let requests = moved.choices.iter().map(|it| &it.request);
        let target = self.shared().routes.move_away(moved.stream, requests);
        moved.target = target.unwrap_or(own);
        if moved.target == own {
            self.fail_moved(moved);
        } else if let Err(moved) = self.shared().hand_over(moved) {
            self.fail_moved(moved);
        }
    }

    fn fail_moved(&mut self, moved: MovedStream) {
        let MovedStream {
            stream,
            response,
            choices,
            ..
        } = moved;
        self.shared().routes.finish(stream);
        for _ in choices {
            self.own().metrics.requests.finish(Ending::Error);
        }
        let error = self.shared().arrive(stream).error_or(|| self.refusal());
        let end = match error {
            Some(error) => StreamEvent::Fail { stream, error },
            None => StreamEvent::Forget(stream),
        };
        if let Some(response) = response {
            let choices = Vec::new();
            self.unsent.push(StreamEvent::Reopen {
                stream,
                response,
                choices,
            });
            self.unsent.push(end);
        }
    }

    /// The client is gone. Its stream may have moved since the mail was sent.
    pub(super) fn abort(&mut self, stream: StreamId) {
        match self.serving_mut() {
            Some(serving) if serving.has(stream) => serving.abort(stream),
            _ => self.shared().abort_elsewhere(stream, self.own().number),
        }
    }

    /// An operator ends the stream. It may have moved since the mail was sent.
    pub(super) fn end_stream(&mut self, stream: StreamId, error: ApiError) {
        match self.serving_mut() {
            Some(serving) if serving.has(stream) => serving.end_stream(stream, error),
            _ => {
                let number = self.own().number;
                self.shared().end_elsewhere(stream, number, error);
            }
        }
    }

    /// Whether the replica takes streams from now on.
    pub(super) fn set_availability(&self, availability: Availability) {
        let number = self.own().number;
        self.shared().set_availability(number, availability);
    }
}
