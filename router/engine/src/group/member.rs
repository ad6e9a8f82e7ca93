//! An engine that dials: its votes go to the first one, the decision comes back.

use std::time::Duration;

use plait_core::{Decision, Micros, Vote};
use plait_proto::{ExitCode, Fail, Join, Message, PROTOCOL, schema_fingerprint};

use crate::clock::micros;

use super::end::GroupEnd;
use super::round::Round;
use super::settings::{GroupProblem, GroupSettings, Seat};
use super::socket::{Broken, Dialler, Strays, Unsent};
use super::wire::{decision_from_wire, vote_to_wire};

/// Messages that are taken in before the engine looks at anything else.
const MAX_MESSAGES_A_TURN: usize = 64;

/// Any engine of a group but the first.
pub struct Member {
    settings: GroupSettings,
    endpoint: String,
    dialler: Dialler,
    round: Round,
    /// What was cast last.
    votes: Vec<Vote>,
    /// What has become of the link.
    broken: Option<Broken>,
    /// When the decision on the votes that were cast is overdue.
    deadline: Option<Micros>,
    /// Tokens of the step before.
    num_tokens: u32,
    strays: Strays,
}

impl Member {
    /// Dials and asks to join.
    pub fn new(settings: GroupSettings) -> Result<Self, GroupProblem> {
        let Seat::Member { endpoint, keys, .. } = &settings.seat else {
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
            strays: Strays::default(),
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

    /// Where the engine stands in the round.
    pub fn round(&self) -> &Round {
        &self.round
    }

    /// What was dropped.
    pub fn strays(&self) -> Strays {
        self.strays
    }

    /// Casts the votes of this engine's replicas.
    pub fn cast(&mut self, votes: &[Vote], now: Micros) -> Result<(), GroupEnd> {
        self.round.cast(votes);
        self.votes.clear();
        self.votes.extend_from_slice(votes);
        self.deadline = Some(Micros(now.0 + micros(self.limit())));
        let sent = votes
            .iter()
            .try_for_each(|vote| self.dialler.send(&vote_to_wire(vote).into()));
        sent.map_err(|unsent| self.unsent(unsent))
    }

    /// Takes in what has come.
    pub fn hear(&mut self, now: Micros) -> Result<Option<Decision>, GroupEnd> {
        if self.round.is_over() {
            return Ok(None);
        }
        // What was said before the link broke comes first: it may say why.
        self.broken = self.broken.or_else(|| self.dialler.broken());
        for _ in 0..MAX_MESSAGES_A_TURN {
            let Some(received) = self.dialler.receive() else {
                return self.check_link(now).map(|()| None);
            };
            if let Some(decision) = self.take(received)? {
                return Ok(Some(decision));
            }
        }
        Ok(None)
    }

    /// When [`Member::hear`] must look again: at once where the link broke behind a decision.
    pub fn next_deadline(&self) -> Option<Micros> {
        let broken = self.broken.map(|_| Micros(0));
        broken.or(self.deadline).filter(|_| !self.round.is_over())
    }

    /// This engine cannot go on.
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
        // Who cannot be told sees the link close.
        let _told = self.dialler.send(&fail.into());
    }

    fn take(
        &mut self,
        received: Result<Message, plait_proto::Malformed>,
    ) -> Result<Option<Decision>, GroupEnd> {
        match received {
            Ok(Message::Decision(decision)) => return self.conclude(&decision),
            Ok(Message::Vote(call)) if call.step == self.round.step() => self.round.call(),
            Ok(Message::Vote(_)) => self.strays.num_late += 1,
            Ok(Message::Fail(fail)) => {
                return Err(self.end(GroupEnd::Told {
                    code: fail.code,
                    reason: fail.reason,
                }));
            }
            Ok(Message::Heartbeat(_)) => {}
            Ok(_) => self.strays.num_unasked += 1,
            Err(malformed) => {
                tracing::warn!("a malformed message of engine 0: {malformed}");
                self.strays.num_malformed += 1;
            }
        }
        Ok(None)
    }

    fn conclude(&mut self, decision: &plait_proto::Decision) -> Result<Option<Decision>, GroupEnd> {
        if decision.step != self.round.step() || !self.round.has_cast() {
            self.strays.num_late += 1;
            return Ok(None);
        }
        if let Some(why) = self.flaw(decision) {
            let step = decision.step;
            let why = why.to_owned();
            return Err(self.end(GroupEnd::InvalidDecision { step, why }));
        }
        let decision = decision_from_wire(decision);
        self.round.conclude(&decision);
        self.deadline = None;
        self.num_tokens = decision.pad_tokens;
        if decision.stop {
            self.dialler.stop_watching();
        }
        Ok(Some(decision))
    }

    /// Why this is no decision on what was cast.
    fn flaw(&self, decision: &plait_proto::Decision) -> Option<&'static str> {
        let num_replicas = self.settings.num_replicas();
        if decision.dummy_replicas.len() > num_replicas.div_ceil(8) as usize {
            return Some("it has a dummy for more replicas than there are");
        }
        let buckets = &self.settings.graph_buckets;
        let is_known = |bucket| buckets.contains(&bucket);
        if !decision.graph_bucket.is_none_or(is_known) {
            return Some("no graph has its size");
        }
        if decision.pad_tokens > self.settings.max_tokens {
            return Some("it pads to more tokens than a step may have");
        }
        let decision = decision_from_wire(decision);
        self.votes.iter().find_map(|vote| decision.misfit(vote))
    }

    /// Twice as long as the first engine waits, which knows better who is missing.
    fn limit(&self) -> Duration {
        let patience = &self.settings.patience;
        if self.round.step() == 1 {
            2 * patience.join
        } else {
            2 * (patience.vote + patience.vote_token * self.num_tokens)
        }
    }

    fn check_link(&mut self, now: Micros) -> Result<(), GroupEnd> {
        match self.broken {
            Some(Broken::Closed) => Err(self.unsent(Unsent::Gone)),
            Some(Broken::Unopened(handshake)) => {
                let endpoint = self.endpoint.clone();
                Err(self.end(GroupEnd::Unopened {
                    endpoint,
                    handshake,
                }))
            }
            None => self.check_deadline(now),
        }
    }

    fn check_deadline(&mut self, now: Micros) -> Result<(), GroupEnd> {
        if self.deadline.is_none_or(|deadline| deadline > now) {
            return Ok(());
        }
        let (step, waited) = (self.round.step(), self.limit());
        Err(self.end(GroupEnd::NoDecision { step, waited }))
    }

    fn unsent(&mut self, unsent: Unsent) -> GroupEnd {
        let (engine, replicas) = (0, self.settings.owners().replicas_of(0).collect());
        self.end(match unsent {
            Unsent::Gone => GroupEnd::Lost { engine, replicas },
            Unsent::Full => GroupEnd::Unread { engine, replicas },
        })
    }

    fn end(&mut self, end: GroupEnd) -> GroupEnd {
        self.close();
        end
    }

    /// Nothing more is said or heard.
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
    }
}
