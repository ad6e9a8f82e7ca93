//! Ways of sampling that no step has used so far. The worker may compile kernels for the first step of each.

use plait_core::RequestId;
use plait_proto::SamplingParams;
use rustc_hash::FxHashSet;

/// What decides which kernels a request's rows need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Way {
    fields: u64,
    is_greedy: bool,
    is_adjusted: bool,
    has_output: bool,
    is_masked: bool,
}

impl Way {
    /// Of a request that changes its logits if it `is_adjusted`, and samples nothing unless it `has_output`.
    pub fn new(sampling: &SamplingParams, is_adjusted: bool, has_output: bool) -> Self {
        Self {
            fields: sampling.fields_in_use(),
            is_greedy: sampling.temperature == 0.0,
            is_adjusted,
            has_output,
            is_masked: false,
        }
    }

    /// The same under masks.
    pub fn masked(self, is_masked: bool) -> Self {
        Self { is_masked, ..self }
    }
}

/// Which ways have been used, and by which requests others are about to be.
#[derive(Debug, Default)]
pub struct FirstUses {
    known: FxHashSet<Way>,
    /// Running requests without a token so far. Mostly none.
    pending: Vec<(RequestId, Way)>,
}

impl FirstUses {
    /// A request has got a slot.
    pub fn begin(&mut self, request: RequestId, way: Way) {
        if !self.known.contains(&way) {
            self.pending.push((request, way));
        }
    }

    /// A step has done all that the request needs for its next token, or for its end without one.
    pub fn sampled(&mut self, request: RequestId) {
        let found = self.pending.iter().find(|(other, _)| *other == request);
        if let Some((_, way)) = found.copied() {
            self.known.insert(way);
            self.pending.retain(|(_, other)| *other != way);
        }
    }

    /// The request is gone.
    pub fn end(&mut self, request: RequestId) {
        self.pending.retain(|(other, _)| *other != request);
    }

    /// Whether a step may sample in a way that is new.
    pub fn is_any_due(&self) -> bool {
        !self.pending.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greedy() -> SamplingParams {
        SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        }
    }

    fn plain(sampling: &SamplingParams) -> Way {
        Way::new(sampling, false, true)
    }

    #[test]
    fn a_way_of_sampling_is_new_until_a_step_has_used_it() {
        let mut uses = FirstUses::default();
        let filtered = SamplingParams {
            top_p: 0.9,
            temperature: 0.7,
            ..greedy()
        };
        uses.begin(RequestId(0), plain(&greedy()));
        uses.begin(RequestId(1), plain(&filtered));
        uses.sampled(RequestId(0));
        assert!(uses.is_any_due(), "top_p");
        uses.sampled(RequestId(1));
        assert!(!uses.is_any_due());
        let other = SamplingParams {
            top_p: 0.5,
            ..filtered
        };
        uses.begin(RequestId(2), plain(&other));
        assert!(!uses.is_any_due(), "another value runs the same kernel");
    }

    #[test]
    fn logits_that_are_changed_and_prompts_without_output_are_ways_of_their_own() {
        let mut uses = FirstUses::default();
        uses.begin(RequestId(0), Way::new(&greedy(), false, false));
        uses.sampled(RequestId(0));
        uses.begin(RequestId(1), plain(&greedy()));
        assert!(uses.is_any_due(), "nothing was sampled so far");
        uses.sampled(RequestId(1));
        uses.begin(RequestId(2), Way::new(&greedy(), true, true));
        assert!(uses.is_any_due(), "penalties or biases");
    }

    #[test]
    fn a_request_that_ends_before_its_first_token_shows_nothing() {
        let mut uses = FirstUses::default();
        let way = plain(&greedy());
        uses.begin(RequestId(0), way);
        uses.end(RequestId(0));
        assert!(!uses.is_any_due());
        uses.begin(RequestId(1), way);
        assert!(uses.is_any_due());
    }
}
