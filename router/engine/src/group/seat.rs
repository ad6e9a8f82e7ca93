//! A replica's place in its group. Replicas of one engine vote by function call.
//!
//! Each driver thread has a seat; the board is what they share. The first vote of a round calls the other seats.
//! With the last one the decision is made at once, or, in a group of several engines, the first seat casts the
//! votes of all on its exchange.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plait_core::{Decision, GraphSize, Micros, Vote, decide};
use plait_proto::{ExitCode, StoreReply, StoreRequest};

use super::Exchange;
use super::failure::GroupFailure;
use super::graphs::CapturedGraphs;
use super::round::Round;
use super::settings::{GroupProblem, GroupSettings, Role};
use super::store_desk::StoreDesk;
use crate::wakeup::Wakeup;

/// One replica's end; used by one thread.
pub struct Seat {
    /// Among the seats of the engine.
    place: usize,
    /// The replica's number in the group.
    replica: u32,
    round: Round,
    board: Arc<Board>,
    /// The first seat's, in a group of several engines.
    exchange: Option<Exchange>,
    /// To ranks of this replica.
    store_replies: Vec<StoreReply>,
}

/// What the seats of an engine share.
struct Board {
    state: Mutex<State>,
    /// Of each seat's thread.
    wakeups: Vec<Arc<Wakeup>>,
    /// The captured graphs, if the seats make the decision; None if engine 0 makes it.
    graphs: Option<CapturedGraphs>,
}

struct State {
    /// On the current step.
    votes: Vec<Option<Vote>>,
    /// The last step on which votes were asked for.
    called: u64,
    /// The last one.
    decision: Option<Decision>,
    failure: Option<GroupFailure>,
    desk: StoreDesk,
}

impl State {
    /// Asks for votes on a step; false if somebody has done so.
    fn call(&mut self, step: u64) -> bool {
        let is_new = self.called < step;
        self.called = self.called.max(step);
        is_new
    }

    /// The votes of all seats, once none is missing; they are gone then.
    fn take_votes(&mut self) -> Option<Vec<Vote>> {
        if self.votes.iter().any(Option::is_none) {
            return None;
        }
        Some(self.votes.iter_mut().filter_map(Option::take).collect())
    }
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_all_but(&self, place: usize) {
        let others = self.wakeups.iter().enumerate();
        others
            .filter(|(other, _)| *other != place)
            .for_each(|(_, wakeup)| wakeup.signal());
    }
}

impl Seat {
    /// A seat for each replica of this engine, whose threads have these wakeups. Listens or dials if the group has
    /// other engines; does not wait for an answer.
    pub fn of_engine(
        settings: &GroupSettings,
        wakeups: Vec<Arc<Wakeup>>,
        now: Micros,
    ) -> Result<Vec<Self>, GroupProblem> {
        settings.check()?;
        let is_alone = matches!(settings.role, Role::Alone);
        let mut exchange = match is_alone {
            true => None,
            false => Some(Exchange::new(settings.clone(), now)?),
        };
        let replicas = settings.owners().replicas_of(settings.engine());
        assert_eq!(replicas.len(), wakeups.len(), "a thread for each replica");
        let board = Arc::new(Board {
            state: Mutex::new(State {
                votes: vec![None; wakeups.len()],
                called: 0,
                decision: None,
                failure: None,
                desk: StoreDesk::new(wakeups.len(), is_alone),
            }),
            wakeups,
            graphs: is_alone.then(|| settings.graphs.clone()),
        });
        let seats = replicas.enumerate().map(|(place, replica)| Self {
            place,
            replica,
            round: Round::first(),
            board: board.clone(),
            exchange: exchange.take(),
            store_replies: Vec::new(),
        });
        Ok(seats.collect())
    }

    /// The replica's number in the group.
    pub fn replica(&self) -> u32 {
        self.replica
    }

