//! Replicas that must step together. Each votes on its own plan; the decision follows from the votes
//! alone, and travels beside the plan.

use std::borrow::Cow;

use crate::graph_size::{GraphSize, common_bucket};
use crate::ids::StepId;
use crate::in_flight::InFlightStep;
use crate::plan::Plan;
use crate::prompt_share::PromptShare;
use crate::scheduler::Scheduler;

/// What one replica would do in a step, read from the rows of its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vote {
    /// The voting replica, from 0.
    pub replica: u32,
    /// For which step.
    pub step: StepId,
    /// Tokens of its prefill rows.
    pub num_prefill_tokens: u32,
    /// Its prefill rows.
    pub num_prefill_rows: u32,
    /// Cached tokens that its prefill rows attend to.
    pub num_context_tokens: u32,
    /// Its decode rows.
    pub num_decode_rows: u32,
    /// Tokens that the step would compute.
    pub num_tokens: u32,
    /// Its rows, or its dummy row, could run as a captured graph.
    pub can_graph: bool,
    /// Nothing waits, runs or is in flight.
    pub idle: bool,
    /// It takes no new requests.
    pub draining: bool,
}

impl Vote {
    /// Whether it has both prefill and decode rows.
    pub fn is_mixed(&self) -> bool {
        self.num_prefill_tokens > 0 && self.num_decode_rows > 0
    }

    /// Whether a plan, or having none, can say this. A vote that came over a wire may be anything.
    pub fn is_valid(&self) -> bool {
        let num_rows = u64::from(self.num_prefill_tokens) + u64::from(self.num_decode_rows);
        let has_tokens = self.num_tokens > 0;
        let has_prefill = self.num_prefill_tokens > 0;
        num_rows <= u64::from(self.num_tokens)
            && (num_rows > 0) == has_tokens
            && self.num_prefill_rows <= self.num_prefill_tokens
            && (self.num_prefill_rows > 0) == has_prefill
            && (self.num_context_tokens == 0 || has_prefill)
            && !(self.idle && has_tokens)
    }
}

/// Which kinds of rows a step has, over all replicas of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No rows: the group skips this step's number.
    Idle,
    /// Prefill rows only.
    Prefill,
    /// Decode rows only.
    Decode,
    /// Both.
    Mixed,
}

/// What one replica computes in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaTokens {
    /// Tokens of its prefill rows.
    pub prefill: u32,
    /// All its tokens.
    pub total: u32,
}

impl ReplicaTokens {
    fn of(vote: &Vote) -> Self {
        Self {
            prefill: vote.num_prefill_tokens,
            total: vote.num_tokens,
        }
    }
}

/// Everything about a step that a collective depends on. Every replica has the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Which step.
    pub step: StepId,
    /// Its rows.
    pub mode: Mode,
    /// Tokens of each replica, in order. What the replicas compute together, they compute for these and no others.
    pub tokens: Vec<ReplicaTokens>,
    /// The most tokens of a replica, or those of the graphs.
    pub pad_tokens: u32,
    /// Tokens of the captured graphs that the replicas run; None without graphs.
    pub graph_bucket: Option<u32>,
    /// Replicas without rows. They run a dummy row on a page outside the pool.
    pub dummy_replicas: Vec<u32>,
    /// A replica drains, so none takes new requests.
    pub draining: bool,
    /// A replica drains and all are idle: the group ends.
    pub stop: bool,
}

