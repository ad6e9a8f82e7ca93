//! What the steps of a group take: as long as that of the replica with the most to do, which knows of no other's
//! work but its tokens.

use std::collections::VecDeque;

use plait_core::{Decision, Micros, Mode};

/// Steps of each kind that are remembered.
const NUM_RECENT: usize = 16;
/// Steps of a kind after which it is known.
const NUM_KNOWN: usize = 4;
/// Tokens of a step that is like recent ones, as a multiple of the most of theirs.
const ALIKE: u32 = 2;

/// The last steps with prefill rows, and those without.
#[derive(Debug, Default)]
pub struct GroupStepTimes {
    recent: [VecDeque<Launched>; 2],
    in_flight: VecDeque<(usize, u32)>,
}

/// A step that has ended.
#[derive(Debug)]
struct Launched {
    num_tokens: u32,
    elapsed: Micros,
}

impl GroupStepTimes {
    /// A step is sent. Returns the longest time of recent ones like it; None if none were.
    pub fn launch(&mut self, decision: &Decision) -> Option<Micros> {
        let kind = usize::from(decision.mode == Mode::Decode);
        self.in_flight.push_back((kind, decision.pad_tokens));
        let recent = &self.recent[kind];
        let most = recent.iter().map(|step| step.num_tokens).max()?;
        let is_alike = decision.pad_tokens <= ALIKE * most && recent.len() >= NUM_KNOWN;
        let longest = recent.iter().map(|step| step.elapsed).max()?;
        is_alike.then_some(longest)
    }

    /// The oldest step has ended.
    pub fn measure(&mut self, elapsed: Micros) {
        let Some((kind, num_tokens)) = self.in_flight.pop_front() else {
            return;
        };
        let recent = &mut self.recent[kind];
        recent.truncate(NUM_RECENT - 1);
        recent.push_front(Launched {
            num_tokens,
            elapsed,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plait_core::StepId;

    fn decision(mode: Mode, pad_tokens: u32) -> Decision {
        Decision {
            step: StepId(1),
            mode,
            tokens: Vec::new(),
            pad_tokens,
            graph_bucket: None,
            dummy_replicas: Vec::new(),
            draining: false,
            stop: false,
        }
    }

    #[test]
    fn a_step_is_expected_to_take_as_long_as_the_longest_of_recent_ones_like_it() {
        let mut times = GroupStepTimes::default();
        for millis in [5, 9, 6, 7] {
            assert_eq!(times.launch(&decision(Mode::Decode, 64)), None);
            times.measure(Micros(millis));
        }
        let mut expected = |mode, num_tokens| times.launch(&decision(mode, num_tokens));
        assert_eq!(expected(Mode::Decode, 128), Some(Micros(9)));
        assert_eq!(
            expected(Mode::Decode, 129),
            None,
            "more than twice the tokens"
        );
        assert_eq!(expected(Mode::Mixed, 64), None, "no prompt was measured");
    }

    #[test]
    fn a_long_step_is_forgotten_after_sixteen_others() {
        let mut times = GroupStepTimes::default();
        for millis in [90].into_iter().chain([5; 16]) {
            times.launch(&decision(Mode::Mixed, 64));
            times.measure(Micros(millis));
        }
        assert_eq!(times.launch(&decision(Mode::Prefill, 64)), Some(Micros(5)));
    }
}
