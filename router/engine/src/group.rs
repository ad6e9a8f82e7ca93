//! A group's engines agree on each step: votes go in, the decision on the step comes out.
//!
//! Engine 0, the coordinator, listens, and the others dial it. Each sends it the votes of its replicas. The
//! coordinator alone makes the decision and sends it to all. That takes two hops and 2 (n - 1) messages a
//! step, all-to-all one hop and n (n - 1) messages: the second hop costs less than the messages do. A group
//! of one engine does the same without a socket.
//!
//! A *round* is one vote of every replica on one step. A step's number belongs to one round, and a decision
//! that no replica has rows uses it up. After such a decision nothing is sent and no engine wakes until a
//! replica has something to vote for. The coordinator then passes that vote on as a call to all others.

mod coordinator;
mod failure;
mod graphs;
mod member;
mod round;
mod seat;
mod settings;
mod socket;
mod step_times;
mod store_desk;
mod vote_collection;
mod wire;

pub use failure::GroupFailure;
pub use graphs::CapturedGraphs;
pub use seat::Seat;
pub(crate) use settings::who_else_comes;
pub use settings::{
    ClientKeys, GroupProblem, GroupSettings, GroupTimeouts, Key, MAX_REPLICAS, Owners, Role,
    ServerKeys,
};
pub use socket::{DropCounts, HandshakeFailure};
pub(crate) use step_times::GroupStepTimes;
pub(crate) use wire::decision_to_wire;

use plait_core::{Decision, Micros, Vote};
use plait_proto::{ExitCode, StoreReply, StoreRequest};

use coordinator::Coordinator;
use member::Member;

/// One engine's part in its group; used by one thread.
///
/// The caller polls [`Exchange::poll_items`] until [`Exchange::next_deadline`], calls
/// [`Exchange::receive`], and casts its replicas' votes when [`Exchange::must_cast`] says so. While it
/// [`Exchange::awaits_decision`] it admits no request: the decision may stop the group.
pub struct Exchange {
    role: RoleState,
}

enum RoleState {
    Coordinator(Box<Coordinator>),
    Member(Box<Member>),
}

impl Exchange {
    /// Listens or dials, as the engine's role says; does not wait for an answer.
    pub fn new(settings: GroupSettings, now: Micros) -> Result<Self, GroupProblem> {
        settings.check()?;
        let role = match settings.role {
            Role::Alone | Role::Coordinator { .. } => {
                RoleState::Coordinator(Box::new(Coordinator::new(settings, now)?))
            }
            Role::Member { .. } => RoleState::Member(Box::new(Member::new(settings)?)),
        };
        Ok(Self { role })
    }

    /// Where the others dial the coordinator, with the port that was taken.
    pub fn endpoint(&self) -> Option<&str> {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.endpoint(),
            RoleState::Member(_) => None,
        }
    }

    /// Whether `votes`, one of each replica of this engine, must be cast now: the group waits for them, or
    /// has to hear of them. False from the vote to its decision.
    pub fn must_cast(&self, votes: &[Vote]) -> bool {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.must_cast(votes),
            RoleState::Member(member) => member.round().must_cast(votes),
        }
    }

    /// The votes are cast and the decision has not come.
    pub fn awaits_decision(&self) -> bool {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.awaits_decision(),
            RoleState::Member(member) => member.round().has_cast(),
        }
    }

    /// Votes are asked for, whatever they are.
    pub fn is_called(&self) -> bool {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.is_called(),
            RoleState::Member(member) => !member.round().is_dormant(),
        }
    }

    /// Casts the votes of this engine's replicas on the next step; once a round.
    pub fn cast(&mut self, votes: &[Vote], now: Micros) -> Result<(), GroupFailure> {
        match &mut self.role {
            RoleState::Coordinator(coordinator) => coordinator.cast(votes, now),
            RoleState::Member(member) => member.cast(votes, now),
        }
    }

    /// Handles the messages that have come, without blocking; returns the decision if it is there. After an
    /// error nothing more comes.
    pub fn receive(&mut self, now: Micros) -> Result<Option<Decision>, GroupFailure> {
        match &mut self.role {
            RoleState::Coordinator(coordinator) => coordinator.receive(now),
            RoleState::Member(member) => member.receive(now),
        }
    }

    /// Asks the group's store for a rank of this engine.
    pub fn ask_store(&mut self, request: StoreRequest) -> Result<(), GroupFailure> {
        match &mut self.role {
            RoleState::Coordinator(coordinator) => coordinator.ask_store(0, request),
            RoleState::Member(member) => member.ask_store(request),
        }
    }

    /// What the store has answered to ranks of this engine.
    pub fn take_store_replies(&mut self) -> Vec<StoreReply> {
        match &mut self.role {
            RoleState::Coordinator(coordinator) => coordinator.take_store_replies(),
            RoleState::Member(member) => member.take_store_replies(),
        }
    }

    /// What wakes this engine; empty if it is alone.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.poll_items(),
            RoleState::Member(member) => member.poll_items(),
        }
    }

    /// When [`Exchange::receive`] must be called though nothing has come.
    pub fn next_deadline(&self) -> Option<Micros> {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.next_deadline(),
            RoleState::Member(member) => member.next_deadline(),
        }
    }

    /// Ends the group: the other engines get the reason.
    pub fn give_up(&mut self, code: ExitCode, reason: &str) {
        match &mut self.role {
            RoleState::Coordinator(coordinator) => coordinator.give_up(reason),
            RoleState::Member(member) => member.give_up(code, reason),
        }
    }

    /// Messages that were dropped because no round needed them.
    pub fn drop_counts(&self) -> DropCounts {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.drop_counts(),
            RoleState::Member(member) => member.drop_counts(),
        }
    }
}
