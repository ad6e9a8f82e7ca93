//! Engine 0: it collects the votes, makes the decision and names missing replicas.

use std::collections::BTreeSet;
use std::fmt;

use plait_core::{Decision, GraphSize, Micros, Vote};
use plait_proto::{
    ExitCode, Fact, Fail, Join, Message, PROTOCOL, StoreReply, StoreRequest, schema_fingerprint,
};

use crate::clock::{micros, since};
use crate::store::KeyStore;

use super::failure::GroupFailure;
use super::round::Round;
use super::settings::{GroupProblem, GroupSettings, Owners, Role};
use super::socket::{Connection, Content, DropCounts, Listener, Received, Sender, Unsent};
use super::vote_collection::{VoteCollection, VoteError};
use super::wire::{decision_to_wire, vote_from_wire, vote_to_wire};

/// Messages handled in one pass of the event loop.
const MAX_MESSAGES_A_PASS: usize = 256;

/// Engine 0 of a group, which may be its only one.
pub struct Coordinator {
    settings: GroupSettings,
    /// None if the group has no other engine.
    listener: Option<Listener>,
    owners: Owners,
    votes: VoteCollection,
    round: Round,
    /// The round's decision, until the caller takes it.
    decision: Option<Decision>,
    started: Micros,
    /// When the round's first vote came.
    opened: Option<Micros>,
    /// Tokens of the last step.
    num_tokens: u32,
    /// Of the group's ranks.
    store: KeyStore,
    /// To ranks of this engine.
    store_replies: Vec<StoreReply>,
    drop_counts: DropCounts,
}

impl Coordinator {
    /// Listens if the group has other engines.
    pub fn new(settings: GroupSettings, now: Micros) -> Result<Self, GroupProblem> {
        let listener = match &settings.role {
            Role::Coordinator { endpoint, keys } => Some(Listener::bind(endpoint, keys.clone())?),
            Role::Alone | Role::Member { .. } => None,
        };
        Ok(Self {
            listener,
            owners: settings.owners(),
            votes: VoteCollection::new(settings.num_replicas()),
            round: Round::first(),
            decision: None,
            started: now,
            opened: None,
            num_tokens: 0,
            store: KeyStore::default(),
            store_replies: Vec::new(),
            drop_counts: DropCounts::default(),
            settings,
        })
    }

    /// Where the others dial.
    pub fn endpoint(&self) -> Option<&str> {
        self.listener.as_ref().map(Listener::endpoint)
    }

