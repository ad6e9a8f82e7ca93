//! Engines of one group, each with its schedulers, devices and exchange on a thread of its own.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use plait_core::{
    Decision, GraphSize, HashSeed, Micros, Mode, PageSettings, Plan, RuntimeSettings,
    SchedulerSettings, Settings, Vote,
};
use plait_engine::group::{DropCounts, Exchange, GroupFailure, GroupSettings, GroupTimeouts, Role};
use plait_proto::ExitCode;
use tempfile::TempDir;

use crate::harness::{Harness, Spec};

/// Longer than anything here takes, on a machine that is busy with other things.
pub const FOREVER: Duration = Duration::from_secs(60);
/// Sizes for which every replica here has a graph.
pub const GRAPHS: [u32; 3] = [1, 4, 8];
pub const MAX_TOKENS: u32 = 1024;
pub const CONFIG: [u8; 16] = [7; 16];
/// Plans that may be in flight.
const CREDIT: usize = 2;

/// Large enough for everything that these tests submit.
pub fn settings() -> Settings {
    Settings {
        scheduler: SchedulerSettings {
            max_batch_tokens: Some(24),
            max_seqs: Some(6),
            long_prefill_token_threshold: Some(16),
            prefill_starvation_steps: 4,
            max_queue: 256,
            max_queue_tokens: 1 << 20,
            ..SchedulerSettings::default()
        },
        pages: PageSettings {
            page_size: 4,
            prefix_cache: false,
            watermark: Some(0),
            ..PageSettings::default()
        },
        runtime: RuntimeSettings {
            max_rows: Some(6),
            ..RuntimeSettings::new(24, 80, HashSeed([1, 2]))
        },
    }
}

/// No wait times out, unless a test is about that.
pub fn long_timeouts() -> GroupTimeouts {
    GroupTimeouts {
        join: FOREVER,
        vote: FOREVER,
        vote_token: Duration::ZERO,
    }
}

/// A directory for a socket.
pub fn socket_directory() -> (TempDir, String) {
    let owners_only = std::fs::Permissions::from_mode(0o700);
    let directory = tempfile::Builder::new().permissions(owners_only).tempdir();
    let directory = directory.unwrap();
    let endpoint = format!("ipc://{}", directory.path().join("group").display());
    (directory, endpoint)
}

pub fn group_settings(engine: u32, endpoint: &str, num_replicas: &[u32]) -> GroupSettings {
    let endpoint = endpoint.to_owned();
    let keys = None;
    let role = match (engine, num_replicas.len()) {
        (_, 1) => Role::Alone,
        (0, _) => Role::Coordinator { endpoint, keys },
        _ => Role::Member {
            engine,
            endpoint,
            keys: None,
        },
    };
    GroupSettings {
        role,
        num_replicas: num_replicas.to_vec(),
        config: CONFIG,
        facts: Vec::new(),
        graphs: GRAPHS.map(GraphSize::of_decode_rows).to_vec().into(),
        max_tokens: MAX_TOKENS,
        timeouts: long_timeouts(),
    }
}

/// A test's order to an engine.
pub enum Order {
    /// A request for one of its replicas.
    Submit(usize, Spec),
    /// No new requests.
    Drain,
    /// Neither votes nor listens from now on.
    Stall,
    /// Gives up with a reason, and ends.
    GiveUp(&'static str),
    /// Ends without a message.
    Vanish,
}

/// What an engine has done.
#[derive(Clone, Default)]
pub struct Log {
    pub decisions: Vec<Decision>,
    /// Submissions that were refused.
    pub num_refused: usize,
    /// Tokens that its devices computed, and dummy rows that they ran.
    pub num_tokens: u64,
    pub num_dummies: usize,
    /// Times that it was woken.
    pub num_wakes: usize,
    pub drop_counts: DropCounts,
    pub end: Option<GroupFailure>,
    pub is_idle: bool,
    pub is_stalled: bool,
    /// It has voted at least once.
    pub has_voted: bool,
    /// Its thread has ended.
    pub is_over: bool,
}

/// A log that tests wait on.
#[derive(Default)]
pub struct SharedLog {
    log: Mutex<Log>,
    changed: Condvar,
}

impl SharedLog {
    fn update(&self, change: impl FnOnce(&mut Log)) {
        change(&mut self.log.lock().unwrap());
        self.changed.notify_all();
    }