impl Decision {
    /// Why this cannot follow from votes that include `vote`; None if it can.
    ///
    /// Check a decision that came over a wire before applying it.
    pub fn conflict_with(&self, vote: &Vote) -> Option<&'static str> {
        let is_dummy = self.dummy_replicas.contains(&vote.replica);
        let has_rows = vote.num_tokens > 0;
        let is_idle = self.mode == Mode::Idle;
        let breaches = [
            (self.step != vote.step, "it is on another step"),
            (!self.mode.has_rows_of(vote), "its mode leaves out rows"),
            (
                self.pad_tokens < vote.num_tokens,
                "it pads to too few tokens",
            ),
            (!self.counts_tokens_of(vote), "it counts other tokens"),
            (is_dummy && has_rows, "it makes a dummy of rows"),
            (
                !is_idle && !is_dummy && !has_rows,
                "it leaves a replica without rows or dummy",
            ),
            (self.graph_is_odd(vote), "its graph is none of the step's"),
            (vote.draining && !self.draining, "it forgets a drain"),
            (
                self.stop && !(vote.idle && is_idle && self.draining),
                "it stops what is not idle",
            ),
        ];
        let breach = breaches.into_iter().find(|(is_breach, _)| *is_breach);
        breach.map(|(_, why)| why)
    }

    fn prompt_share(&self, own: Option<&Plan>) -> PromptShare {
        let num_replicas = u32::try_from(self.tokens.len()).expect("replicas are a u32");
        let prefilling = self.tokens.iter().filter(|of| of.prefill > 0);
        let num_prefilling = u32::try_from(prefilling.count()).expect("replicas are a u32");
        PromptShare::after(num_replicas, num_prefilling, own)
    }

    fn counts_tokens_of(&self, vote: &Vote) -> bool {
        self.tokens.get(vote.replica as usize) == Some(&ReplicaTokens::of(vote))
            && self.tokens.iter().all(|of| of.total <= self.pad_tokens)
    }

    fn graph_is_odd(&self, vote: &Vote) -> bool {
        self.graph_bucket
            .is_some_and(|bucket| !vote.can_graph || bucket != self.pad_tokens)
    }
}

impl Mode {
    fn has_rows_of(self, vote: &Vote) -> bool {
        let prefill = vote.num_prefill_tokens == 0 || matches!(self, Self::Prefill | Self::Mixed);
        let decode = vote.num_decode_rows == 0 || matches!(self, Self::Decode | Self::Mixed);
        prefill && decode
    }
}

/// What a replica sends to its ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct DecidedPlan {
    /// The plan that was voted on; without rows if the replica runs a dummy row.
    pub plan: Plan,
    /// What all replicas do.
    pub decision: Decision,
}

/// Votes that allow no decision. The group cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    /// Not every replica voted.
    #[error("replica {replica} did not vote on step {}", .step.0)]
    Missing {
        /// Which replica.
        replica: u32,
        /// Which step.
        step: StepId,
    },
    /// A vote of a replica outside the group, or a second one.
    #[error(
        "a vote of replica {replica} came that was not asked for; the group has {num_replicas}"
    )]
    Unexpected {
        /// Which replica.
        replica: u32,
        /// Replicas of the group.
        num_replicas: u32,
    },
    /// A replica is at another step.
    #[error("replica {replica} voted on step {}, replica 0 on step {}", .given.0, .expected.0)]
    Step {
        /// Which replica.
        replica: u32,
        /// Its step.
        given: StepId,
        /// Replica 0's step.
        expected: StepId,
    },
}

/// The decision of a group of `num_replicas`. Votes may come in any order.
///
/// `graphs` are the sizes that were captured, alike in the whole group.
pub fn decide(
    votes: &[Vote],
    num_replicas: u32,
    graphs: &[GraphSize],
) -> Result<Decision, Disagreement> {
    let votes = in_order(votes, num_replicas)?;
    let tokens: Vec<ReplicaTokens> = votes.iter().map(ReplicaTokens::of).collect();
    let most_tokens = tokens.iter().map(|of| of.total).max().unwrap_or(0);
    let mode = mode_of(&votes);
    let graph_bucket = if mode == Mode::Idle {
        None
    } else {
        common_bucket(&votes, graphs)
    };
    let idlers = votes.iter().filter(|vote| vote.num_tokens == 0);
    let draining = votes.iter().any(|vote| vote.draining);
    Ok(Decision {
        step: votes[0].step,
        mode,
        tokens,
        pad_tokens: graph_bucket.unwrap_or(most_tokens),
        graph_bucket,
        dummy_replicas: idlers
            .filter(|_| mode != Mode::Idle)
            .map(|vote| vote.replica)
            .collect(),
        draining,
        stop: draining && votes.iter().all(|vote| vote.idle),
    })
}

fn mode_of(votes: &[Vote]) -> Mode {
    let has_prefill = votes.iter().any(|vote| vote.num_prefill_tokens > 0);
    let has_decode = votes.iter().any(|vote| vote.num_decode_rows > 0);
    match (has_prefill, has_decode) {
        (false, false) => Mode::Idle,
        (true, false) => Mode::Prefill,
        (false, true) => Mode::Decode,
        (true, true) => Mode::Mixed,
    }
}