    /// What wakes the engine.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        let listener = self.listener.as_ref().filter(|_| !self.round.is_over());
        listener.map_or_else(Vec::new, Listener::poll_items)
    }

    /// See [`super::Exchange::must_cast`].
    pub fn must_cast(&self, votes: &[Vote]) -> bool {
        self.decision.is_none() && self.round.must_cast(votes)
    }

    /// See [`super::Exchange::is_called`].
    pub fn is_called(&self) -> bool {
        self.decision.is_none() && !self.round.is_dormant()
    }

    /// See [`super::Exchange::awaits_decision`].
    pub fn awaits_decision(&self) -> bool {
        self.decision.is_some() || self.round.has_cast()
    }

    /// Messages that were dropped.
    pub fn drop_counts(&self) -> DropCounts {
        self.drop_counts
    }

    /// A rank of an engine asks the store.
    pub fn ask_store(&mut self, engine: u32, request: StoreRequest) -> Result<(), GroupFailure> {
        for (engine, reply) in self.store.ask(engine, request) {
            if engine == 0 {
                self.store_replies.push(reply);
            } else {
                self.send(engine, &plait_proto::encode(&reply.into()))
                    .map_err(|unsent| self.fail_unsent(engine, unsent))?;
            }
        }
        Ok(())
    }

    /// See [`super::Exchange::take_store_replies`].
    pub fn take_store_replies(&mut self) -> Vec<StoreReply> {
        std::mem::take(&mut self.store_replies)
    }

    /// Casts the votes of this engine's own replicas.
    pub fn cast(&mut self, votes: &[Vote], now: Micros) -> Result<(), GroupFailure> {
        let was_quiet = self.round.is_dormant();
        self.round.cast(votes);
        self.opened.get_or_insert(now);
        for vote in votes {
            let counted = self.votes.add(*vote);
            counted.expect("the replica's only vote on the round's step");
        }
        if was_quiet {
            self.request_votes(&votes[0])?;
        }
        self.decide_if_complete()
    }

    /// See [`super::Exchange::receive`].
    pub fn receive(&mut self, now: Micros) -> Result<Option<Decision>, GroupFailure> {
        if !self.round.is_over() {
            self.take_messages(now)?;
        }
        if !self.round.is_over() {
            self.check_deadline(now)?;
        }
        Ok(self.decision.take())
    }

    /// See [`super::Exchange::next_deadline`].
    pub fn next_deadline(&self) -> Option<Micros> {
        if self.decision.is_some() {
            return Some(Micros(0));
        }
        if self.round.is_over() {
            return None;
        }
        self.deadline()
    }

    /// See [`super::Exchange::give_up`].
    pub fn give_up(&mut self, reason: &str) {
        if !self.round.is_over() {
            let _end = self.end(GroupFailure::PeerFailed {
                engine: 0,
                reason: reason.to_owned(),
            });
        }
    }

    fn take_messages(&mut self, now: Micros) -> Result<(), GroupFailure> {
        for _ in 0..MAX_MESSAGES_A_PASS {
            let Some(received) = self.listener.as_ref().and_then(Listener::receive) else {
                return Ok(());
            };
            self.take(received, now)?;
            if self.round.is_over() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn take(&mut self, received: Received, now: Micros) -> Result<(), GroupFailure> {
        let Received { sender, content } = received;
        match (content, sender) {
            (Content::Left, Sender::Unjoined(_)) => {}
            (Content::Left, Sender::Engine(engine)) => {
                return Err(self.fail_unsent(engine, Unsent::Gone));
            }
            (Content::Message(Message::Join(join)), Sender::Unjoined(connection)) => {
                return self.join(connection, &join);
            }
            (_, Sender::Unjoined(_)) => self.drop_counts.num_unknown_peers += 1,
            (Content::Message(message), Sender::Engine(engine)) => {
                return self.take_message(engine, message, now);
            }
            (Content::Malformed(malformed), Sender::Engine(engine)) => {
                tracing::warn!(engine, "a malformed message: {malformed}");
                self.drop_counts.num_malformed += 1;
            }
        }
        Ok(())
    }

    fn take_message(
        &mut self,
        engine: u32,
        message: Message,
        now: Micros,
    ) -> Result<(), GroupFailure> {
        match message {
            Message::Vote(vote) => match vote_from_wire(&vote) {
                Some(cast) => {
                    self.add_graphs(engine, &vote);
                    return self.count(engine, cast, now);
                }
                None => self.drop_invalid(engine, &vote),
            },
            Message::Fail(fail) => {
                return Err(self.end(GroupFailure::PeerFailed {
                    engine,
                    reason: fail.reason,
                }));
            }
            Message::StoreRequest(request) => return self.ask_store(engine, request),
            Message::Join(_) => self.drop_counts.num_duplicate += 1,
            _ => self.drop_counts.num_unexpected += 1,
        }
        Ok(())
    }

    /// Takes the captured sizes that an engine tells with its first votes.
    fn add_graphs(&self, engine: u32, vote: &plait_proto::Vote) {
        if !self.is_first_round() || vote.step != 1 {
            return;
        }
        let settings = &self.settings;
        let missing = settings
            .graphs
            .add_engine(&vote.graphs, settings.max_tokens);
        if !missing.is_empty() {
            let tokens: Vec<u32> = missing.iter().map(GraphSize::num_tokens).collect();
            tracing::warn!(
                engine,
                "engine {engine} has not captured the sizes of {tokens:?} tokens, so that no engine replays them; \
                 give all engines the same free memory"
            );
        }
    }

    fn drop_invalid(&mut self, engine: u32, vote: &impl fmt::Debug) {
        tracing::warn!(engine, "an invalid vote: {vote:?}");
        self.drop_counts.num_malformed += 1;
    }

    fn is_in(&self, engine: u32) -> bool {
        let listener = self.listener.as_ref();
        listener.is_some_and(|listener| listener.is_registered(engine))
    }

    /// Registers an engine, or refuses it. Two engines with one number end the group.
    fn join(&mut self, connection: Connection, join: &Join) -> Result<(), GroupFailure> {
        let engine = join.engine;
        let mismatch = self.find_mismatch(join);
        if let Some(reason) = mismatch.or_else(|| other_key(engine, connection.key_of)) {
            self.drop_counts.num_unknown_peers += 1;
            tracing::warn!(engine, "an engine was rejected: {reason}");
            self.reject_peer(&connection, engine, &reason);
            return Ok(());
        }
        if self.is_in(engine) {
            let replicas = self.owners.replicas_of(engine).collect();
            let end = GroupFailure::DuplicateEngine { engine, replicas };
            self.reject_peer(&connection, engine, &end.to_string());
            return Err(self.end(end));
        }
        if let Some(listener) = &mut self.listener {
            listener.register(engine, connection);
        }
        Ok(())
    }

    fn reject_peer(&self, connection: &Connection, engine: u32, reason: &str) {
        let fail = Fail {
            rank: engine,
            code: ExitCode::Settings,
            reason: reason.to_owned(),
        };
        if let Some(listener) = &self.listener {
            // A peer that cannot be reached is gone.
            let _told = listener.send_to(&connection.peer, &plait_proto::encode(&fail.into()));
        }
    }

    /// How an engine differs from what this group expects.
    fn find_mismatch(&self, join: &Join) -> Option<String> {
        let (engine, num_engines) = (join.engine, self.settings.num_engines());
        if join.protocol != PROTOCOL {
            return Some(format!(
                "engine {engine} speaks protocol {}, engine 0 {PROTOCOL}; install both from one release",
                join.protocol
            ));
        }
        if join.schema != schema_fingerprint() {
            return Some(format!(
                "the message schema of engine {engine} is not that of engine 0; install both from one release"
            ));
        }
        if join.num_engines != num_engines || engine >= num_engines || engine == 0 {
            return Some(format!(
                "an engine says that it is engine {engine} of {}; the group has {num_engines}, and engine 0 is this one",
                join.num_engines
            ));
        }
        let replicas = self.owners.replicas_of(engine);
        if join.first_replica != replicas.start || join.num_replicas as usize != replicas.len() {
            return Some(format!(
                "engine {engine} has {} replicas from number {} on; engine 0 expects {replicas:?}",
                join.num_replicas, join.first_replica
            ));
        }
        (join.config != self.settings.config).then(|| {
            format!(
                "the configuration of engine {engine} is not that of engine 0{}; start all engines of a group with the same model and settings",
                describe_differences(engine, &self.settings.facts, &join.facts)
            )
        })
    }

    fn count(&mut self, engine: u32, vote: Vote, now: Micros) -> Result<(), GroupFailure> {
        let is_own = self.owners.replicas_of(engine).contains(&vote.replica);
        let counted = if !is_own {
            Err(VoteError::Unexpected)
        } else if vote.num_tokens > self.settings.max_tokens {
            Err(VoteError::Invalid)
        } else {
            self.votes.add(vote)
        };
        match counted {
            Ok(()) => {
                self.opened.get_or_insert(now);
                if self.round.is_dormant() {
                    self.round.call();
                    self.request_votes(&vote)?;
                }
                return self.decide_if_complete();
            }
            Err(VoteError::Late) => self.drop_counts.num_late += 1,
            Err(VoteError::Duplicate) => self.drop_counts.num_duplicate += 1,
            Err(VoteError::Unexpected) => self.drop_counts.num_unexpected += 1,
            Err(VoteError::Invalid) => self.drop_invalid(engine, &vote),
        }
        Ok(())
    }

    /// Passes the first vote of a dormant group on to all engines but its own.
    fn request_votes(&mut self, vote: &Vote) -> Result<(), GroupFailure> {
        let caller = self.owners.engine_of(vote.replica);
        let call = plait_proto::encode(&vote_to_wire(vote).into());
        let others = (1..self.settings.num_engines()).filter(|engine| *engine != caller);
        self.send_all(others, &call)
    }

    fn decide_if_complete(&mut self) -> Result<(), GroupFailure> {
        let Some(decision) = self.votes.close(&self.settings.graphs.sizes()) else {
            return Ok(());
        };
        self.round.conclude(&decision);
        self.opened = None;
        self.num_tokens = decision.pad_tokens;
        let told = plait_proto::encode(&decision_to_wire(&decision).into());
        self.decision = Some(decision);
        self.send_all(1..self.settings.num_engines(), &told)
    }

    fn send_all(
        &mut self,
        engines: impl Iterator<Item = u32>,
        frames: &[Vec<u8>],
    ) -> Result<(), GroupFailure> {
        for engine in engines {
            self.send(engine, frames)
                .map_err(|unsent| self.fail_unsent(engine, unsent))?;
        }
        Ok(())
    }

    fn send(&self, engine: u32, frames: &[Vec<u8>]) -> Result<(), Unsent> {
        let listener = self.listener.as_ref();
        listener.map_or(Ok(()), |listener| listener.send(engine, frames))
    }

    /// The other engines that have joined.
    fn other_engines(&self) -> impl Iterator<Item = u32> {
        (1..self.settings.num_engines()).filter(|engine| self.is_in(*engine))
    }

    fn deadline(&self) -> Option<Micros> {
        self.listener.as_ref()?;
        let timeouts = &self.settings.timeouts;
        if self.is_first_round() {
            return Some(Micros(self.started.0 + micros(timeouts.join)));
        }
        let limit = timeouts.of_vote(self.num_tokens);
        Some(Micros(self.opened?.0 + micros(limit)))
    }

    fn is_first_round(&self) -> bool {
        self.round.step() == 1
    }

    /// When the wait for its votes began.
    fn round_began(&self) -> Micros {
        match self.opened {
            Some(opened) if !self.is_first_round() => opened,
            _ => self.started,
        }
    }

    fn check_deadline(&mut self, now: Micros) -> Result<(), GroupFailure> {
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return Ok(());
        }
        let absent: Vec<u32> = (1..self.settings.num_engines())
            .filter(|engine| !self.is_in(*engine))
            .collect();
        if !absent.is_empty() {
            return Err(self.end(GroupFailure::NeverJoined {
                engines: absent,
                waited: since(self.started, now),
            }));
        }
        let replicas = self.votes.missing();
        let mut engines: Vec<u32> = replicas
            .iter()
            .map(|replica| self.owners.engine_of(*replica))
            .collect();
        engines.dedup();
        Err(self.end(GroupFailure::MissingVotes {
            replicas,
            engines,
            step: self.round.step(),
            waited: since(self.round_began(), now),
        }))
    }

    fn fail_unsent(&mut self, engine: u32, unsent: Unsent) -> GroupFailure {
        let replicas = self.owners.replicas_of(engine).collect();
        self.end(match unsent {
            Unsent::Gone => GroupFailure::Disconnected { engine, replicas },
            Unsent::Full => GroupFailure::NotReading { engine, replicas },
        })
    }

    /// Ends the round, and sends the reason to the others.
    fn end(&mut self, end: GroupFailure) -> GroupFailure {
        self.round.end();
        self.decision = None;
        let (code, reason) = (end.code(), end.to_string());
        for engine in self.other_engines() {
            let fail = Fail {
                rank: engine,
                code,
                reason: reason.clone(),
            };
            // A peer that cannot be reached is gone.
            let _told = self.send(engine, &plait_proto::encode(&fail.into()));
        }
        end
    }
}

