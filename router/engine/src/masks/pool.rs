//! The mask threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use plait_core::{RequestId, TokenId};

use super::{Next, TokenMatcher, fill, guarded};
use crate::shared::ReplicaShared;

/// Threads for masks at most.
const MAX_THREADS: usize = 8;
/// An answer whose last mask took longer has its next ones filled by a thread that the others do not use.
const SLOW: Duration = Duration::from_millis(5);
/// Of that thread, so that a slow grammar takes no core from the others: on a CPU the model computes on all of them. A
/// busy core leaves such a thread a tenth of its time, and an idle one all.
const NICENESS: i32 = 10;

/// A mask to fill: what may come behind these tokens.
pub struct MaskJob {
    pub request: RequestId,
    pub matcher: Box<dyn TokenMatcher>,
    pub tokens: Vec<TokenId>,
    /// Where the mask is sent.
    pub filled: Sender<FilledMask>,
    /// Whose driver is woken.
    pub replica: Arc<ReplicaShared>,
}

/// A mask that a thread has filled.
pub struct FilledMask {
    pub request: RequestId,
    pub matcher: Box<dyn TokenMatcher>,
    /// Why not, for people.
    pub next: Result<Next, String>,
    pub took: Duration,
}

impl FilledMask {
    /// The answer's next mask will be slow too.
    pub fn is_slow(&self) -> bool {
        self.took > SLOW
    }
}

/// The driver's end: gives jobs to the threads. The threads end with the last of these.
#[derive(Clone)]
pub struct MaskJobs {
    fast: Sender<MaskJob>,
    slow: Sender<MaskJob>,
}

impl MaskJobs {
    /// Never blocks. An answer has one mask to fill at a time.
    pub fn put(&self, job: MaskJob, is_slow: bool) {
        let lane = if is_slow { &self.slow } else { &self.fast };
        // The threads end after the drivers.
        let _taken = lane.send(job);
    }
}

/// One thread's end.
pub struct MaskThread {
    jobs: Receiver<MaskJob>,
    vocab_size: u32,
    is_for_slow: bool,
}

/// The drivers' end and the threads': one for each two cores, and one for slow answers. They work in bursts: all masks
/// of a step are asked for when the result before it comes.
pub fn mask_threads(vocab_size: u32) -> (MaskJobs, Vec<MaskThread>) {
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let num_fast = (num_cores / 2).clamp(1, MAX_THREADS);
    let ((fast, fast_jobs), (slow, slow_jobs)) = (lane(), lane());
    let thread = |jobs: &Receiver<MaskJob>, is_for_slow| MaskThread {
        jobs: jobs.clone(),
        vocab_size,
        is_for_slow,
    };
    let mut threads: Vec<_> = (0..num_fast).map(|_| thread(&fast_jobs, false)).collect();
    threads.push(thread(&slow_jobs, true));
    (MaskJobs { fast, slow }, threads)
}

#[expect(
    clippy::disallowed_methods,
    reason = "an answer has one mask to fill at a time, and the answers are bounded"
)]
pub(super) fn lane<T>() -> (Sender<T>, Receiver<T>) {
    unbounded()
}

impl MaskThread {
    /// Fills masks until the drivers have ended.
    pub fn run(&self) {
        if self.is_for_slow {
            step_back();
        }
        self.jobs.iter().for_each(|job| self.fill(job));
    }

    fn fill(&self, job: MaskJob) {
        let begin = Instant::now();
        let MaskJob {
            request,
            mut matcher,
            tokens,
            filled,
            replica,
        } = job;
        let accepted = guarded(|| tokens.iter().try_for_each(|it| matcher.accept(*it)));
        let next = accepted.and_then(|()| fill(&mut *matcher, self.vocab_size));
        let took = begin.elapsed();
        // A driver that has ended wants no mask.
        let _sent = filled.send(FilledMask {
            request,
            matcher,
            next,
            took,
        });
        replica.mailbox.wakeup().signal();
    }

    /// Fills the mask that was asked for first, if there is one.
    #[cfg(test)]
    pub fn run_one(&self) -> bool {
        self.jobs.try_recv().map(|job| self.fill(job)).is_ok()
    }
}

/// The calling thread gives way to others from here on.
fn step_back() {
    if let Err(error) = rustix::process::nice(NICENESS) {
        tracing::warn!("slow grammars may take time from the model: no lower priority: {error}");
    }
}
