//! An engine that dials the coordinator: votes go out, decisions come back.

use std::time::Duration;

use plait_core::{Decision, Micros, Vote};
use plait_proto::{
    CapturedSize, ExitCode, Fail, Join, Message, PROTOCOL, StoreReply, StoreRequest,
    schema_fingerprint,
};

use crate::clock::micros;

use super::failure::GroupFailure;
use super::round::Round;
use super::settings::{GroupProblem, GroupSettings, Role};
use super::socket::{Broken, Dialler, DropCounts, Unsent};
use super::wire::{decision_from_wire, vote_to_wire};

/// Messages handled in one pass of the event loop.
const MAX_MESSAGES_A_PASS: usize = 64;

/// Any engine of a group but engine 0.
pub struct Member {
    settings: GroupSettings,
    endpoint: String,
    dialler: Dialler,
    round: Round,
    /// The votes that were cast last.
    votes: Vec<Vote>,
    /// How the link broke, if it did.
    broken: Option<Broken>,
    /// When the decision is overdue.
    deadline: Option<Micros>,
    /// Tokens of the last step.
    num_tokens: u32,
    /// To ranks of this engine.
    store_replies: Vec<StoreReply>,
    drop_counts: DropCounts,
}

impl Member {
    /// Dials and asks to join.
    pub fn new(settings: GroupSettings) -> Result<Self, GroupProblem> {
        let Role::Member { endpoint, keys, .. } = &settings.role else {
            unreachable!("the first engine listens")
        };
        let dialler = Dialler::dial(endpoint, keys.as_ref())?;
        let asked = dialler.send(&join(&settings).into());
        asked.expect("nothing waits in a new socket");
        Ok(Self {
            endpoint: endpoint.clone(),
            dialler,
            round: Round::first(),
            votes: Vec::new(),
            broken: None,
            deadline: None,
            num_tokens: 0,
            store_replies: Vec::new(),
            drop_counts: DropCounts::default(),
            settings,
        })
    }

