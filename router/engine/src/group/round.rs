//! One engine's state in the group's current round.

use plait_core::{Decision, Mode, Vote};

/// What an engine knows of the round.
#[derive(Debug)]
pub struct Round {
    step: u64,
    /// All replicas must vote.
    votes_requested: bool,
    has_cast: bool,
    /// All replicas of this engine were idle when they voted last.
    was_idle: bool,
    /// The last decision closed admission.
    is_draining: bool,
    is_over: bool,
}

impl Round {
    /// The first round: its votes say that the engines have joined.
    pub fn first() -> Self {
        Self {
            step: 1,
            votes_requested: true,
            has_cast: false,
            was_idle: true,
            is_draining: false,
            is_over: false,
        }
    }

    /// The step that is voted on.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// This engine has voted.
    pub fn has_cast(&self) -> bool {
        self.has_cast
    }

    /// No replica has to vote yet.
    pub fn is_dormant(&self) -> bool {
        !self.votes_requested
    }

    /// No round will follow.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// See [`super::Exchange::must_cast`].
    pub fn must_cast(&self, votes: &[Vote]) -> bool {
        !self.has_cast && !self.is_over && (self.votes_requested || self.is_news(votes))
    }

    fn is_news(&self, votes: &[Vote]) -> bool {
        let has_rows = votes.iter().any(|vote| vote.num_tokens > 0);
        let begins_to_drain = !self.is_draining && votes.iter().any(|vote| vote.draining);
        let is_last_to_drain = self.is_draining && !self.was_idle && all_idle(votes);
        has_rows || begins_to_drain || is_last_to_drain
    }

    /// A replica votes, so all must.
    pub fn call(&mut self) {
        self.votes_requested = true;
    }

    /// This engine votes.
    pub fn cast(&mut self, votes: &[Vote]) {
        assert!(!self.has_cast, "two votes in one round");
        self.has_cast = true;
        self.votes_requested = true;
        self.was_idle = all_idle(votes);
    }

    /// Begins the next round, which is dormant if no replica had rows.
    pub fn conclude(&mut self, decision: &Decision) {
        self.step += 1;
        self.has_cast = false;
        self.votes_requested = decision.mode != Mode::Idle;
        self.is_draining = decision.draining;
        self.is_over = decision.stop;
    }

    /// The group ended.
    pub fn end(&mut self) {
        self.is_over = true;
    }
}

fn all_idle(votes: &[Vote]) -> bool {
    votes.iter().all(|vote| vote.idle)
}
