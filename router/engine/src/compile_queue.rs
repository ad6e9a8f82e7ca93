//! Constraints that wait to be compiled, so that no text waits behind them: bounded, and taken in turns among tenants.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use plait_core::Micros;
use plait_grammar::Constraint;
use plait_openai::{AskedConstraint, Prepared};

use crate::output_queue::StreamId;
use crate::turns::{Turns, Waits};

/// Requests that may wait for a grammar.
const MAX_JOBS: usize = 256;
/// Bytes of their prompts and constraints.
const MAX_BYTES: usize = 64 << 20;
/// Weight of the last compilation in the mean time of one.
const LAST_WEIGHT: f64 = 0.2;
/// Longest Retry-After, in seconds.
const MAX_RETRY_SECONDS: f64 = 600.0;

/// A request whose constraint has no grammar yet.
#[derive(Debug)]
pub struct CompileJob {
    /// The stream of its answer.
    pub stream: StreamId,
    /// Whose turn it takes.
    pub tenant: u64,
    /// When it was submitted.
    pub received: Micros,
    /// All of it but the grammar.
    pub prepared: Prepared,
    /// What its answers must be.
    pub asked: AskedConstraint,
}

impl CompileJob {
    fn num_bytes(&self) -> usize {
        let prompts = self.prepared.prompts.iter();
        let num_tokens: usize = prompts.map(|it| it.request.prompt.len()).sum();
        self.asked.constraint.num_bytes() + num_tokens * size_of::<u32>()
    }
}

/// A request in the queue. What wants a grammar that a thread compiles stays there until it is done.
#[derive(Debug)]
struct Waiting {
    /// Of the constraint. Two that share one by chance wait for each other, and no more.
    hash: u64,
    job: CompileJob,
}

impl Waits for Waiting {
    fn tenant(&self) -> u64 {
        self.job.tenant
    }

    fn num_bytes(&self) -> usize {
        self.job.num_bytes()
    }
}

/// Requests for which there is no room, and when there should be.
#[derive(Debug)]
pub struct Overflow {
    /// The put one among them if its tenant has most waiting.
    pub rejected: Vec<CompileJob>,
    /// Seconds until those that wait should be compiled.
    pub retry_after_seconds: u16,
}

/// The way from the text threads to the compile threads.
#[derive(Debug)]
pub struct CompileQueue {
    num_threads: usize,
    hasher: RandomState,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: Turns<Waiting>,
    running: Vec<Running>,
    mean_seconds: f64,
    is_closed: bool,
}

/// A constraint that a thread compiles.
#[derive(Debug)]
struct Running {
    hash: u64,
    tenant: u64,
}

impl CompileQueue {
    /// For so many threads.
    pub fn new(num_threads: usize) -> Self {
        Self {
            num_threads,
            hasher: RandomState::new(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Queues a request; never waits. A full queue rejects the last request of the tenant with most.
    pub fn put(&self, job: CompileJob) -> Overflow {
        let tenant = job.tenant;
        let hash = self.hasher.hash_one(&job.asked.constraint);
        let mut state = self.lock();
        state.waiting.push(Waiting { hash, job });
        let mut rejected = Vec::new();
        while let Some(by_bytes) = state.overflows() {
            let Some(last) = state.waiting.drop_last_of_largest(by_bytes, tenant) else {
                break;
            };
            rejected.push(last.job);
        }
        let overflow = Overflow {
            rejected,
            retry_after_seconds: state.retry_after_seconds(self.num_threads),
        };
        drop(state);
        self.changed.notify_one();
        overflow
    }

    /// The next request to compile for; waits for one. A tenant leaves one thread to the others. None once the queue is
    /// closed.
    pub fn take(&self) -> Option<CompileJob> {
        let mut state = self.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(job) = state.next(self.num_threads) {
                return Some(job);
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The constraint of a taken request is compiled. Returns the others that want its grammar; they take no thread.
    pub fn finish(&self, constraint: &Constraint, took: Duration) -> Vec<CompileJob> {
        let hash = self.hasher.hash_one(constraint);
        let mut state = self.lock();
        state.mean_seconds += LAST_WEIGHT * (took.as_secs_f64() - state.mean_seconds);
        state.running.retain(|it| it.hash != hash);
        let followers = state.waiting.take_all(|it| it.hash == hash);
        drop(state);
        self.changed.notify_all();
        followers.into_iter().map(|it| it.job).collect()
    }

    /// The client of a request is gone: whether its request waited here. It does no longer.
    pub fn forget(&self, stream: StreamId) -> bool {
        let gone = self.lock().waiting.take_all(|it| it.job.stream == stream);
        !gone.is_empty()
    }

    /// Nothing is compiled from now on.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether too many wait, or (true) too many bytes.
    fn overflows(&self) -> Option<bool> {
        let size = self.waiting.size();
        match (size.num > MAX_JOBS, size.num_bytes > MAX_BYTES) {
            (true, _) => Some(false),
            (false, true) => Some(true),
            (false, false) => None,
        }
    }

    fn next(&mut self, num_threads: usize) -> Option<CompileJob> {
        let most = num_threads.saturating_sub(1).max(1);
        let running = &self.running;
        let num_running = |tenant| running.iter().filter(|it| it.tenant == tenant).count();
        let next = self.waiting.take(|it| {
            num_running(it.job.tenant) < most && running.iter().all(|other| other.hash != it.hash)
        })?;
        self.running.push(Running {
            hash: next.hash,
            tenant: next.job.tenant,
        });
        Some(next.job)
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped to what a header holds"
    )]
    fn retry_after_seconds(&self, num_threads: usize) -> u16 {
        let num_ahead = self.waiting.size().num as f64 / num_threads as f64;
        (num_ahead * self.mean_seconds)
            .ceil()
            .clamp(1.0, MAX_RETRY_SECONDS) as u16
    }
}