    /// Waits until `is_so`; false if it was not within `limit`.
    fn wait(&self, limit: Duration, is_so: impl Fn(&Log) -> bool) -> bool {
        let log = self.log.lock().unwrap();
        let (_log, timeout) = self
            .changed
            .wait_timeout_while(log, limit, |log| !is_so(log))
            .unwrap();
        !timeout.timed_out()
    }
}

/// Notes that the engine's thread has ended, by a panic too.
struct Ended(Arc<SharedLog>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.update(|log| log.is_over = true);
    }
}

/// An engine's thread.
pub struct Engine {
    orders: Sender<Order>,
    bell: UnixStream,
    log: Arc<SharedLog>,
    thread: Option<JoinHandle<()>>,
    pub endpoint: Option<String>,
}

/// How an engine's devices are.
#[derive(Clone, Debug)]
pub struct Devices {
    pub settings: Settings,
    /// Tokens of the largest graph that they have, if any.
    pub largest_graph: u32,
    pub step: Duration,
}

impl Default for Devices {
    fn default() -> Self {
        Self {
            settings: settings(),
            largest_graph: 8,
            step: Duration::ZERO,
        }
    }
}

impl Engine {
    pub fn start(settings: GroupSettings, devices: Devices) -> Self {
        let (orders, received) = bounded(4096);
        let (bell, ring) = UnixStream::pair().unwrap();
        ring.set_nonblocking(true).unwrap();
        let log = Arc::<SharedLog>::default();
        let clock = Instant::now();
        let engine = settings.engine();
        let replicas = settings.owners().replicas_of(engine);
        let exchange = Exchange::new(settings, Micros(0)).unwrap();
        let endpoint = exchange.endpoint().map(str::to_owned);
        let turn = {
            let log = log.clone();
            move || {
                let _ended = Ended(log.clone());
                let harnesses = replicas.clone();
                let event_loop = EventLoop {
                    harnesses: harnesses
                        .map(|_| Harness::new(devices.settings.clone()))
                        .collect(),
                    due: replicas.clone().map(|_| VecDeque::new()).collect(),
                    first_replica: replicas.start,
                    plans: Vec::new(),
                    waiting: VecDeque::new(),
                    exchange,
                    orders: received,
                    ring,
                    log,
                    clock,
                    devices,
                    is_draining: false,
                };
                event_loop.turn();
            }
        };
        let thread = thread::Builder::new().name(format!("engine-{engine}"));
        Self {
            orders,
            bell,
            log,
            thread: Some(thread.spawn(turn).unwrap()),
            endpoint,
        }
    }

    pub fn tell(&self, order: Order) {
        // An engine that has ended needs no orders.
        let _told = self.orders.send(order).is_ok() && (&self.bell).write_all(&[0]).is_ok();
    }

    pub fn submit(&self, replica: usize, spec: Spec) {
        self.tell(Order::Submit(replica, spec));
    }

    pub fn log(&self) -> Log {
        self.log.log.lock().unwrap().clone()
    }

    /// Waits until the log says so.
    pub fn wait_until(&self, what: &str, is_so: impl Fn(&Log) -> bool) {
        let has_come = self.log.wait(FOREVER, |log| is_so(log) || log.is_over);
        assert!(has_come, "waited in vain until {what}");
        let log = self.log();
        assert!(is_so(&log), "ended before {what}: {:?}", log.end);
    }

    /// Waits for so many more decisions, but for `limit` at most: the group may be idle.
    pub fn pause(&self, num_decisions: usize, limit: Duration) {
        let enough = self.log().decisions.len() + num_decisions;
        self.log.wait(limit, |log| log.decisions.len() >= enough);
    }

    /// Whether something wakes the engine within `limit`.
    pub fn wakes_within(&self, limit: Duration) -> bool {
        let before = self.log().num_wakes;
        self.log.wait(limit, |log| log.num_wakes > before)
    }

    /// Waits for the thread; its panic is the test's.
    pub fn finish(mut self) -> Log {
        let thread = self.thread.take().unwrap();
        let is_over = self.log.wait(FOREVER, |log| log.is_over);
        assert!(is_over, "an engine hangs");
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
        self.log()
    }
}

