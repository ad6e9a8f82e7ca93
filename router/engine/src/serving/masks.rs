//! The masks of the rows that a grammar constrains, as they come.

use plait_core::{Event, RequestId};
use plait_openai::ApiError;
use plait_proto::StepMasks;

use super::Serving;
use crate::masks::{MaskEvent, grammar_failed};
use crate::output::StreamEvent;

impl Serving {
    /// Takes the masks that have come, and what follows from them.
    pub fn take_masks(&mut self) {
        while let Some(event) = self.masks.take_filled() {
            match event {
                None => {}
                Some(MaskEvent::LateMask(request)) => {
                    self.end_requests(&[request], Event::MaskReady);
                }
                Some(MaskEvent::Complete(request)) => self.stop(request),
                Some(MaskEvent::Failed(request, reason)) => self.fail_constrained(request, &reason),
            }
        }
    }

    /// The masks of the oldest step in flight, once they are there or the device has nothing else to do.
    pub fn masks_to_send(&mut self) -> Vec<StepMasks> {
        let Some(step) = self
            .in_flight
            .front_mut()
            .filter(|it| !it.awaiting.is_empty())
        else {
            return Vec::new();
        };
        let masks = self
            .masks
            .masks_of(step.step, &step.awaiting, step.forward_is_done);
        let masks = masks.unwrap_or_default();
        if !masks.is_empty() {
            step.awaiting.clear();
            step.left_out = masks.iter().flat_map(|it| it.left_out.clone()).collect();
        }
        masks
    }

    /// The device has finished a step's forward, and the masks are not there.
    pub fn forward_done(&mut self, step: u64) {
        let found = self.in_flight.iter_mut().find(|it| it.step == step);
        if let Some(step) = found {
            step.forward_is_done = true;
        }
    }

    /// Ends the stream of an answer that its grammar cannot follow.
    fn fail_constrained(&mut self, request: RequestId, reason: &str) {
        let stream = self.requests[&request].stream;
        let error = ApiError::from(grammar_failed(reason));
        if let Some(requests) = self.forget(stream) {
            self.events.push(StreamEvent::Fail { stream, error });
            self.end_requests(&requests, Event::Abort);
        }
    }
}
