//! An engine that dials: its votes go to the first one, the verdict comes back.

use std::time::Duration;

use plait_core::{Micros, Verdict, Vote};
use plait_proto::{ExitCode, Fail, Join, Message, PROTOCOL, schema_fingerprint};

use crate::clock::micros;

use super::end::GroupEnd;
use super::round::Round;
use super::settings::{GroupProblem, GroupSettings, Seat};
use super::socket::{Broken, Dialler, Strays};
use super::wire::{verdict_from_wire, vote_to_wire};

/// Any engine of a group but the first.
pub struct Member {
    settings: GroupSettings,
    has_keys: bool,
    dialler: Dialler,
    round: Round,
    /// What has become of the link.
    broken: Option<Broken>,
    /// When the verdict on the votes that were cast is overdue.
    deadline: Option<Micros>,
    /// Tokens of the step before.
    num_tokens: u32,
    strays: Strays,
}

impl Member {
    /// Dials and asks to join.
    pub fn new(settings: GroupSettings) -> Result<Self, GroupProblem> {
        let Seat::Member {
            engine,
            endpoint,
            keys,
        } = &settings.seat
        else {
            unreachable!("the first engine listens")
        };
        let dialler = Dialler::dial(*engine, endpoint, keys.as_ref())?;
        let asked = dialler.send(&join(&settings).into());
        asked.expect("nothing waits in a new socket");
        Ok(Self {
            has_keys: keys.is_some(),
            dialler,
            round: Round::first(),
            broken: None,
            deadline: None,
            num_tokens: 0,
            strays: Strays::default(),
            settings,
        })
    }

    /// What wakes the engine.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
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
        self.deadline = Some(Micros(now.0 + micros(self.limit())));
        let sent = votes
            .iter()
            .try_for_each(|vote| self.dialler.send(&vote_to_wire(vote).into()));
        sent.map_err(|_stopped_reading| self.lost())
    }

    /// Takes in what has come.
    pub fn hear(&mut self, now: Micros) -> Result<Option<Verdict>, GroupEnd> {
        if self.round.is_over() {
            return Ok(None);
        }
        // What was said before the link broke comes first: it may say why.
        self.broken = self.broken.max(self.dialler.broken());
        while let Some(received) = self.dialler.receive() {
            if let Some(verdict) = self.take(received)? {
                return Ok(Some(verdict));
            }
        }
        match self.broken {
            Some(Broken::Keys) => Err(self.end(GroupEnd::Keys)),
            Some(Broken::Unopened) if self.has_keys => Err(self.end(GroupEnd::Keys)),
            Some(_) => Err(self.lost()),
            None => self.check_deadline(now).map(|()| None),
        }
    }

    /// When [`Member::hear`] must look again.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.deadline.filter(|_| !self.round.is_over())
    }

    /// This engine cannot go on.
    pub fn give_up(&mut self, code: ExitCode, reason: &str) {
        if self.round.is_over() {
            return;
        }
        self.round.end();
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
    ) -> Result<Option<Verdict>, GroupEnd> {
        match received {
            Ok(Message::Verdict(verdict)) => return Ok(self.conclude(&verdict)),
            Ok(Message::Vote(call)) if call.step == self.round.step() => self.round.call(),
            Ok(Message::Vote(_)) => self.strays.num_late += 1,
            Ok(Message::Fail(fail)) => {
                return Err(self.end(GroupEnd::Told {
                    code: fail.code,
                    reason: fail.reason,
                }));
            }
            Ok(Message::Beat(_)) => {}
            Ok(_) => self.strays.num_unasked += 1,
            Err(malformed) => {
                tracing::warn!("a malformed message of engine 0: {malformed}");
                self.strays.num_malformed += 1;
            }
        }
        Ok(None)
    }

    fn conclude(&mut self, verdict: &plait_proto::Verdict) -> Option<Verdict> {
        if verdict.step != self.round.step() || !self.round.has_cast() {
            self.strays.num_late += 1;
            return None;
        }
        let verdict = verdict_from_wire(verdict);
        self.round.conclude(&verdict);
        self.deadline = None;
        self.num_tokens = verdict.pad_tokens;
        Some(verdict)
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

    fn check_deadline(&mut self, now: Micros) -> Result<(), GroupEnd> {
        if self.deadline.is_none_or(|deadline| deadline > now) {
            return Ok(());
        }
        let (step, waited) = (self.round.step(), self.limit());
        Err(self.end(GroupEnd::NoVerdict { step, waited }))
    }

    fn lost(&mut self) -> GroupEnd {
        let replicas = self.settings.replicas_of(0).collect();
        self.end(GroupEnd::Lost {
            engine: 0,
            replicas,
        })
    }

    fn end(&mut self, end: GroupEnd) -> GroupEnd {
        self.round.end();
        end
    }
}

fn join(settings: &GroupSettings) -> Join {
    let engine = settings.engine();
    let replicas = settings.replicas_of(engine);
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
