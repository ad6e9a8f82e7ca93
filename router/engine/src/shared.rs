//! State that the engine's threads share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use plait_core::Availability;
use plait_openai::ApiError;
use plait_proto::{ExitCode, Fingerprint};

use crate::clock::Clock;
use crate::link::Link;
use crate::listing::Listing;
use crate::mailbox::{Mail, Mailbox};
use crate::metrics::{EngineMetrics, Metrics, Rejection};
use crate::moved_stream::{MovedStream, MovedStreams};
use crate::output_queue::{MAX_FOR_PYTHON, MAX_FOR_WRITER, OutputQueue, StreamId};
use crate::pending_streams::{Arrival, EndedStream, PendingStreams};
use crate::routes::Routes;
use crate::status::{ReplicaStatus, StatusBoard};

/// What one engine's threads share.
#[derive(Debug)]
pub struct Shared {
    /// From everyone to the writer thread.
    pub output_queue: Arc<OutputQueue>,
    /// From the writer thread to Python: what is not written to a socket.
    pub python_queue: Arc<OutputQueue>,
    /// The engine's phase and health.
    pub status: StatusBoard,
    /// Counters and histograms.
    pub metrics: EngineMetrics,
    /// Streams whose text is being prepared.
    pub pending_streams: PendingStreams,
    /// Which replica has which stream.
    pub routes: Routes,
    /// The configuration's fingerprint that a Hello must carry.
    pub config_fingerprint: OnceLock<Fingerprint>,
    /// The engine's time.
    pub clock: Arc<dyn Clock>,
    replicas: Vec<Arc<ReplicaShared>>,
}

/// Ranks that start in place of lost ones.
#[derive(Debug)]
pub struct NextRanks {
    /// What they dial.
    pub link: Link,
    /// The fingerprint of their configuration.
    pub config: Fingerprint,
}

/// What the threads of one replica share with each other and with everyone.
#[derive(Debug)]
pub struct ReplicaShared {
    /// Its number in the engine.
    pub number: u32,
    /// From everyone to its driver.
    pub mailbox: Mailbox,
    /// From output threads of replicas without ranks to its driver.
    pub moved_streams: MovedStreams,
    /// Its driver has events for which the output thread had no room, and wants to be woken when there is some.
    pub output_is_full: AtomicBool,
    /// Its phase and health.
    pub status: Arc<ReplicaStatus>,
    /// Its counters and histograms.
    pub metrics: Arc<Metrics>,
    /// Its requests, for operators who ask.
    pub listing: Listing,
    /// Of ranks that are about to start.
    next_ranks: Mutex<Option<NextRanks>>,
}

impl ReplicaShared {
    /// These ranks will start.
    pub fn set_next_ranks(&self, ranks: NextRanks) {
        *self.lock_next_ranks() = Some(ranks);
        self.mailbox.put(Mail::Restart);
    }

    /// The ranks that will start.
    pub fn take_next_ranks(&self) -> Option<NextRanks> {
        self.lock_next_ranks().take()
    }

    fn lock_next_ranks(&self) -> MutexGuard<'_, Option<NextRanks>> {
        self.next_ranks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The output thread has taken a batch.
    pub fn made_room(&self) {
        if self.output_is_full.swap(false, Ordering::SeqCst) {
            self.mailbox.wakeup().signal();
        }
    }
}

impl Shared {
    /// All empty, for so many replicas.
    pub fn new(clock: Arc<dyn Clock>, num_replicas: u32, routes: Routes) -> std::io::Result<Self> {
        let output_queue = Arc::new(OutputQueue::new(MAX_FOR_WRITER)?);
        let python_queue = Arc::new(OutputQueue::new(MAX_FOR_PYTHON)?);
        let status = StatusBoard::new(&python_queue, num_replicas);
        let metrics = EngineMetrics::new(num_replicas);
        let replica = |number| {
            Ok(Arc::new(ReplicaShared {
                number,
                mailbox: Mailbox::new()?,
                moved_streams: MovedStreams::default(),
                output_is_full: AtomicBool::new(false),
                status: status.replica(number).clone(),
                metrics: metrics.replica(number).clone(),
                listing: Listing::default(),
                next_ranks: Mutex::default(),
            }))
        };
        let replicas: std::io::Result<_> = (0..num_replicas).map(replica).collect();
        Ok(Self {
            replicas: replicas?,
            status,
            output_queue,
            python_queue,
            metrics,
            pending_streams: PendingStreams::default(),
            routes,
            config_fingerprint: OnceLock::new(),
            clock,
        })
    }

