//! The votes of one round, as the coordinator collects them.

use plait_core::{Decision, GraphSize, Vote, decide};

/// Why a vote does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteError {
    /// On a step that is decided.
    Late,
    /// The replica's second on this step.
    Duplicate,
    /// On a later step, or of a replica that its sender does not own.
    Unexpected,
    /// No plan gives this vote.
    Invalid,
}

/// Votes on one step.
#[derive(Debug)]
pub struct VoteCollection {
    step: u64,
    votes: Vec<Option<Vote>>,
    num_missing: usize,
    /// The complete votes; kept for its memory.
    whole: Vec<Vote>,
}

impl VoteCollection {
    /// Empty, on step 1.
    pub fn new(num_replicas: u32) -> Self {
        let num_missing = num_replicas as usize;
        Self {
            step: 1,
            votes: vec![None; num_missing],
            num_missing,
            whole: Vec::with_capacity(num_missing),
        }
    }

    /// Counts a vote of a replica that its sender owns.
    pub fn add(&mut self, vote: Vote) -> Result<(), VoteError> {
        match vote.step.0.cmp(&self.step) {
            std::cmp::Ordering::Less => return Err(VoteError::Late),
            std::cmp::Ordering::Greater => return Err(VoteError::Unexpected),
            std::cmp::Ordering::Equal => {}
        }
        match &mut self.votes[vote.replica as usize] {
            Some(_) => Err(VoteError::Duplicate),
            _ if !vote.is_valid() => Err(VoteError::Invalid),
            place => {
                *place = Some(vote);
                self.num_missing -= 1;
                Ok(())
            }
        }
    }

    /// Replicas that have not voted.
    pub fn missing(&self) -> Vec<u32> {
        let each = (0..).zip(&self.votes);
        each.filter(|(_, vote)| vote.is_none())
            .map(|(replica, _)| replica)
            .collect()
    }

    /// The decision once all have voted; then collects votes on the next step.
    pub fn close(&mut self, graphs: &[GraphSize]) -> Option<Decision> {
        if self.num_missing > 0 {
            return None;
        }
        self.whole.clear();
        self.whole
            .extend(self.votes.iter_mut().filter_map(Option::take));
        self.num_missing = self.votes.len();
        self.step += 1;
        let num_replicas = u32::try_from(self.votes.len()).expect("replicas are a u32");
        let decision = decide(&self.whole, num_replicas, graphs);
        Some(decision.expect("one vote of each replica on one step was counted"))
    }
}

#[cfg(test)]
mod tests {
    use plait_core::{Mode, StepId};

    use super::*;

    fn vote(replica: u32, step: u64) -> Vote {
        Vote {
            replica,
            step: StepId(step),
            num_prefill_tokens: 0,
            num_prefill_rows: 0,
            num_context_tokens: 0,
            num_decode_rows: 0,
            num_tokens: 0,
            can_graph: true,
            idle: true,
            draining: false,
        }
    }

    #[test]
    fn a_collection_closes_with_the_last_vote_and_not_before() {
        let mut votes = VoteCollection::new(2);
        votes.add(vote(1, 1)).unwrap();
        assert_eq!(votes.close(&[]), None);
        assert_eq!(votes.missing(), [0]);
        votes.add(vote(0, 1)).unwrap();
        let decision = votes.close(&[]).unwrap();
        assert_eq!((decision.step, decision.mode), (StepId(1), Mode::Idle));
    }

    #[test]
    fn what_no_plan_can_say_does_not_count() {
        let mut votes = VoteCollection::new(1);
        let invalid = Vote {
            num_tokens: u32::MAX,
            ..vote(0, 1)
        };
        assert_eq!(votes.add(invalid), Err(VoteError::Invalid));
        votes.add(vote(0, 1)).unwrap();
        assert_eq!(votes.close(&[]).unwrap().pad_tokens, 0);
    }

    #[test]
    fn late_repeated_and_early_votes_do_not_count() {
        let mut votes = VoteCollection::new(1);
        assert_eq!(votes.add(vote(0, 2)), Err(VoteError::Unexpected));
        votes.add(vote(0, 1)).unwrap();
        assert_eq!(votes.add(vote(0, 1)), Err(VoteError::Duplicate));
        votes.close(&[]).unwrap();
        assert_eq!(votes.add(vote(0, 1)), Err(VoteError::Late));
        assert_eq!(votes.missing(), [0], "none of them counts for step 2");
    }
}