    /// What wakes this seat's thread besides its wakeup.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        let exchange = self.exchange.as_ref();
        exchange.map_or_else(Vec::new, Exchange::poll_items)
    }

    /// When [`Seat::receive`] must be called though nothing has come.
    pub fn next_deadline(&self) -> Option<Micros> {
        if self.decision_of(&self.board.lock()).is_some() {
            return Some(Micros(0));
        }
        self.exchange.as_ref().and_then(Exchange::next_deadline)
    }

    /// The vote is cast and the decision has not come.
    pub fn awaits_decision(&self) -> bool {
        self.round.has_cast()
    }

    /// Whether this vote must be cast now: the group waits for it, or has to hear of it.
    pub fn must_cast(&self, vote: Vote) -> bool {
        self.round.must_cast(&[vote])
    }

    /// Casts the replica's vote on the next step; once a round.
    pub fn cast(&mut self, vote: Vote, now: Micros) -> Result<(), GroupFailure> {
        self.round.cast(&[vote]);
        let mut state = self.board.lock();
        state.votes[self.place] = Some(vote);
        let is_first = state.call(self.round.step());
        let is_last = state.votes.iter().all(Option::is_some);
        if !is_last {
            drop(state);
            if is_first {
                self.board.wake_all_but(self.place);
            }
            return Ok(());
        }
        if let Some(graphs) = &self.board.graphs {
            let votes = state.take_votes().unwrap_or_default();
            drop(state);
            self.publish(decide_alone(&votes, &graphs.sizes()));
            return Ok(());
        }
        drop(state);
        match self.exchange {
            Some(_) => self.cast_on_exchange(now),
            None => {
                self.board.wakeups[0].signal();
                Ok(())
            }
        }
    }

    /// Asks the group's store for a rank of this replica.
    pub fn ask_store(&mut self, request: StoreRequest) {
        let mut state = self.board.lock();
        state.desk.ask(self.place, request);
        self.store_replies
            .append(&mut state.desk.take_replies(self.place));
        drop(state);
        // The request goes on to engine 0, or its key is what another seat's rank waits for.
        self.board.wake_all_but(self.place);
    }

    /// What the store has answered to ranks of this replica.
    pub fn take_store_replies(&mut self) -> Vec<StoreReply> {
        std::mem::take(&mut self.store_replies)
    }

    /// Handles what has come, without blocking; returns the decision if it is there. After an error nothing more
    /// comes.
    pub fn receive(&mut self, now: Micros) -> Result<Option<Decision>, GroupFailure> {
        if self.exchange.is_some() && !self.round.is_over() {
            self.cast_on_exchange(now)?;
            self.pass_store_requests_on()?;
            self.receive_from_engines(now)?;
        }
        let mut state = self.board.lock();
        self.store_replies
            .append(&mut state.desk.take_replies(self.place));
        if let Some(failure) = state.failure.clone().filter(|_| !self.round.is_over()) {
            drop(state);
            return Err(self.fail(failure));
        }
        let is_called = state.called >= self.round.step();
        let decision = self.decision_of(&state).cloned();
        drop(state);
        if is_called {
            self.round.call();
        }
        if let Some(decision) = &decision {
            self.round.conclude(decision);
        }
        Ok(decision)
    }

    /// Ends the group: the other replicas get the reason.
    pub fn give_up(&mut self, code: ExitCode, reason: &str) {
        if self.round.is_over() {
            return;
        }
        if let Some(exchange) = &mut self.exchange {
            exchange.give_up(code, reason);
        }
        self.fail(GroupFailure::ReplicaFailed {
            replica: self.replica,
            code,
            reason: reason.to_owned(),
        });
    }

    fn decision_of<'a>(&self, state: &'a State) -> Option<&'a Decision> {
        let decision = state.decision.as_ref();
        decision.filter(|it| self.round.has_cast() && it.step.0 == self.round.step())
    }

    /// Casts the votes of all seats, if they are there.
    fn cast_on_exchange(&mut self, now: Micros) -> Result<(), GroupFailure> {
        let votes = self.board.lock().take_votes();
        let (Some(votes), Some(exchange)) = (votes, &mut self.exchange) else {
            return Ok(());
        };
        exchange.cast(&votes, now).map_err(|end| self.fail(end))
    }

    fn pass_store_requests_on(&mut self) -> Result<(), GroupFailure> {
        let requests = self.board.lock().desk.take_requests();
        let asked = match &mut self.exchange {
            Some(exchange) => requests
                .into_iter()
                .try_for_each(|request| exchange.ask_store(request)),
            None => Ok(()),
        };
        asked.map_err(|end| self.fail(end))
    }

    fn receive_from_engines(&mut self, now: Micros) -> Result<(), GroupFailure> {
        let Some(exchange) = &mut self.exchange else {
            return Ok(());
        };
        let received = exchange.receive(now);
        let replies = exchange.take_store_replies();
        if !replies.is_empty() {
            self.board.lock().desk.put_replies(replies.into_iter());
            self.board.wake_all_but(self.place);
        }
        match received {
            Ok(Some(decision)) => self.publish(decision),
            Ok(None) if self.round.is_dormant() && exchange.is_called() => {
                if self.board.lock().call(self.round.step()) {
                    self.board.wake_all_but(self.place);
                }
            }
            Ok(None) => {}
            Err(end) => return Err(self.fail(end)),
        }
        Ok(())
    }

    fn publish(&self, decision: Decision) {
        self.board.lock().decision = Some(decision);
        self.board.wake_all_but(self.place);
    }

    /// Tells the other seats and, unless they know, the other engines.
    fn fail(&mut self, failure: GroupFailure) -> GroupFailure {
        self.round.end();
        if let Some(exchange) = &mut self.exchange {
            exchange.give_up(failure.code(), &failure.to_string());
        }
        self.board.lock().failure.get_or_insert(failure.clone());
        self.board.wake_all_but(self.place);
        failure
    }
}

