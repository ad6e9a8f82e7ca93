//! Runs the replicas. With round-robin routing, each can run on its own thread.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use crate::error::SimError;
use crate::group::run_group;
use crate::replica::Replica;
use crate::report::Report;
use crate::routes::Routes;
use crate::run_metrics::RunMetrics;
use crate::settings::{Routing, Setup};
use crate::trace::Arrival;

/// Interval of progress reports to the caller.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// The work of a thread.
type Run = fn(&Setup, &Progress, &SyncSender<RunMetrics>);

/// State that the threads share.
#[derive(Default)]
pub struct Progress {
    num_arrived: AtomicU64,
    next_replica: AtomicU64,
    is_stopped: AtomicBool,
}

impl Progress {
    /// Counts arrived requests. Breaks if the caller has stopped the simulation.
    pub fn goes_on_after(&self, num_arrived: usize) -> ControlFlow<()> {
        self.num_arrived
            .fetch_add(num_arrived as u64, Ordering::Relaxed);
        if self.is_stopped.load(Ordering::Relaxed) {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }
}

/// Gets the number of arrived requests. Returning false stops the simulation.
pub type OnProgress<'a> = dyn FnMut(u64) -> bool + 'a;

/// Simulates the whole trace.
pub fn simulate(setup: &Setup, on_progress: &mut OnProgress<'_>) -> Result<Report, SimError> {
    let progress = Progress::default();
    let mut total = RunMetrics::new(setup.last_arrival());
    std::thread::scope(|scope| {
        let (sender, receiver) = sync_channel(setup.num_threads);
        let run: Run = match setup.routing {
            _ if setup.shares_experts => run_group,
            Routing::InTurn => run_replicas,
            Routing::LeastLoaded | Routing::PrefixAware => run_all_replicas,
        };
        for _ in 0..setup.num_threads {
            let (sender, progress) = (sender.clone(), &progress);
            scope.spawn(move || run(setup, progress, &sender));
        }
        drop(sender);
        loop {
            match receiver.recv_timeout(PROGRESS_INTERVAL) {
                Ok(metrics) => total.add(metrics),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if !on_progress(progress.num_arrived.load(Ordering::Relaxed)) {
                progress.is_stopped.store(true, Ordering::Relaxed);
            }
        }
    });
    if progress.is_stopped.into_inner() {
        return Err(SimError::Stopped);
    }
    Ok(Report::new(setup, total))
}

/// Runs one replica after the other until none is left.
fn run_replicas(setup: &Setup, progress: &Progress, sender: &SyncSender<RunMetrics>) {
    loop {
        let index = progress.next_replica.fetch_add(1, Ordering::Relaxed);
        if index >= u64::from(setup.num_replicas) {
            return;
        }
        let Some(metrics) = run_replica(setup, index, progress) else {
            return;
        };
        if sender.send(metrics).is_err() {
            return;
        }
    }
}

/// Runs all requests of one replica; None if the simulation was stopped.
fn run_replica(setup: &Setup, index: u64, progress: &Progress) -> Option<RunMetrics> {
    let (first, step) = (usize::try_from(index).ok()?, setup.num_replicas as usize);
    let own: Vec<&Arrival> = setup.arrivals.iter().skip(first).step_by(step).collect();
    let mut replica = Replica::new(setup);
    for together in own.chunk_by(|a, b| a.at == b.at) {
        let now = together[0].at;
        replica.run_until(now);
        for arrival in together {
            replica.submit(arrival, now);
        }
        replica.send_steps(now);
        if progress.goes_on_after(together.len()).is_break() {
            return None;
        }
    }
    Some(replica.finish())
}

/// The replica with the fewest unanswered requests.
pub fn least_loaded(replicas: &[Replica<'_>]) -> usize {
    let by_load = replicas.iter().enumerate();
    let least = by_load.min_by_key(|(_, replica)| replica.load());
    least.expect("there is a replica at least").0
}

/// Runs all replicas in lockstep, so that their loads can be compared.
fn run_all_replicas(setup: &Setup, progress: &Progress, sender: &SyncSender<RunMetrics>) {
    let mut replicas: Vec<Replica<'_>> = (0..setup.num_replicas)
        .map(|_| Replica::new(setup))
        .collect();
    let mut routes = Routes::new(setup);
    for together in setup.arrivals.chunk_by(|a, b| a.at == b.at) {
        let now = together[0].at;
        for replica in &mut replicas {
            replica.run_until(now);
        }
        for arrival in together {
            let index = match &mut routes {
                Some(routes) => routes.choose(arrival, &mut replicas),
                None => least_loaded(&replicas),
            };
            let request = replicas[index].submit(arrival, now);
            if let Some(routes) = &mut routes {
                routes.begin(index, request);
            }
        }
        for replica in &mut replicas {
            replica.send_steps(now);
        }
        if progress.goes_on_after(together.len()).is_break() {
            return;
        }
    }
    for replica in replicas {
        if sender.send(replica.finish()).is_err() {
            return;
        }
    }
}
