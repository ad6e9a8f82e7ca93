//! Phase and health of the engine and of each replica, for `/health`, `/ready` and the launcher.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plait_core::Micros;
use plait_openai::ApiError;
use plait_proto::{ExitCode, Hello};
use serde::Serialize;

use crate::output_queue::OutputQueue;
use crate::replica_pools::ReplicaPools;

/// A replica's life, in order, and the engine's; `failed` may follow any but `stopped`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Ranks load, measure and warm up.
    Loading,
    /// Requests are served.
    Ready,
    /// No new requests; those under way are finished.
    Draining,
    /// Drained or closed.
    Stopped,
    /// A rank was lost or broke the rules. An engine goes on while another replica serves.
    Failed,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}

/// What the ranks reported in their Hellos.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DeviceReport {
    num_pages: u32,
    page_bytes: u64,
    weight_bytes: u64,
    /// State of each slot, of a model that keeps some.
    #[serde(skip_serializing_if = "Option::is_none")]
    slot_state: Option<SlotStateReport>,
    device: String,
    dtype: String,
}

/// What a replica keeps for each slot beside its pages.
#[derive(Clone, Copy, Debug, Serialize)]
struct SlotStateReport {
    slot_bytes: u64,
    snapshot_bytes: u64,
    num_snapshots: u32,
}

impl SlotStateReport {
    /// None if the model keeps none.
    fn new(hellos: &[Hello], pools: &ReplicaPools) -> Option<Self> {
        let num_snapshots = pools.num_snapshots?;
        let of_ranks = hellos.iter().filter_map(|hello| hello.slot_state);
        Some(Self {
            slot_bytes: of_ranks.clone().map(|it| it.slot_bytes).sum(),
            snapshot_bytes: of_ranks.map(|it| it.snapshot_bytes).sum(),
            num_snapshots,
        })
    }
}

impl DeviceReport {
    /// Bytes of all ranks that a cached token, a slot and a snapshot take.
    pub fn cache_bytes(&self, page_size: u32) -> [u64; 3] {
        let of_slots = self.slot_state;
        let [slot, snapshot] = of_slots.map_or([0, 0], |it| [it.slot_bytes, it.snapshot_bytes]);
        [self.page_bytes / u64::from(page_size), slot, snapshot]
    }

    /// The replica's device: pages and snapshots are the least over the ranks, bytes their sum.
    pub fn new(hellos: &[Hello], pools: &ReplicaPools) -> Self {
        let first = hellos.first().expect("a replica has at least one rank");
        Self {
            num_pages: pools.num_pages,
            slot_state: SlotStateReport::new(hellos, pools),
            page_bytes: hellos.iter().map(|hello| hello.page_bytes).sum(),
            weight_bytes: hellos.iter().map(|hello| hello.weight_bytes).sum(),
            device: first.device.clone(),
            dtype: first.dtype.clone(),
        }
    }
}

/// One replica's phase and health. Written by its driver, read by everyone.
#[derive(Debug)]
pub struct ReplicaStatus {
    /// As a log line begins.
    name: String,
    python_queue: Arc<OutputQueue>,
    standing: Mutex<Standing>,
    step: AtomicU64,
    idle: AtomicBool,
    stuck: AtomicBool,
    late: AtomicBool,
    /// No step is planned.
    paused: AtomicBool,
    /// When the driver counts as hung.
    watchdog_deadline: AtomicU64,
}

#[derive(Clone, Debug)]
struct Standing {
    phase: Phase,
    failure: Option<Failure>,
    num_ranks_ready: u32,
    device: DeviceReport,
    /// Why its ranks were lost, until others serve.
    loss: Option<String>,
    num_losses: u32,
}

#[derive(Clone, Debug)]
struct Failure {
    code: ExitCode,
    reason: String,
    /// The replica was never ready.
    at_start: bool,
}

/// One replica in the JSON of `_router.pyi`.
#[derive(Serialize)]
struct ReplicaReport {
    phase: Phase,
    reason: String,
    exit_code: u32,
    step: u64,
    idle: bool,
    stuck: bool,
    late: bool,
    paused: bool,
    hung: bool,
    down: bool,
    losses: u32,
    ranks: u32,
    #[serde(flatten)]
    device: DeviceReport,
}