/// An engine at work, as the driver does it.
struct EventLoop {
    harnesses: Vec<Harness>,
    /// When each harness's steps in flight are complete.
    due: Vec<VecDeque<Instant>>,
    first_replica: u32,
    /// The plans that were voted on, until the decision.
    plans: Vec<Option<Plan>>,
    /// Requests that came between a vote and its decision, which may end the group.
    waiting: VecDeque<(usize, Spec)>,
    exchange: Exchange,
    orders: Receiver<Order>,
    ring: UnixStream,
    log: Arc<SharedLog>,
    clock: Instant,
    devices: Devices,
    is_draining: bool,
}

impl EventLoop {
    fn turn(mut self) {
        loop {
            while let Ok(order) = self.orders.try_recv() {
                if !self.obey(order) {
                    return;
                }
            }
            let goes_on = self.step_while_possible();
            self.tell_log();
            match goes_on {
                Ok(true) => self.wait(),
                Ok(false) => return self.harnesses.iter().for_each(Harness::check_the_end),
                Err(end) => {
                    self.log.update(|log| log.end = Some(end));
                    return;
                }
            }
        }
    }

    fn tell_log(&self) {
        let mut harnesses = self.harnesses.iter();
        let is_idle = harnesses.all(|harness| harness.scheduler.is_idle());
        self.log.update(|log| {
            log.drop_counts = self.exchange.drop_counts();
            log.is_idle = is_idle;
            log.has_voted |= self.exchange.awaits_decision();
        });
    }

    fn now(&self) -> Micros {
        Micros(u64::try_from(self.clock.elapsed().as_micros()).unwrap())
    }

    /// Blocks until something has come, or is due.
    fn wait(&mut self) {
        let due = self.due.iter().flat_map(|due| due.front().copied()).min();
        let due = due.map(|due| due.saturating_duration_since(Instant::now()));
        let deadline = self.exchange.next_deadline();
        let deadline =
            deadline.map(|deadline| Duration::from_micros(deadline.0.saturating_sub(self.now().0)));
        let timeout = due.into_iter().chain(deadline).min();
        let millis = timeout.map_or(-1, |it| {
            i64::try_from(it.as_micros().div_ceil(1000)).unwrap()
        });
        let mut items = self.exchange.poll_items();
        items.push(zmq::PollItem::from_fd(self.ring.as_raw_fd(), zmq::POLLIN));
        zmq::poll(&mut items, millis).unwrap();
        drop(items);
        while (&self.ring).read(&mut [0; 256]).is_ok_and(|num| num > 0) {}
        self.log.update(|log| log.num_wakes += 1);
    }

    /// False if the engine ends.
    fn obey(&mut self, order: Order) -> bool {
        match order {
            Order::Submit(replica, spec) => self.waiting.push_back((replica, spec)),
            Order::Drain => self.is_draining = true,
            Order::Stall => {
                self.log.update(|log| log.is_stalled = true);
                while !matches!(self.orders.recv(), Ok(Order::Vanish) | Err(_)) {}
                return false;
            }
            Order::GiveUp(reason) => {
                self.exchange.give_up(ExitCode::Hardware, reason);
                return false;
            }
            Order::Vanish => return false,
        }
        true
    }

    fn submit_waiting(&mut self) {
        while !self.exchange.awaits_decision()
            && let Some((replica, spec)) = self.waiting.pop_front()
        {
            let refused = self.harnesses[replica].submit(spec).is_err();
            self.log
                .update(|log| log.num_refused += usize::from(refused));
        }
    }

    /// False after the decision that stops the group.
    fn step_while_possible(&mut self) -> Result<bool, GroupFailure> {
        loop {
            let decision = self.exchange.receive(self.now())?;
            let has_decision = decision.is_some();
            if let Some(decision) = decision {
                self.follow(&decision);
                if decision.stop {
                    self.log.update(|log| log.num_refused += self.waiting.len());
                    return Ok(false);
                }
            }
            self.submit_waiting();
            let has_completed = self.complete_due();
            let has_cast = self.vote()?;
            if !has_decision && !has_completed && !has_cast {
                return Ok(true);
            }
        }
    }

