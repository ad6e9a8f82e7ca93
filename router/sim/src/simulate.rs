//! Replicas side by side: requests go to them in turn, so each can run on a thread of its own.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use crate::error::SimError;
use crate::replica::Replica;
use crate::report::Report;
use crate::settings::Setup;
use crate::tally::Tally;
use crate::trace::Arrival;

/// How often the caller is told how far the simulation is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// What the threads share.
#[derive(Default)]
struct Progress {
    num_arrived: AtomicU64,
    next_replica: AtomicU64,
    is_stopped: AtomicBool,
}

/// What a caller does with the number of requests that have arrived; false ends the simulation.
pub type OnProgress<'a> = dyn FnMut(u64) -> bool + 'a;

/// Simulates the whole trace.
pub fn simulate(setup: &Setup, on_progress: &mut OnProgress<'_>) -> Result<Report, SimError> {
    let progress = Progress::default();
    let mut total = Tally::new(setup.last_arrival());
    std::thread::scope(|scope| {
        let (sender, tallies) = sync_channel(setup.num_threads);
        for _ in 0..setup.num_threads {
            let (sender, progress) = (sender.clone(), &progress);
            scope.spawn(move || run_replicas(setup, progress, &sender));
        }
        drop(sender);
        loop {
            match tallies.recv_timeout(PROGRESS_INTERVAL) {
                Ok(tally) => total.add(tally),
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
fn run_replicas(setup: &Setup, progress: &Progress, tallies: &SyncSender<Tally>) {
    loop {
        let index = progress.next_replica.fetch_add(1, Ordering::Relaxed);
        if index >= u64::from(setup.num_replicas) {
            return;
        }
        let Some(tally) = run_replica(setup, index, progress) else {
            return;
        };
        if tallies.send(tally).is_err() {
            return;
        }
    }
}

/// Everything that one replica is asked; nothing where the simulation was stopped.
fn run_replica(setup: &Setup, index: u64, progress: &Progress) -> Option<Tally> {
    let (first, step) = (usize::try_from(index).ok()?, setup.num_replicas as usize);
    let own: Vec<&Arrival> = setup.arrivals.iter().skip(first).step_by(step).collect();
    let mut replica = Replica::new(setup);
    for together in own.chunk_by(|a, b| a.at == b.at) {
        if progress.is_stopped.load(Ordering::Relaxed) {
            return None;
        }
        replica.arrive(together[0].at, together.iter().copied());
        progress
            .num_arrived
            .fetch_add(together.len() as u64, Ordering::Relaxed);
    }
    Some(replica.finish())
}