impl ReplicaStatus {
    /// Loading; `python_queue`'s eventfd tells Python of every later phase. A replica among others has a number.
    fn new(python_queue: Arc<OutputQueue>, number: Option<u32>) -> Self {
        let standing = Standing {
            phase: Phase::Loading,
            failure: None,
            num_ranks_ready: 0,
            device: DeviceReport::default(),
            loss: None,
            num_losses: 0,
        };
        Self {
            name: number.map_or_else(|| "the engine".to_owned(), replica_name),
            python_queue,
            standing: Mutex::new(standing),
            step: AtomicU64::new(0),
            idle: AtomicBool::new(true),
            stuck: AtomicBool::new(false),
            late: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            watchdog_deadline: AtomicU64::new(u64::MAX),
        }
    }

    /// Enters a phase that needs no explanation; a failure stays one.
    pub fn enter(&self, phase: Phase) {
        let mut standing = self.lock();
        if standing.phase == Phase::Failed {
            return;
        }
        tracing::info!("{} is {}", self.name, phase.name());
        standing.phase = phase;
        drop(standing);
        self.python_queue.wakeup().signal();
    }

    /// Enters `failed`; the first failure is the one that is reported.
    pub fn fail(&self, code: ExitCode, reason: &str) {
        let mut standing = self.lock();
        if standing.phase != Phase::Failed {
            tracing::error!(
                exit_code = u32::from(code),
                "{} failed: {reason}",
                self.name
            );
            standing.failure = Some(Failure {
                code,
                reason: reason.to_owned(),
                at_start: standing.phase == Phase::Loading,
            });
            standing.phase = Phase::Failed;
        }
        drop(standing);
        self.python_queue.wakeup().signal();
    }

    /// The ranks are lost, and requests wait for others.
    pub fn lose(&self, code: ExitCode, reason: &str) {
        let mut standing = self.lock();
        let exit_code = u32::from(code);
        tracing::warn!(exit_code, "{} lost its ranks: {reason}", self.name);
        standing.loss = Some(reason.to_owned());
        standing.num_losses += 1;
        standing.num_ranks_ready = 0;
        drop(standing);
        self.set_stuck(false);
        self.set_late(false);
        self.python_queue.wakeup().signal();
    }

    /// Other ranks serve, that started so long ago.
    pub fn recover(&self, seconds: f64) {
        self.lock().loss = None;
        tracing::info!(
            "{} serves again, {seconds:.1} s after its ranks started",
            self.name
        );
        self.python_queue.wakeup().signal();
    }

    /// How often its ranks were lost.
    pub fn num_losses(&self) -> u32 {
        self.lock().num_losses
    }

    /// Whether its ranks are lost.
    pub fn is_down(&self) -> bool {
        self.lock().loss.is_some()
    }

    /// The replica's threads have ended.
    fn stop(&self) {
        if self.lock().phase != Phase::Stopped {
            self.enter(Phase::Stopped);
        }
    }

    /// Sets the device, once all ranks have said Hello.
    pub fn set_device(&self, device: DeviceReport) {
        self.lock().device = device;
    }

    /// One more rank has answered the warm-up.
    pub fn add_ready_rank(&self) {
        self.lock().num_ranks_ready += 1;
    }

