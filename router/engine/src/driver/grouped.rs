//! A replica of a group: it votes on its plan, and sends the plan with the group's decision.

use plait_core::{Decision, Micros};
use plait_proto::{ExitCode, Hello, StoreReply, StoreRequest};

use super::{EventLoop, Stage};
use crate::group::{CapturedGraphs, GroupFailure, GroupSettings, Seat};
use crate::serving::{PlannedStep, Serving};
use crate::status::Phase;

/// A replica in its group.
pub struct Grouped {
    seat: Seat,
    /// Its number in the group.
    pub replica: u32,
    /// Replicas of the group.
    pub num_replicas: u32,
    /// Of all replicas.
    graphs: CapturedGraphs,
    max_tokens: u32,
    /// The step that was voted on, until the decision.
    planned: Option<PlannedStep>,
    /// The first decision has come: all engines have joined.
    has_begun: bool,
}

impl Grouped {
    /// Before the first vote.
    pub fn new(seat: Seat, settings: &GroupSettings) -> Self {
        Self {
            replica: seat.replica(),
            seat,
            num_replicas: settings.num_replicas(),
            graphs: settings.graphs.clone(),
            max_tokens: settings.max_tokens,
            planned: None,
            has_begun: false,
        }
    }

    /// Takes the graphs that the replica's ranks capture; before its first vote.
    pub fn add_graphs(&self, hellos: &[Hello]) {
        self.graphs.add_replica(hellos, self.max_tokens);
    }

    /// What wakes the driver.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        self.seat.poll_items()
    }

    /// When the driver must look at the group though nothing has come.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.seat.next_deadline()
    }

    /// Ends the group with this reason, unless it has ended.
    pub fn give_up(&mut self, code: ExitCode, reason: &str) {
        self.seat.give_up(code, reason);
    }

    /// Asks the group's store for a rank of this replica.
    pub fn ask_store(&mut self, request: StoreRequest) {
        self.seat.ask_store(request);
    }

    /// What the store has answered to ranks of this replica.
    pub fn take_store_replies(&mut self) -> Vec<StoreReply> {
        self.seat.take_store_replies()
    }

    /// Plans and votes if credit is left, and the group waits for a vote or has to hear of one. A replica whose
    /// output waits, or that is paused, plans nothing, but it votes.
    fn vote(
        &mut self,
        serving: &mut Serving,
        plans_nothing: bool,
        now: Micros,
    ) -> Result<(), GroupFailure> {
        if self.seat.awaits_decision() || !serving.has_credit() {
            return Ok(());
        }
        let planned = if plans_nothing {
            None
        } else {
            serving.plan_step(now)
        };
        let vote = serving.vote(planned.as_ref(), self.replica, self.graphs.largest());
        if !self.seat.must_cast(vote) {
            assert!(planned.is_none(), "a plan with rows needs a vote");
            return Ok(());
        }
        self.planned = planned;
        self.seat.cast(vote, now)
    }
}

impl EventLoop {
    /// Requests wait while a decision is due: it may stop the group.
    pub(super) fn awaits_decision(&self) -> bool {
        let group = self.driver.group.as_ref();
        group.is_some_and(|group| group.seat.awaits_decision())
    }

    /// Whether requests are admitted: a group admits them once all of its engines have joined.
    pub(super) fn is_formed(&self) -> bool {
        self.driver
            .group
            .as_ref()
            .is_none_or(|group| group.has_begun)
    }

    /// Handles the messages of the other engines.
    pub(super) fn receive_from_group(&mut self) {
        let now = self.now();
        let Some(group) = &mut self.driver.group else {
            return;
        };
        match group.seat.receive(now) {
            Ok(None) => {}
            Ok(Some(decision)) => self.follow(&decision),
            Err(end) => self.fail(end.code(), &end.to_string()),
        }
        self.send_group_replies();
    }

    pub(super) fn vote(&mut self) {
        let now = self.now();
        // Requests that arrived before this engine's drain are served; another engine's drain refuses them.
        let drains = self.is_draining && self.has_taken_all();
        let plans_nothing = self.output_waits() || self.own().status.is_paused();
        let (Stage::Serving(serving), Some(group)) = (&mut self.stage, &mut self.driver.group)
        else {
            return;
        };
        if drains {
            serving.drain();
        }
        if let Err(end) = group.vote(serving, plans_nothing, now) {
            self.fail(end.code(), &end.to_string());
        }
    }

    fn follow(&mut self, decision: &Decision) {
        let now = self.now();
        let (Stage::Serving(serving), Some(group)) = (&mut self.stage, &mut self.driver.group)
        else {
            return;
        };
        if let Some(frames) = serving.apply_decision(group.planned.take(), decision, now)
            && let Err((rank, error)) = self.driver.link.send_all(frames)
        {
            return self.lose_rank(rank, &format!("it cannot be reached: {error}"));
        }
        let step = i64::try_from(decision.step.0).expect("steps are counted one by one");
        self.own().metrics.group.step.set(step);
        self.begin();
        if decision.draining {
            self.close_admission();
        }
        if decision.stop {
            self.stop();
        }
    }

    fn begin(&mut self) {
        let has_begun = self.driver.group.as_mut().map(|group| &mut group.has_begun);
        if has_begun.is_some_and(|has_begun| !std::mem::replace(has_begun, true)) {
            self.own().status.enter(Phase::Ready);
        }
    }

    /// An engine of the group drains.
    fn close_admission(&mut self) {
        if !std::mem::replace(&mut self.is_draining, true) {
            self.shared().pending_streams.close();
            self.pause(false);
            self.own().status.enter(Phase::Draining);
        }
    }

    /// All engines are idle: requests that are not in the scheduler are refused.
    fn stop(&mut self) {
        self.flush();
        self.shared().reject_pending();
        self.start_shutdown();
    }
}
