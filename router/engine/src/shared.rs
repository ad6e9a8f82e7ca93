//! What the engine's threads share.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use plait_proto::{ExitCode, Fingerprint};

use crate::clock::Clock;
use crate::group::GroupPatience;
use crate::intake::Intake;
use crate::mailbox::Mailbox;
use crate::metrics::{Metrics, Rejection};
use crate::outbox::Outbox;
use crate::status::StatusBoard;

/// One of each for an engine.
#[derive(Debug)]
pub struct Shared {
    /// From everyone to the driver.
    pub mailbox: Mailbox,
    /// From everyone to Python.
    pub outbox: Arc<Outbox>,
    /// Where the engine stands.
    pub status: StatusBoard,
    /// What it counted.
    pub metrics: Metrics,
    /// Streams whose text is being prepared.
    pub intake: Intake,
    /// What a Hello must carry.
    pub config_fingerprint: OnceLock<Fingerprint>,
    /// The engine's time.
    pub clock: Clock,
}

impl Shared {
    /// All empty, the clock at zero.
    pub fn new() -> std::io::Result<Self> {
        let outbox = Arc::new(Outbox::new()?);
        Ok(Self {
            mailbox: Mailbox::new()?,
            status: StatusBoard::new(outbox.clone()),
            outbox,
            metrics: Metrics::new(),
            intake: Intake::default(),
            config_fingerprint: OnceLock::new(),
            clock: Clock::start(),
        })
    }

    /// Refuses the streams that have not reached the driver, and every later one.
    pub fn turn_away(&self) {
        let error = self.status.refusal();
        for stream in self.intake.clear() {
            self.metrics.requests.reject(Rejection::NotReady);
            self.outbox.put_error(stream, &error);
        }
    }
}

/// How long the engine waits for others before it says so.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// A step without a result is stuck after this long,
    pub step: Duration,
    /// and this much for each of its tokens;
    pub step_token: Duration,
    /// so much later it is given up, in a group at once.
    pub stuck: Duration,
    /// A rank that was silent this long is late.
    pub heartbeat: Duration,
    /// A driver that works at one turn for so long, or waits so much longer than it meant to, hangs.
    pub turn: Duration,
    /// For the ranks' Byes.
    pub bye: Duration,
    /// For the Fail of a rank whose process has ended, which may still be on its way.
    pub last_words: Duration,
    /// For the other engines of a group.
    pub group: GroupPatience,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            step: Duration::from_secs(60),
            step_token: Duration::from_millis(100),
            stuck: Duration::from_secs(60),
            heartbeat: Duration::from_millis(1500),
            turn: Duration::from_secs(60),
            bye: Duration::from_secs(5),
            last_words: Duration::from_millis(200),
            group: GroupPatience::default(),
        }
    }
}

/// Marks the engine as failed when its thread panics: a bug must not look like patience.
pub struct Sentinel(pub Arc<Shared>);

impl Drop for Sentinel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("unnamed");
            let reason = format!(
                "the engine's thread {name} panicked, which is a bug; stderr has the place"
            );
            self.0.status.fail(ExitCode::Bug, &reason);
            self.0.turn_away();
        }
    }
}