/// The decision of a group whose replicas are all here.
fn decide_alone(votes: &[Vote], graphs: &[GraphSize]) -> Decision {
    let num_replicas = u32::try_from(votes.len()).expect("replicas are a u32");
    let decision = decide(votes, num_replicas, graphs);
    decision.expect("each seat cast one vote on the round's step")
}

#[cfg(test)]
mod tests {
    use plait_core::{Mode, StepId};

    use super::*;
    use crate::group::GroupTimeouts;

    fn seats(num: usize) -> (Vec<Seat>, Vec<Arc<Wakeup>>) {
        let wakeups: Vec<_> = (0..num).map(|_| Arc::new(Wakeup::new().unwrap())).collect();
        let settings = GroupSettings {
            role: Role::Alone,
            num_replicas: vec![u32::try_from(num).unwrap()],
            config: [0; 16],
            facts: Vec::new(),
            graphs: vec![GraphSize::of_decode_rows(4)].into(),
            max_tokens: 64,
            timeouts: GroupTimeouts::default(),
        };
        let seats = Seat::of_engine(&settings, wakeups.clone(), Micros(0)).unwrap();
        (seats, wakeups)
    }

    fn vote(replica: u32, step: u64, num_tokens: u32) -> Vote {
        Vote {
            replica,
            step: StepId(step),
            num_prefill_tokens: 0,
            num_prefill_rows: 0,
            num_context_tokens: 0,
            num_decode_rows: num_tokens,
            num_tokens,
            can_graph: true,
            idle: num_tokens == 0,
            draining: false,
        }
    }

    fn receive(seat: &mut Seat) -> Option<Decision> {
        seat.receive(Micros(0)).unwrap()
    }

    /// All seats vote, and take the decision.
    fn round(seats: &mut [Seat], step: u64, num_tokens: &[u32]) -> Vec<Decision> {
        for (seat, num) in seats.iter_mut().zip(num_tokens) {
            seat.cast(vote(seat.replica(), step, *num), Micros(0))
                .unwrap();
        }
        seats
            .iter_mut()
            .map(|seat| receive(seat).unwrap())
            .collect()
    }

    fn is_readable(wakeup: &Wakeup) -> bool {
        let mut items = [zmq::PollItem::from_fd(wakeup.fd(), zmq::POLLIN)];
        zmq::poll(&mut items, 0).unwrap() == 1
    }

