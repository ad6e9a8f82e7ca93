//! The engine's phase and health, for `/health`, `/ready` and the launcher.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plait_core::Micros;
use plait_openai::ApiError;
use plait_proto::{ExitCode, Hello};
use serde::Serialize;

use crate::output_queue::OutputQueue;

/// The engine's life, in order; `failed` may follow any but `stopped`.
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
    /// A rank was lost or broke the rules.
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
    device: String,
    dtype: String,
}

impl DeviceReport {
    /// The replica's device: pages are the least over the ranks, bytes their sum.
    pub fn new(hellos: &[Hello], num_pages: u32) -> Self {
        let first = hellos.first().expect("a replica has at least one rank");
        Self {
            num_pages,
            page_bytes: hellos.iter().map(|hello| hello.page_bytes).sum(),
            weight_bytes: hellos.iter().map(|hello| hello.weight_bytes).sum(),
            device: first.device.clone(),
            dtype: first.dtype.clone(),
        }
    }
}

/// Written by the driver, read by everyone.
#[derive(Debug)]
pub struct StatusBoard {
    output_queue: Arc<OutputQueue>,
    standing: Mutex<Standing>,
    step: AtomicU64,
    idle: AtomicBool,
    stuck: AtomicBool,
    late: AtomicBool,
    /// When the driver counts as hung.
    watchdog_deadline: AtomicU64,
}

#[derive(Clone, Debug)]
struct Standing {
    phase: Phase,
    reason: String,
    exit_code: u32,
    num_ranks_ready: u32,
    device: DeviceReport,
}

/// The JSON of `_router.pyi`.
#[derive(Serialize)]
struct Report {
    phase: Phase,
    reason: String,
    exit_code: u32,
    step: u64,
    idle: bool,
    stuck: bool,
    late: bool,
    hung: bool,
    ranks: u32,
    #[serde(flatten)]
    device: DeviceReport,
}

impl StatusBoard {
    /// Loading; `output_queue`'s eventfd tells Python of every later phase.
    pub fn new(output_queue: Arc<OutputQueue>) -> Self {
        let standing = Standing {
            phase: Phase::Loading,
            reason: String::new(),
            exit_code: 0,
            num_ranks_ready: 0,
            device: DeviceReport::default(),
        };
        Self {
            output_queue,
            standing: Mutex::new(standing),
            step: AtomicU64::new(0),
            idle: AtomicBool::new(true),
            stuck: AtomicBool::new(false),
            late: AtomicBool::new(false),
            watchdog_deadline: AtomicU64::new(u64::MAX),
        }
    }

    /// Whether requests are admitted.
    pub fn is_ready(&self) -> bool {
        self.lock().phase == Phase::Ready
    }

    /// Why no request is admitted, for clients. A failure's own reason may name this machine's files.
    pub fn refusal(&self) -> ApiError {
        let standing = self.lock();
        ApiError::unavailable(match standing.phase {
            Phase::Loading => "the model is being loaded; try again later",
            Phase::Ready | Phase::Draining | Phase::Stopped => {
                "the server is shutting down; send the request to another server, or try again later"
            }
            Phase::Failed if standing.exit_code == u32::from(ExitCode::RankLost) => {
                "a worker was lost and the server cannot go on; its log says why, start it again"
            }
            Phase::Failed => "the server failed and cannot go on; its log says why, start it again",
        })
    }

    /// Enters a phase that needs no explanation; a failure stays one.
    pub fn enter(&self, phase: Phase) {
        let mut standing = self.lock();
        if standing.phase == Phase::Failed {
            return;
        }
        tracing::info!("the engine is {}", phase.name());
        standing.phase = phase;
        drop(standing);
        self.output_queue.wakeup().signal();
    }

    /// Enters `failed`; the first failure is the one that is reported.
    pub fn fail(&self, code: ExitCode, reason: &str) {
        let mut standing = self.lock();
        if standing.phase != Phase::Failed {
            tracing::error!(exit_code = u32::from(code), "the engine failed: {reason}");
            reason.clone_into(&mut standing.reason);
            standing.phase = Phase::Failed;
            standing.exit_code = code.into();
        }
        drop(standing);
        self.output_queue.wakeup().signal();
    }

    /// The threads have ended.
    pub fn stop(&self) {
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

    /// Sets when the driver counts as hung; None never, for it waits on others only.
    pub fn set_watchdog_deadline(&self, time: Option<Micros>) {
        let time = time.map_or(u64::MAX, |time| time.0);
        self.watchdog_deadline.store(time, Ordering::Relaxed);
    }

    /// JSON of everything here, as it is `now`.
    pub fn report(&self, now: Micros) -> Vec<u8> {
        let standing = self.lock().clone();
        let report = Report {
            phase: standing.phase,
            reason: standing.reason,
            exit_code: standing.exit_code,
            step: self.step.load(Ordering::Relaxed),
            idle: self.idle.load(Ordering::Relaxed),
            stuck: self.stuck.load(Ordering::Relaxed),
            late: self.late.load(Ordering::Relaxed),
            hung: self.watchdog_deadline.load(Ordering::Relaxed) < now.0,
            ranks: standing.num_ranks_ready,
            device: standing.device,
        };
        serde_json::to_vec(&report).expect("numbers and strings always encode")
    }

    fn lock(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_final_and_the_first_one_is_told() {
        let board = StatusBoard::new(Arc::new(OutputQueue::new().unwrap()));
        board.fail(ExitCode::Hardware, "out of memory");
        board.fail(ExitCode::Bug, "a consequence");
        board.enter(Phase::Stopped);
        board.stop();
        let report: serde_json::Value = serde_json::from_slice(&board.report(Micros(0))).unwrap();
        assert_eq!(report["phase"], "failed");
        assert_eq!(report["exit_code"], 3);
        assert_eq!(report["reason"], "out of memory");
    }
}
