//! How long the engine waits for its ranks and for other engines.

use std::time::Duration;

use crate::group::GroupTimeouts;

/// Limits on waiting.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// A step without a result is overdue after this, plus [`Timeouts::step_token`] a token.
    pub step: Duration,
    /// Added for each token of the step, padding included.
    pub step_token: Duration,
    /// Grace period from overdue to given up. A group gives up at once.
    pub stuck_grace: Duration,
    /// A rank without a message for this long is late.
    pub heartbeat: Duration,
    /// The driver hangs when one pass of its loop takes this long.
    pub watchdog: Duration,
    /// For the ranks' Byes.
    pub bye: Duration,
    /// Grace period for the Fail of a rank whose process has ended: it may still be on its way.
    pub error_grace: Duration,
    /// For the other engines of a group.
    pub group: GroupTimeouts,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            step: Duration::from_secs(60),
            step_token: Duration::from_millis(100),
            stuck_grace: Duration::from_secs(60),
            heartbeat: Duration::from_millis(1500),
            watchdog: Duration::from_secs(60),
            bye: Duration::from_secs(5),
            error_grace: Duration::from_millis(200),
            group: GroupTimeouts::default(),
        }
    }
}