/// One vote of each replica, all on the same step.
fn in_order(votes: &[Vote], num_replicas: u32) -> Result<Cow<'_, [Vote]>, Disagreement> {
    let votes = if (0..num_replicas).eq(votes.iter().map(|vote| vote.replica)) {
        Cow::Borrowed(votes)
    } else {
        Cow::Owned(by_replica(votes, num_replicas)?)
    };
    let expected = votes[0].step;
    match votes.iter().find(|vote| vote.step != expected) {
        None => Ok(votes),
        Some(vote) => Err(Disagreement::Step {
            replica: vote.replica,
            given: vote.step,
            expected,
        }),
    }
}

fn by_replica(votes: &[Vote], num_replicas: u32) -> Result<Vec<Vote>, Disagreement> {
    let mut by_replica = vec![None; num_replicas as usize];
    for vote in votes {
        let replica = vote.replica;
        let place = by_replica.get_mut(replica as usize);
        match place {
            Some(place @ None) => *place = Some(*vote),
            _ => {
                return Err(Disagreement::Unexpected {
                    replica,
                    num_replicas,
                });
            }
        }
    }
    let step = votes.first().map_or(StepId(0), |vote| vote.step);
    let each = (0..).zip(by_replica);
    each.map(|(replica, vote)| vote.ok_or(Disagreement::Missing { replica, step }))
        .collect()
}

impl Scheduler {
    /// The vote of replica `replica` on the plan that was just made, or on having none.
    ///
    /// `largest_graph` is the largest token count with a captured graph; 0 without any.
    pub fn vote(&self, plan: Option<&Plan>, replica: u32, largest_graph: u32) -> Vote {
        let count = |of: fn(&Plan) -> u32| plan.map_or(0, of);
        let num_prefill_tokens = count(Plan::num_prefill_tokens);
        let num_decode_rows = count(Plan::num_decode_rows);
        let num_tokens = count(Plan::num_tokens);
        let has_plain_rows = plan.is_none_or(|plan| {
            let mut prefill = plan.prefill.iter();
            num_tokens == num_prefill_tokens + num_decode_rows
                && prefill.all(|row| row.prompt_logprobs.is_empty())
        });
        Vote {
            replica,
            step: plan.map_or(self.next_step(), |plan| plan.step),
            num_prefill_tokens,
            num_prefill_rows: count(Plan::num_prefill_rows),
            num_context_tokens: count(Plan::num_context_tokens),
            num_decode_rows,
            num_tokens,
            can_graph: has_plain_rows && num_tokens.max(1) <= largest_graph,
            idle: self.is_idle(),
            draining: self.is_draining,
        }
    }

    /// What to send for the step: the plan as it was voted on, or a dummy row's if this replica has
    /// no rows. None if the whole group is idle. The step's number is used up all the same, so that
    /// a late vote fits no later round.
    pub fn apply_decision(
        &mut self,
        plan: Option<Plan>,
        decision: &Decision,
    ) -> Option<DecidedPlan> {
        self.is_draining |= decision.draining;
        self.prompt_share = decision.prompt_share(plan.as_ref());
        let step = plan.as_ref().map_or(self.next_step(), |plan| plan.step);
        assert_eq!(step, decision.step, "the decision is on another step");
        if decision.mode == Mode::Idle {
            assert!(plan.is_none(), "a plan with rows was counted as idle");
            self.last_step = step;
            return None;
        }
        Some(DecidedPlan {
            plan: plan.unwrap_or_else(|| self.dummy_plan()),
            decision: decision.clone(),
        })
    }

    fn next_step(&self) -> StepId {
        StepId(self.last_step.0 + 1)
    }

    /// A step without rows of this replica. Its result is awaited like any other.
    fn dummy_plan(&mut self) -> Plan {
        let step = self.next_step();
        self.last_step = step;
        self.in_flight.push(InFlightStep {
            step,
            chunks: Vec::new(),
            samples: Vec::new(),
            restored: Vec::new(),
            parked: Vec::new(),
        });
        Plan {
            step,
            freed_slots: Vec::new(),
            new_slots: Vec::new(),
            trimmed_slots: Vec::new(),
            appended_pages: Vec::new(),
            other_pages: Vec::new(),
            restored_slots: Vec::new(),
            saved_slots: Vec::new(),
            prefill: Vec::new(),
            decode: Vec::new(),
            token_ids: Vec::new(),
        }
    }
}