    fn follow(&mut self, decision: &Decision) {
        let plans = std::mem::take(&mut self.plans);
        assert_eq!(
            plans.len(),
            self.harnesses.len(),
            "a decision that nobody asked for"
        );
        let replicas = self.first_replica..;
        for (replica, (index, plan)) in replicas.zip(plans.into_iter().enumerate()) {
            let harness = &mut self.harnesses[index];
            let is_dummy = decision.dummy_replicas.contains(&replica);
            assert_eq!(is_dummy, plan.is_none() && decision.mode != Mode::Idle);
            let decided = harness.scheduler.apply_decision(plan, decision);
            assert_eq!(
                decided.is_some(),
                decision.mode != Mode::Idle,
                "one engine steps alone"
            );
            let Some(decided) = decided else { continue };
            assert_eq!(
                &decided.decision, decision,
                "something was decided after the vote"
            );
            harness.send(&decided.plan);
            self.due[index].push_back(Instant::now() + self.devices.step);
            self.log.update(|log| {
                log.num_tokens += u64::from(decided.plan.num_tokens());
                log.num_dummies += usize::from(is_dummy);
            });
        }
        self.log.update(|log| log.decisions.push(decision.clone()));
    }

    fn complete_due(&mut self) -> bool {
        let mut has_completed = false;
        for (harness, due) in self.harnesses.iter_mut().zip(&mut self.due) {
            while due.front().is_some_and(|due| *due <= Instant::now()) {
                due.pop_front();
                harness.complete();
                has_completed = true;
            }
        }
        has_completed
    }

    /// Plans and votes if credit is left, and the group waits for a vote or has to hear of one.
    fn vote(&mut self) -> Result<bool, GroupFailure> {
        let has_credit = self
            .harnesses
            .iter()
            .all(|harness| harness.num_in_flight() < CREDIT);
        if self.exchange.awaits_decision() || !has_credit {
            return Ok(false);
        }
        let plans: Vec<_> = self.harnesses.iter_mut().map(Harness::plan_only).collect();
        if self.is_draining {
            self.harnesses
                .iter_mut()
                .for_each(|harness| harness.scheduler.drain());
        }
        let votes: Vec<Vote> = (self.first_replica..)
            .zip(self.harnesses.iter().zip(&plans))
            .map(|(replica, (harness, plan))| {
                harness
                    .scheduler
                    .vote(plan.as_ref(), replica, self.devices.largest_graph)
            })
            .collect();
        if !self.exchange.must_cast(&votes) {
            assert!(
                plans.iter().all(Option::is_none),
                "rows that nobody hears of"
            );
            return Ok(false);
        }
        self.plans = plans;
        self.exchange.cast(&votes, self.now())?;
        Ok(true)
    }
}

/// A whole group on one machine.
pub struct Group {
    pub engines: Vec<Engine>,
    _directory: TempDir,
}

impl Group {
    pub fn start(num_replicas: &[u32], devices: impl Fn(u32) -> Devices) -> Self {
        Self::start_with(num_replicas, devices, |_| {})
    }

    pub fn start_with(
        num_replicas: &[u32],
        devices: impl Fn(u32) -> Devices,
        change: impl Fn(&mut GroupSettings),
    ) -> Self {
        let (directory, endpoint) = socket_directory();
        let engines = (0..u32::try_from(num_replicas.len()).unwrap()).map(|engine| {
            let mut settings = group_settings(engine, &endpoint, num_replicas);
            change(&mut settings);
            Engine::start(settings, devices(engine))
        });
        Self {
            engines: engines.collect(),
            _directory: directory,
        }
    }

    /// Waits until all have joined and are idle.
    pub fn wait_until_idle(&self) {
        for engine in &self.engines {
            engine.wait_until("it is idle", |log| !log.decisions.is_empty() && log.is_idle);
        }
    }

    /// Whether something wakes one of the engines within `limit` of looking at it.
    pub fn wakes_within(&self, limit: Duration) -> bool {
        self.engines.iter().any(|engine| engine.wakes_within(limit))
    }

    /// Drains, and returns each engine's log.
    pub fn drain(self) -> Vec<Log> {
        self.engines[0].tell(Order::Drain);
        self.finish()
    }

    pub fn finish(self) -> Vec<Log> {
        self.engines.into_iter().map(Engine::finish).collect()
    }
}
