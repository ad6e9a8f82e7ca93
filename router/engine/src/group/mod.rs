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
mod ballot;
mod end;
mod first;
mod member;
mod round;
mod settings;
mod socket;
mod wire;

pub use end::GroupEnd;
pub use settings::{
    ClientKeys, GroupPatience, GroupProblem, GroupSettings, Key, MAX_REPLICAS, Owners, Seat,
    ServerKeys,
};
pub use socket::{Handshake, Strays};
pub(crate) use wire::decision_to_wire;

use plait_core::{Decision, Micros, Vote};
use plait_proto::ExitCode;

use first::First;
use member::Member;

/// One engine's part in its group; used by one thread.
///
/// The caller polls [`Exchange::poll_items`] until [`Exchange::next_deadline`], calls
/// [`Exchange::hear`], and casts its replicas' votes whenever [`Exchange::must_cast`] says so. While it
/// [`Exchange::awaits_decision`] it takes no request: the decision may stop the group, because all said
/// that they are idle.
pub struct Exchange {
    role: Role,
}

enum Role {
    First(Box<First>),
    Member(Box<Member>),
}

impl Exchange {
    /// Takes this engine's seat: listens or dials, and returns before anybody has answered.
    pub fn new(settings: GroupSettings, now: Micros) -> Result<Self, GroupProblem> {
        settings.check()?;
        let role = match settings.seat {
            Seat::Alone | Seat::First { .. } => Role::First(Box::new(First::new(settings, now)?)),
            Seat::Member { .. } => Role::Member(Box::new(Member::new(settings)?)),
        };
        Ok(Self { role })
    }

    /// Where the others dial, on the first engine of several: with the port that was taken.
    pub fn endpoint(&self) -> Option<&str> {
        match &self.role {
            Role::First(first) => first.endpoint(),
            Role::Member(_) => None,
        }
    }

    /// Whether `votes`, one of each replica of this engine, must be cast now: the group waits for them,
    /// or they are news to it. False after they were cast, until the decision.
    pub fn must_cast(&self, votes: &[Vote]) -> bool {
        match &self.role {
            Role::First(first) => first.must_cast(votes),
            Role::Member(member) => member.round().must_cast(votes),
        }
    }

    /// The votes were cast and the decision is not in.
    pub fn awaits_decision(&self) -> bool {
        match &self.role {
            Role::First(first) => first.awaits_decision(),
            Role::Member(member) => member.round().has_cast(),
        }
    }

    /// Casts the votes of this engine's replicas on the next step; once a round.
    pub fn cast(&mut self, votes: &[Vote], now: Micros) -> Result<(), GroupEnd> {
        match &mut self.role {
            Role::First(first) => first.cast(votes, now),
            Role::Member(member) => member.cast(votes, now),
        }
    }

    /// Takes in what has come, without blocking: the decision on the step that was voted on, if it is
    /// there. After an error nothing more comes.
    pub fn hear(&mut self, now: Micros) -> Result<Option<Decision>, GroupEnd> {
        match &mut self.role {
            Role::First(first) => first.hear(now),
            Role::Member(member) => member.hear(now),
        }
    }

    /// What wakes this engine; nothing where it is alone.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        match &self.role {
            Role::First(first) => first.poll_items(),
            Role::Member(member) => member.poll_items(),
        }
    }

    /// When [`Exchange::hear`] must be called though nothing has come.
    pub fn next_deadline(&self) -> Option<Micros> {
        match &self.role {
            Role::First(first) => first.next_deadline(),
            Role::Member(member) => member.next_deadline(),
        }
    }

    /// This engine cannot go on: the others end with its reason.
    pub fn give_up(&mut self, code: ExitCode, reason: &str) {
        match &mut self.role {
            Role::First(first) => first.give_up(reason),
            Role::Member(member) => member.give_up(code, reason),
        }
    }

    /// What came that was no part of a round, and was dropped.
    pub fn strays(&self) -> Strays {
        match &self.role {
            Role::First(first) => first.strays(),
            Role::Member(member) => member.strays(),
        }
    }
}