    /// What wakes the engine.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        if self.round.is_over() {
            return Vec::new();
        }
        self.dialler.poll_items()
    }

    /// The engine's round.
    pub fn round(&self) -> &Round {
        &self.round
    }

    /// Messages that were dropped.
    pub fn drop_counts(&self) -> DropCounts {
        self.drop_counts
    }

    /// See [`super::Exchange::ask_store`].
    pub fn ask_store(&mut self, request: StoreRequest) -> Result<(), GroupFailure> {
        let sent = self.dialler.send(&request.into());
        sent.map_err(|unsent| self.fail_unsent(unsent))
    }

    /// See [`super::Exchange::take_store_replies`].
    pub fn take_store_replies(&mut self) -> Vec<StoreReply> {
        std::mem::take(&mut self.store_replies)
    }

    /// Casts the votes of this engine's replicas.
    pub fn cast(&mut self, votes: &[Vote], now: Micros) -> Result<(), GroupFailure> {
        self.round.cast(votes);
        self.votes.clear();
        self.votes.extend_from_slice(votes);
        self.deadline = Some(Micros(now.0 + micros(self.limit())));
        let sent = votes.iter().try_for_each(|vote| {
            let graphs = self.graphs_to_tell();
            let vote = vote_to_wire(vote);
            self.dialler
                .send(&plait_proto::Vote { graphs, ..vote }.into())
        });
        sent.map_err(|unsent| self.fail_unsent(unsent))
    }

    /// The captured sizes, in the first round.
    fn graphs_to_tell(&self) -> Vec<CapturedSize> {
        if self.round.step() == 1 {
            self.settings.graphs.to_wire()
        } else {
            Vec::new()
        }
    }

    /// See [`super::Exchange::receive`].
    pub fn receive(&mut self, now: Micros) -> Result<Option<Decision>, GroupFailure> {
        if self.round.is_over() {
            return Ok(None);
        }
        // Messages from before the link broke come first: they may say why.
        self.broken = self.broken.or_else(|| self.dialler.broken());
        for _ in 0..MAX_MESSAGES_A_PASS {
            let Some(received) = self.dialler.receive() else {
                return self.check_link(now).map(|()| None);
            };
            if let Some(decision) = self.take(received)? {
                return Ok(Some(decision));
            }
        }
        Ok(None)
    }

    /// See [`super::Exchange::next_deadline`]. A link that broke after a decision is due at once.
    pub fn next_deadline(&self) -> Option<Micros> {
        let broken = self.broken.map(|_| Micros(0));
        broken.or(self.deadline).filter(|_| !self.round.is_over())
    }

    /// See [`super::Exchange::give_up`].
    pub fn give_up(&mut self, code: ExitCode, reason: &str) {
        if self.round.is_over() {
            return;
        }
        self.close();
        let fail = Fail {
            rank: self.settings.engine(),
            code,
            reason: reason.to_owned(),
        };
        // A coordinator that cannot be reached sees the link close.
        let _told = self.dialler.send(&fail.into());
    }

    fn take(
        &mut self,
        received: Result<Message, plait_proto::Malformed>,
    ) -> Result<Option<Decision>, GroupFailure> {
        match received {
            Ok(Message::Decision(decision)) => return self.conclude(&decision),
            Ok(Message::Vote(call)) if call.step == self.round.step() => self.round.call(),
            Ok(Message::Vote(_)) => self.drop_counts.num_late += 1,
            Ok(Message::Fail(fail)) => {
                return Err(self.end(GroupFailure::FromCoordinator {
                    code: fail.code,
                    reason: fail.reason,
                }));
            }
            Ok(Message::StoreReply(reply)) => self.store_replies.push(reply),
            Ok(Message::Heartbeat(_)) => {}
            Ok(_) => self.drop_counts.num_unexpected += 1,
            Err(malformed) => {
                tracing::warn!("a malformed message of engine 0: {malformed}");
                self.drop_counts.num_malformed += 1;
            }
        }
        Ok(None)
    }

    fn conclude(
        &mut self,
        decision: &plait_proto::Decision,
    ) -> Result<Option<Decision>, GroupFailure> {
        if decision.step != self.round.step() || !self.round.has_cast() {
            self.drop_counts.num_late += 1;
            return Ok(None);
        }
        if let Some(why) = self.find_invalid_field(decision) {
            let step = decision.step;
            let why = why.to_owned();
            return Err(self.end(GroupFailure::InvalidDecision { step, why }));
        }
        let decision = decision_from_wire(decision, self.settings.num_replicas());
        self.round.conclude(&decision);
        self.deadline = None;
        self.num_tokens = decision.pad_tokens;
        if decision.stop {
            self.dialler.stop_watching();
        }
        Ok(Some(decision))
    }

    /// Why this cannot be the decision on the votes that were cast.
    fn find_invalid_field(&self, decision: &plait_proto::Decision) -> Option<&'static str> {
        let num_replicas = self.settings.num_replicas();
        if decision.dummy_replicas.len() > num_replicas.div_ceil(8) as usize {
            return Some("it has a dummy for more replicas than there are");
        }
        let num_counted = decision.tokens.len();
        if decision.mode != plait_proto::Mode::Idle && num_counted != 8 * num_replicas as usize {
            return Some("it does not count the tokens of each replica");
        }
        let graphs = self.settings.graphs.sizes();
        let is_known = |bucket| graphs.iter().any(|size| size.num_tokens() == bucket);
        if !decision.graph_bucket.is_none_or(is_known) {
            return Some("no graph has its size");
        }
        if decision.pad_tokens > self.settings.max_tokens {
            return Some("it pads to more tokens than a step may have");
        }
        let decision = decision_from_wire(decision, self.settings.num_replicas());
        self.votes
            .iter()
            .find_map(|vote| decision.conflict_with(vote))
    }

    /// Twice the coordinator's wait: it knows better which engine is missing.
    fn limit(&self) -> Duration {
        let timeouts = &self.settings.timeouts;
        if self.round.step() == 1 {
            2 * timeouts.join
        } else {
            2 * timeouts.of_vote(self.num_tokens)
        }
    }

    fn check_link(&mut self, now: Micros) -> Result<(), GroupFailure> {
        match self.broken {
            Some(Broken::Closed) => Err(self.fail_unsent(Unsent::Gone)),
            Some(Broken::Unopened(handshake)) => {
                let endpoint = self.endpoint.clone();
                Err(self.end(GroupFailure::ConnectFailed {
                    endpoint,
                    handshake,
                }))
            }
            None => self.check_deadline(now),
        }
    }

    fn check_deadline(&mut self, now: Micros) -> Result<(), GroupFailure> {
        if self.deadline.is_none_or(|deadline| deadline > now) {
            return Ok(());
        }
        let (step, waited) = (self.round.step(), self.limit());
        Err(self.end(GroupFailure::NoDecision { step, waited }))
    }

    fn fail_unsent(&mut self, unsent: Unsent) -> GroupFailure {
        let (engine, replicas) = (0, self.settings.owners().replicas_of(0).collect());
        self.end(match unsent {
            Unsent::Gone => GroupFailure::Disconnected { engine, replicas },
            Unsent::Full => GroupFailure::NotReading { engine, replicas },
        })
    }

    fn end(&mut self, end: GroupFailure) -> GroupFailure {
        self.close();
        end
    }

    /// Ends the round and the link.
    fn close(&mut self) {
        self.round.end();
        self.dialler.stop_watching();
    }
}

fn join(settings: &GroupSettings) -> Join {
    let engine = settings.engine();
    let replicas = settings.owners().replicas_of(engine);
    Join {
        protocol: PROTOCOL,
        schema: schema_fingerprint(),
        config: settings.config,
        engine,
        num_engines: settings.num_engines(),
        first_replica: replicas.start,
        num_replicas: replicas.end - replicas.start,
        facts: settings.facts.clone(),
    }
}