    #[test]
    fn the_last_vote_decides_and_all_seats_get_the_same() {
        let (mut seats, wakeups) = seats(3);
        assert!(
            seats
                .iter()
                .all(|seat| seat.must_cast(vote(seat.replica(), 1, 0)))
        );
        seats[2].cast(vote(2, 1, 3), Micros(0)).unwrap();
        seats[0].cast(vote(0, 1, 0), Micros(0)).unwrap();
        assert_eq!(receive(&mut seats[0]), None);
        seats[1].cast(vote(1, 1, 1), Micros(0)).unwrap();
        assert!(is_readable(&wakeups[0]) && is_readable(&wakeups[2]));
        assert_eq!(
            seats[1].next_deadline(),
            Some(Micros(0)),
            "the voter itself is not woken"
        );
        let taken: Vec<Decision> = seats
            .iter_mut()
            .map(|seat| receive(seat).unwrap())
            .collect();
        assert_eq!(
            (taken[0].mode, taken[0].graph_bucket),
            (Mode::Decode, Some(4))
        );
        assert_eq!(taken[0].dummy_replicas, [0]);
        assert!(taken.iter().all(|it| *it == taken[0]));
        assert_eq!(receive(&mut seats[1]), None, "once");
    }

    #[test]
    fn a_dormant_group_wakes_with_the_first_vote() {
        let (mut seats, wakeups) = seats(2);
        assert_eq!(round(&mut seats, 1, &[0, 0])[0].mode, Mode::Idle);
        wakeups.iter().for_each(|wakeup| wakeup.clear());
        assert!(!seats[1].must_cast(vote(1, 2, 0)), "nobody asks");
        assert!(seats[0].must_cast(vote(0, 2, 5)));
        seats[0].cast(vote(0, 2, 5), Micros(0)).unwrap();
        assert!(is_readable(&wakeups[1]) && !is_readable(&wakeups[0]));
        assert_eq!(receive(&mut seats[1]), None);
        assert!(seats[1].must_cast(vote(1, 2, 0)));
        seats[1].cast(vote(1, 2, 0), Micros(0)).unwrap();
        assert_eq!(receive(&mut seats[0]).unwrap().mode, Mode::Decode);
    }

    #[test]
    fn a_replica_that_gives_up_ends_the_others_with_its_reason() {
        let (mut seats, wakeups) = seats(2);
        seats[1].give_up(ExitCode::Hardware, "out of memory");
        assert!(is_readable(&wakeups[0]));
        let end = seats[0].receive(Micros(0)).unwrap_err();
        assert_eq!(end.to_string(), "replica 1 gave up: out of memory");
        assert_eq!(end.code(), ExitCode::Hardware);
        assert_eq!(seats[0].receive(Micros(0)), Ok(None), "it is told once");
    }

    #[test]
    fn sixty_four_replicas_on_threads_take_the_same_decisions() {
        const NUM_STEPS: u64 = 200;
        let (seats, wakeups) = seats(64);
        let threads: Vec<_> = seats
            .into_iter()
            .zip(wakeups)
            .map(|(seat, wakeup)| std::thread::spawn(move || run(seat, &wakeup, NUM_STEPS)))
            .collect();
        let decisions: Vec<Vec<Decision>> =
            threads.into_iter().map(|it| it.join().unwrap()).collect();
        assert!(decisions.iter().all(|of_seat| *of_seat == decisions[0]));
        let expected = (1..=NUM_STEPS).map(|step| u32::try_from(step % 7 + 63).unwrap());
        assert!(decisions[0].iter().map(|it| it.pad_tokens).eq(expected));
    }

    /// Votes on every step as soon as it may, and waits for the decision.
    fn run(mut seat: Seat, wakeup: &Wakeup, num_steps: u64) -> Vec<Decision> {
        let mut decisions = Vec::new();
        for step in 1..=num_steps {
            let num_tokens = u32::try_from(step % 7).unwrap() + seat.replica();
            seat.cast(vote(seat.replica(), step, num_tokens), Micros(0))
                .unwrap();
            loop {
                if let Some(decision) = receive(&mut seat) {
                    decisions.push(decision);
                    break;
                }
                let mut items = [zmq::PollItem::from_fd(wakeup.fd(), zmq::POLLIN)];
                assert_eq!(
                    zmq::poll(&mut items, 60_000).unwrap(),
                    1,
                    "no decision on step {step}"
                );
                wakeup.clear();
            }
        }
        decisions
    }
}
