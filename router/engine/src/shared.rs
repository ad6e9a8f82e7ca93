//! State that the engine's threads share.

use std::sync::{Arc, OnceLock};

use plait_proto::{ExitCode, Fingerprint};

use crate::clock::Clock;
use crate::mailbox::Mailbox;
use crate::metrics::{Metrics, Rejection};
use crate::output_queue::OutputQueue;
use crate::pending_streams::PendingStreams;
use crate::status::StatusBoard;

/// What one engine's threads share.
#[derive(Debug)]
pub struct Shared {
    /// From everyone to the driver.
    pub mailbox: Mailbox,
    /// From everyone to Python.
    pub output_queue: Arc<OutputQueue>,
    /// The engine's phase and health.
    pub status: StatusBoard,
    /// Counters and histograms.
    pub metrics: Metrics,
    /// Streams whose text is being prepared.
    pub pending_streams: PendingStreams,
    /// The configuration's fingerprint that a Hello must carry.
    pub config_fingerprint: OnceLock<Fingerprint>,
    /// The engine's time.
    pub clock: Arc<dyn Clock>,
}

impl Shared {
    /// All empty.
    pub fn new(clock: Arc<dyn Clock>) -> std::io::Result<Self> {
        let output_queue = Arc::new(OutputQueue::new()?);
        Ok(Self {
            mailbox: Mailbox::new()?,
            status: StatusBoard::new(output_queue.clone()),
            output_queue,
            metrics: Metrics::new(),
            pending_streams: PendingStreams::default(),
            config_fingerprint: OnceLock::new(),
            clock,
        })
    }

    /// Rejects the streams that have not reached the driver, and every later one.
    pub fn reject_pending(&self) {
        let error = self.status.refusal();
        for stream in self.pending_streams.clear() {
            self.metrics.requests.reject(Rejection::NotReady);
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
            self.0.status.fail(ExitCode::Bug, &reason);
            self.0.reject_pending();
        }
    }
}