    /// All replicas, by number.
    pub fn replicas(&self) -> &[Arc<ReplicaShared>] {
        &self.replicas
    }

    /// One replica's.
    pub fn replica(&self, number: u32) -> &Arc<ReplicaShared> {
        &self.replicas[number as usize]
    }

    /// Leaves this mail for every replica.
    pub fn tell_all(&self, mail: &Mail) {
        for replica in &self.replicas {
            replica.mailbox.put(mail.clone());
        }
    }

    /// Wakes every driver.
    pub fn wake_all(&self) {
        for replica in &self.replicas {
            replica.mailbox.wakeup().signal();
        }
    }

    /// The client is gone; unknown or ended streams are fine. Records made before may still come.
    pub fn abort(&self, stream: StreamId) {
        if !self.pending_streams.abort(stream)
            && let Some(replica) = self.routes.replica_of(stream)
        {
            self.replica(replica).mailbox.put(Mail::Abort(stream));
        }
    }

    /// The same of a stream that this replica does not have, or no more.
    pub fn abort_elsewhere(&self, stream: StreamId, replica: u32) {
        if self.routes.replica_of(stream) != Some(replica) {
            self.abort(stream);
        } else {
            self.pending_streams.abort(stream);
        }
    }

    /// The same of an operator's end: its client reads the error.
    pub fn end_elsewhere(&self, stream: StreamId, replica: u32, error: ApiError) {
        if self.routes.replica_of(stream) != Some(replica) {
            self.end_stream(stream, error);
        } else {
            self.end_pending(stream, error);
        }
    }

    /// Gives a stream to the driver of its target, or back if that has ended.
    pub fn hand_over(&self, moved: MovedStream) -> Result<(), MovedStream> {
        let target = self.replica(moved.target);
        target.moved_streams.put(moved)?;
        target.mailbox.wakeup().signal();
        Ok(())
    }

    /// Whether a replica takes streams from now on. Those that wait elsewhere for ranks may go there.
    pub fn set_availability(&self, replica: u32, availability: Availability) {
        self.routes.set_availability(replica, availability);
        if availability == Availability::Open {
            self.wake_all();
        }
    }

    /// Ends a stream with an error that its client reads; unknown or ended streams are fine.
    pub fn end_stream(&self, stream: StreamId, error: ApiError) {
        if let Some(error) = self.end_pending(stream, error)
            && let Some(replica) = self.routes.replica_of(stream)
        {
            let error = Box::new(error);
            self.replica(replica)
                .mailbox
                .put(Mail::EndStream { stream, error });
        }
    }

    /// Ends a stream that no driver has. Gives the error back if one may have it.
    fn end_pending(&self, stream: StreamId, error: ApiError) -> Option<ApiError> {
        match self.pending_streams.end(stream, error) {
            EndedStream::Unanswered(error) => {
                self.output_queue.put_error(stream, &error);
                None
            }
            EndedStream::Noted => None,
            EndedStream::Elsewhere(error) => Some(error),
        }
    }

    /// Takes a stream from the pending ones that no driver has had; returns whether its client still waits.
    pub fn leave_pending(&self, stream: StreamId) -> bool {
        let is_wanted = self.pending_streams.leave(stream);
        self.wake_if_drained();
        is_wanted
    }

    /// Takes a stream from the pending ones that another driver had.
    pub fn arrive(&self, stream: StreamId) -> Arrival {
        let arrival = self.pending_streams.arrive(stream);
        self.wake_if_drained();
        arrival
    }

    /// Drivers that drain wait for the last pending stream.
    fn wake_if_drained(&self) {
        if self.pending_streams.is_drained() {
            self.wake_all();
        }
    }

    /// Rejects the streams that have not reached a driver, and every later one.
    pub fn reject_pending(&self) {
        let error = self.status.refusal();
        for stream in self.pending_streams.clear() {
            self.metrics.rejections.count(Rejection::NotReady);
            self.output_queue.put_error(stream, &error);
        }
    }
}

/// Marks the engine as failed when its thread panics: a bug must not look like a slow rank.
pub struct Sentinel(pub Arc<Shared>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("unnamed");
            let reason = format!(
                "the engine's thread {name} panicked, which is a bug; stderr has the stack"
            );
            self.0.status.fail_all(ExitCode::Bug, &reason);
            self.0.reject_pending();
        }
    }
}