    /// The last step whose result came in.
    pub fn set_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }

    /// Nothing runs and nothing waits.
    pub fn set_idle(&self, idle: bool) {
        self.idle.store(idle, Ordering::Relaxed);
    }

    /// Sets whether a step is overdue; returns whether that has changed.
    pub fn set_stuck(&self, stuck: bool) -> bool {
        self.stuck.swap(stuck, Ordering::Relaxed) != stuck
    }

    /// Sets whether a rank's heartbeat is late; returns whether that has changed.
    pub fn set_late(&self, late: bool) -> bool {
        self.late.swap(late, Ordering::Relaxed) != late
    }

    /// Whether an operator has paused it: it plans no step.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// An operator pauses it, or lets it go on.
    pub fn set_paused(&self, paused: bool) {
        if self.paused.swap(paused, Ordering::Relaxed) != paused {
            let now = if paused { "paused" } else { "going on" };
            tracing::info!("{} is {now}", self.name);
        }
    }

    /// Sets when the driver counts as hung; None never, for it waits on others only.
    pub fn set_watchdog_deadline(&self, time: Option<Micros>) {
        let time = time.map_or(u64::MAX, |time| time.0);
        self.watchdog_deadline.store(time, Ordering::Relaxed);
    }

    fn report(&self, now: Micros) -> ReplicaReport {
        let standing = self.lock().clone();
        let (failure, loss) = (standing.failure, standing.loss);
        ReplicaReport {
            phase: standing.phase,
            exit_code: failure.as_ref().map_or(0, |failure| failure.code.into()),
            down: loss.is_some(),
            losses: standing.num_losses,
            reason: failure.map_or_else(|| loss.unwrap_or_default(), |failure| failure.reason),
            step: self.step.load(Ordering::Relaxed),
            idle: self.idle.load(Ordering::Relaxed),
            stuck: self.stuck.load(Ordering::Relaxed),
            late: self.late.load(Ordering::Relaxed),
            paused: self.is_paused(),
            hung: self.watchdog_deadline.load(Ordering::Relaxed) < now.0,
            ranks: standing.num_ranks_ready,
            device: standing.device,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How messages call a replica among others.
pub fn replica_name(number: u32) -> String {
    format!("replica {number}")
}

/// The engine's state, which follows from its replicas'.
#[derive(Debug)]
pub struct StatusBoard {
    replicas: Vec<Arc<ReplicaStatus>>,
}

/// The engine in the JSON of `_router.pyi`.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    engine: ReplicaReport,
    replicas: Vec<ReplicaReport>,
}

impl StatusBoard {
    /// All replicas load.
    pub fn new(python_queue: &Arc<OutputQueue>, num_replicas: u32) -> Self {
        let replicas = (0..num_replicas).map(|number| {
            let number = (num_replicas > 1).then_some(number);
            Arc::new(ReplicaStatus::new(python_queue.clone(), number))
        });
        Self {
            replicas: replicas.collect(),
        }
    }

    /// One replica's.
    pub fn replica(&self, number: u32) -> &Arc<ReplicaStatus> {
        &self.replicas[number as usize]
    }

    /// Whether requests are admitted.
    pub fn is_ready(&self) -> bool {
        self.phase() == Phase::Ready
    }

    /// Whether nothing can be served any more.
    pub fn has_failed(&self) -> bool {
        self.phase() == Phase::Failed
    }

    /// Why no request is admitted, for clients. A failure's own reason may name this machine's files.
    pub fn refusal(&self) -> ApiError {
        ApiError::unavailable(match self.phase() {
            Phase::Loading => "the model is being loaded; try again later",
            Phase::Ready | Phase::Draining | Phase::Stopped => {
                "the server is shutting down; send the request to another server, or try again later"
            }
            Phase::Failed => cannot_go_on(self.lost_a_rank()),
        })
    }

    /// Why a replica ends its streams; one of a group ends with all others.
    pub fn refusal_of(&self, replica: u32, in_group: bool) -> ApiError {
        if self.has_failed() || self.replica(replica).lock().phase != Phase::Failed {
            return self.refusal();
        }
        if in_group {
            return ApiError::unavailable(cannot_go_on(self.lost_a_rank()));
        }
        ApiError::unavailable(format!(
            "{} was lost, and the request with it; the others serve: send it again",
            replica_name(replica)
        ))
    }

    /// Every replica fails: a bug in what they share.
    pub fn fail_all(&self, code: ExitCode, reason: &str) {
        for replica in &self.replicas {
            replica.fail(code, reason);
        }
    }

    /// The threads have ended.
    pub fn stop(&self) {
        for replica in &self.replicas {
            replica.stop();
        }
    }

    /// JSON of everything here, as it is `now`.
    pub fn report(&self, now: Micros) -> Vec<u8> {
        let replicas: Vec<ReplicaReport> = self.replicas.iter().map(|it| it.report(now)).collect();
        let engine = self.summary(&replicas);
        let report = Report { engine, replicas };
        serde_json::to_vec(&report).expect("numbers and strings always encode")
    }

    /// The engine is stuck, late or hung if every replica is that has not failed.
    fn summary(&self, replicas: &[ReplicaReport]) -> ReplicaReport {
        let phase = self.phase();
        let live: Vec<&ReplicaReport> = match replicas {
            [only] => vec![only],
            all => all.iter().filter(|it| it.phase != Phase::Failed).collect(),
        };
        let all = |is: fn(&ReplicaReport) -> bool| !live.is_empty() && live.iter().all(|it| is(it));
        let failure = self.failure().filter(|_| phase == Phase::Failed);
        let (exit_code, mut reason) = failure.unwrap_or_default();
        let down = all(|it| it.down);
        if reason.is_empty() && down {
            reason.clone_from(&live[0].reason);
        }
        ReplicaReport {
            phase,
            reason,
            exit_code,
            step: replicas.iter().map(|it| it.step).max().unwrap_or(0),
            idle: all(|it| it.idle),
            stuck: all(|it| it.stuck),
            late: all(|it| it.late),
            paused: all(|it| it.paused),
            hung: all(|it| it.hung),
            down,
            losses: replicas.iter().map(|it| it.losses).sum(),
            ranks: replicas.iter().map(|it| it.ranks).sum(),
            device: self.replica(0).lock().device.clone(),
        }
    }

    fn phase(&self) -> Phase {
        let phases = self.of_each(|standing| standing.phase);
        if phases.iter().all(|phase| *phase == Phase::Failed) || self.failed_at_start() {
            return Phase::Failed;
        }
        let in_order = [Phase::Loading, Phase::Draining, Phase::Ready];
        let first = in_order.into_iter().find(|phase| phases.contains(phase));
        first.unwrap_or(Phase::Stopped)
    }

    fn lost_a_rank(&self) -> bool {
        self.failure()
            .is_some_and(|(code, _)| code == u32::from(ExitCode::RankLost))
    }

    /// Exit code of the first replica that failed, and the reasons of all that did, each cause once.
    fn failure(&self) -> Option<(u32, String)> {
        let at_start = self.failed_at_start();
        let failures: Vec<(usize, Failure)> = (0..)
            .zip(self.of_each(|standing| standing.failure.clone()))
            .filter_map(|(number, failure)| Some((number, failure?)))
            .filter(|(_, failure)| failure.at_start == at_start)
            .collect();
        let failures = without_consequences(failures);
        let (_, first) = failures.first()?;
        let reasons = failures
            .iter()
            .map(|(number, failure)| match self.replicas.len() {
                1 => failure.reason.clone(),
                _ => format!("replica {number}: {}", failure.reason),
            });
        let reasons: Vec<String> = reasons.collect();
        Some((first.code.into(), reasons.join("; ")))
    }

    /// A server whose start failed does not begin with fewer replicas than it was asked for.
    fn failed_at_start(&self) -> bool {
        let failure = |standing: &Standing| standing.failure.as_ref().is_some_and(|it| it.at_start);
        self.of_each(failure).contains(&true)
    }

    fn of_each<T>(&self, of: impl Fn(&Standing) -> T) -> Vec<T> {
        self.replicas.iter().map(|it| of(&it.lock())).collect()
    }
}

/// After a failure of the engine, or of a replica with which its group ends.
fn cannot_go_on(lost_a_rank: bool) -> &'static str {
    if lost_a_rank {
        "a worker was lost and the server cannot go on; its log says why, start it again"
    } else {
        "the server failed and cannot go on; its log says why, start it again"
    }
}

