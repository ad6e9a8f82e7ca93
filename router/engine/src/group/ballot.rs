//! The votes of one round, as the first engine gathers them.

use plait_core::{Verdict, Vote, verdict};

/// Why a vote does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uncounted {
    /// On a step whose verdict is out.
    Late,
    /// The replica's second on this step.
    Repeated,
    /// On a step that nobody can know of yet, or of a replica that its sender does not own.
    Unasked,
}

/// Votes on one step.
#[derive(Debug)]
pub struct Ballot {
    step: u64,
    votes: Vec<Option<Vote>>,
}

impl Ballot {
    /// Empty, on step 1.
    pub fn new(num_replicas: u32) -> Self {
        Self {
            step: 1,
            votes: vec![None; num_replicas as usize],
        }
    }

    /// Counts a vote of a replica that its sender owns.
    pub fn add(&mut self, vote: Vote) -> Result<(), Uncounted> {
        match vote.step.0.cmp(&self.step) {
            std::cmp::Ordering::Less => return Err(Uncounted::Late),
            std::cmp::Ordering::Greater => return Err(Uncounted::Unasked),
            std::cmp::Ordering::Equal => {}
        }
        match &mut self.votes[vote.replica as usize] {
            Some(_) => Err(Uncounted::Repeated),
            place => {
                *place = Some(vote);
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

    /// Once all have voted: the verdict, and a new ballot on the next step.
    pub fn close(&mut self, graph_buckets: &[u32]) -> Option<Verdict> {
        let votes: Vec<Vote> = self.votes.iter().copied().collect::<Option<_>>()?;
        let num_replicas = u32::try_from(votes.len()).expect("the number of replicas is a u32");
        let verdict = verdict(&votes, num_replicas, graph_buckets)
            .expect("one vote of each replica on one step was counted");
        self.votes.fill(None);
        self.step += 1;
        Some(verdict)
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
            num_decode_rows: 0,
            num_tokens: 0,
            wants_mixed: false,
            can_graph: true,
            idle: true,
            draining: false,
        }
    }

    #[test]
    fn a_ballot_closes_with_the_last_vote_and_not_before() {
        let mut ballot = Ballot::new(2);
        ballot.add(vote(1, 1)).unwrap();
        assert_eq!(ballot.close(&[]), None);
        assert_eq!(ballot.missing(), [0]);
        ballot.add(vote(0, 1)).unwrap();
        let verdict = ballot.close(&[]).unwrap();
        assert_eq!((verdict.step, verdict.mode), (StepId(1), Mode::Idle));
    }

    #[test]
    fn late_repeated_and_early_votes_do_not_count() {
        let mut ballot = Ballot::new(1);
        assert_eq!(ballot.add(vote(0, 2)), Err(Uncounted::Unasked));
        ballot.add(vote(0, 1)).unwrap();
        assert_eq!(ballot.add(vote(0, 1)), Err(Uncounted::Repeated));
        ballot.close(&[]).unwrap();
        assert_eq!(ballot.add(vote(0, 1)), Err(Uncounted::Late));
        assert_eq!(ballot.missing(), [0], "none of them counts for step 2");
    }
}
