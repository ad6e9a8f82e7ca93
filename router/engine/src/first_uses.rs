//! Ways of sampling that no step has used so far. The worker may compile kernels for the first step of each.

use plait_core::RequestId;
use plait_proto::SamplingParams;
use rustc_hash::FxHashSet;

/// Which ways have been used, and by which requests others are about to be.
#[derive(Debug, Default)]
pub struct FirstUses {
    known: FxHashSet<u64>,
    /// Running requests without a token so far. Mostly none.
    pending: Vec<(RequestId, u64)>,
}

impl FirstUses {
    /// A request has got a slot.
    pub fn begin(&mut self, request: RequestId, sampling: &SamplingParams) {
        let way = way_of(sampling);
        if !self.known.contains(&way) {
            self.pending.push((request, way));
        }
    }

    /// A step has done all that the request needs for its next token.
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

/// Which fields are in use, and whether sampling is greedy.
fn way_of(sampling: &SamplingParams) -> u64 {
    let is_greedy = sampling.temperature == 0.0;
    sampling.fields_in_use() << 1 | u64::from(is_greedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_of_sampling_is_new_until_a_step_has_used_it() {
        let mut uses = FirstUses::default();
        let greedy = SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        };
        let filtered = SamplingParams {
            top_p: 0.9,
            temperature: 0.7,
            ..greedy
        };
        uses.begin(RequestId(0), &greedy);
        uses.begin(RequestId(1), &filtered);
        uses.sampled(RequestId(0));
        assert!(uses.is_any_due(), "top_p");
        uses.sampled(RequestId(1));
        assert!(!uses.is_any_due());
        uses.begin(
            RequestId(2),
            &SamplingParams {
                top_p: 0.5,
                ..filtered
            },
        );
        assert!(!uses.is_any_due(), "another value runs the same kernel");
    }

    #[test]
    fn a_request_that_ends_before_its_first_token_shows_nothing() {
        let mut uses = FirstUses::default();
        let greedy = SamplingParams::default();
        uses.begin(RequestId(0), &greedy);
        uses.end(RequestId(0));
        assert!(!uses.is_any_due());
        uses.begin(RequestId(1), &greedy);
        assert!(uses.is_any_due());
    }
}