/// `: --dtype is float32, and bfloat16 on engine 0`; each fact that differs, by name.
fn describe_differences(engine: u32, first: &[Fact], other: &[Fact]) -> String {
    let value = |facts: &[Fact], name: &str| {
        let found = facts.iter().find(|fact| fact.name == name);
        found.map_or_else(|| "unknown".to_owned(), |fact| fact.value.clone())
    };
    let names: BTreeSet<&str> = first
        .iter()
        .chain(other)
        .map(|fact| fact.name.as_str())
        .collect();
    let different: Vec<String> = names
        .into_iter()
        .map(|name| (name, value(first, name), value(other, name)))
        .filter(|(_, of_first, of_other)| of_first != of_other)
        .map(|(name, of_first, of_other)| {
            format!("{name}: {of_first} on engine 0, {of_other} on engine {engine}")
        })
        .collect();
    match different.len() {
        0 => String::new(),
        1 => format!(" in one thing: {}", different[0]),
        number => format!(" in {number} things: {}", different.join("; ")),
    }
}

/// Why the key of a connection is not the engine's own; None if it is, or if there are no keys.
fn other_key(engine: u32, key_of: Option<u32>) -> Option<String> {
    let owner = key_of.filter(|owner| *owner != engine)?;
    Some(format!(
        "engine {engine} came with the key of engine {owner}: start it with its own, or put `allowed` of engine 0 in \
         the order of the engines, the key of engine 1 first"
    ))
}
