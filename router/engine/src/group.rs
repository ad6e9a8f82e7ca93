//! A group's engines agree on each step: votes go in, the decision on the step comes out.
//!
//! The first engine listens, the others dial it. Each sends it the votes of its replicas, and it alone
//! draws the decision and sends it to all. Two hops and 2 (n - 1) messages a step, where all-to-all takes
//! one hop and n (n - 1) messages: the second hop costs less than the messages do, and n engines need
//! n - 1 connections. A group of one engine does the same without a socket.
//!
//! A *round* is one vote of every replica on one step. Each has a number of its own, the step's: a
//! decision that nobody has rows uses its number up. The next round after such a decision begins with the
//! first vote that has something to say, which the first engine passes on as a call to everybody else;
//! until then nothing is sent and nobody wakes.

mod allowlist;
mod coordinator;
mod failure;
mod member;
mod round;
mod settings;
mod socket;
mod vote_collection;
mod wire;

pub use failure::GroupFailure;
pub use settings::{
    ClientKeys, GroupProblem, GroupSettings, GroupTimeouts, Key, MAX_REPLICAS, Owners, Role,
    ServerKeys,
};
pub use socket::{DropCounts, HandshakeFailure};
pub(crate) use wire::decision_to_wire;

use plait_core::{Decision, Micros, Vote};
use plait_proto::ExitCode;

use coordinator::Coordinator;
use member::Member;

/// One engine's part in its group; used by one thread.
///
/// The caller polls [`Exchange::poll_items`] until [`Exchange::next_deadline`], calls
/// [`Exchange::receive`], and casts its replicas' votes whenever [`Exchange::must_cast`] says so. While it
/// [`Exchange::awaits_decision`] it takes no request: the decision may stop the group, because all said
/// that they are idle.
pub struct Exchange {
    role: RoleState,
}

enum RoleState {
    Coordinator(Box<Coordinator>),
    Member(Box<Member>),
}

impl Exchange {
    /// Takes up this engine's role: listens or dials, and returns before anybody has answered.
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

    /// Where the others dial, on the first engine of several: with the port that was taken.
    pub fn endpoint(&self) -> Option<&str> {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.endpoint(),
            RoleState::Member(_) => None,
        }
    }

    /// Whether `votes`, one of each replica of this engine, must be cast now: the group waits for them,
    /// or they are news to it. False after they were cast, until the decision.
    pub fn must_cast(&self, votes: &[Vote]) -> bool {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.must_cast(votes),
            RoleState::Member(member) => member.round().must_cast(votes),
        }
    }

    /// The votes were cast and the decision is not in.
    pub fn awaits_decision(&self) -> bool {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.awaits_decision(),
            RoleState::Member(member) => member.round().has_cast(),
        }
    }

    /// Casts the votes of this engine's replicas on the next step; once a round.
    pub fn cast(&mut self, votes: &[Vote], now: Micros) -> Result<(), GroupFailure> {
        match &mut self.role {
            RoleState::Coordinator(coordinator) => coordinator.cast(votes, now),
            RoleState::Member(member) => member.cast(votes, now),
        }
    }

    /// Takes in what has come, without blocking: the decision on the step that was voted on, if it is
    /// there. After an error nothing more comes.
    pub fn receive(&mut self, now: Micros) -> Result<Option<Decision>, GroupFailure> {
        match &mut self.role {
            RoleState::Coordinator(coordinator) => coordinator.receive(now),
            RoleState::Member(member) => member.receive(now),
        }
    }

    /// What wakes this engine; nothing where it is alone.
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

    /// This engine cannot go on: the others end with its reason.
    pub fn give_up(&mut self, code: ExitCode, reason: &str) {
        match &mut self.role {
            RoleState::Coordinator(coordinator) => coordinator.give_up(reason),
            RoleState::Member(member) => member.give_up(code, reason),
        }
    }

    /// What came that was no part of a round, and was dropped.
    pub fn drop_counts(&self) -> DropCounts {
        match &self.role {
            RoleState::Coordinator(coordinator) => coordinator.drop_counts(),
            RoleState::Member(member) => member.drop_counts(),
        }
    }
}