/// Those whose reason does not end in another's: a replica of a group passes on why another one gave up.
fn without_consequences(failures: Vec<(usize, Failure)>) -> Vec<(usize, Failure)> {
    let reasons: Vec<String> = failures.iter().map(|(_, it)| it.reason.clone()).collect();
    let passes_on = |reason: &str| {
        let mut others = reasons.iter().filter(|other| *other != reason);
        others.any(|other| reason.ends_with(other.as_str()))
    };
    failures
        .into_iter()
        .filter(|(_, it)| !passes_on(&it.reason))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn board(num_replicas: u32) -> StatusBoard {
        StatusBoard::new(&Arc::new(OutputQueue::new(1000).unwrap()), num_replicas)
    }

    fn report(board: &StatusBoard) -> serde_json::Value {
        serde_json::from_slice(&board.report(Micros(0))).unwrap()
    }

    fn serving(num_replicas: u32) -> StatusBoard {
        let board = board(num_replicas);
        for replica in &board.replicas {
            replica.enter(Phase::Ready);
        }
        board
    }

    #[test]
    fn a_failure_is_final_and_the_first_one_is_told() {
        let board = board(1);
        let replica = board.replica(0);
        replica.fail(ExitCode::Hardware, "out of memory");
        replica.fail(ExitCode::Bug, "a consequence");
        replica.enter(Phase::Stopped);
        board.stop();
        let report = report(&board);
        assert_eq!(report["phase"], "failed");
        assert_eq!(report["exit_code"], 3);
        assert_eq!(report["reason"], "out of memory");
    }

    #[test]
    fn the_engine_is_ready_with_its_last_replica() {
        let board = board(2);
        board.replica(1).enter(Phase::Ready);
        assert_eq!(report(&board)["phase"], "loading");
        board.replica(0).enter(Phase::Ready);
        assert!(board.is_ready());
    }

    #[test]
    fn the_engine_goes_on_while_a_replica_serves_and_fails_with_the_last() {
        let board = serving(2);
        board.replica(1).fail(ExitCode::RankLost, "rank 1 was lost");
        let one_left = report(&board);
        assert_eq!(
            (&one_left["phase"], &one_left["exit_code"]),
            (&"ready".into(), &0.into())
        );
        assert_eq!(one_left["replicas"][1]["reason"], "rank 1 was lost");
        let told = board.refusal_of(1, false).message;
        assert!(told.contains("replica 1 was lost"), "{told}");
        board.replica(0).fail(ExitCode::RankLost, "rank 0 was lost");
        let none_left = report(&board);
        assert_eq!(
            (&none_left["phase"], &none_left["exit_code"]),
            (&"failed".into(), &5.into())
        );
        assert_eq!(
            none_left["reason"],
            "replica 0: rank 0 was lost; replica 1: rank 1 was lost"
        );
    }

    #[test]
    fn the_first_replica_of_a_group_that_ends_sends_nobody_to_the_others() {
        let board = serving(2);
        board.replica(1).fail(ExitCode::RankLost, "rank 1 was lost");
        assert!(board.is_ready());
        let told = board.refusal_of(1, true).message;
        assert_eq!(told, cannot_go_on(true));
    }

    #[test]
    fn a_cause_that_other_replicas_pass_on_is_told_once() {
        let board = serving(3);
        board
            .replica(1)
            .fail(ExitCode::Hardware, "rank 1: out of memory");
        for passing_on in [0, 2] {
            let reason = "replica 1 gave up: rank 1: out of memory";
            board.replica(passing_on).fail(ExitCode::Hardware, reason);
        }
        let report = report(&board);
        assert_eq!(report["reason"], "replica 1: rank 1: out of memory");
        assert_eq!(report["exit_code"], 3);
    }

    #[test]
    fn a_replica_that_fails_at_start_fails_the_engine() {
        let board = board(2);
        board.replica(0).enter(Phase::Ready);
        board.replica(1).fail(ExitCode::Hardware, "out of memory");
        let report = report(&board);
        assert_eq!(
            (&report["phase"], &report["exit_code"]),
            (&"failed".into(), &3.into())
        );
        assert_eq!(report["reason"], "replica 1: out of memory");
    }

    #[test]
    fn the_engine_is_stuck_only_if_all_that_serve_are() {
        let board = serving(3);
        board.replica(0).set_stuck(true);
        board.replica(1).fail(ExitCode::RankLost, "gone");
        assert_eq!(report(&board)["stuck"], false);
        board.replica(2).set_stuck(true);
        assert_eq!(report(&board)["stuck"], true);
    }

    #[test]
    fn the_engine_stops_with_its_last_replica_whether_or_not_one_was_lost() {
        let board = serving(3);
        board.replica(0).fail(ExitCode::RankLost, "gone");
        board.replica(1).enter(Phase::Draining);
        board.replica(1).enter(Phase::Stopped);
        board.replica(2).enter(Phase::Draining);
        assert_eq!(report(&board)["phase"], "draining");
        board.replica(2).enter(Phase::Stopped);
        assert_eq!(report(&board)["phase"], "stopped");
    }
}
