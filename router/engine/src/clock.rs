//! The engine's time, in microseconds since it started.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use plait_core::Micros;

/// Where the engine's time comes from.
pub trait Clock: Debug + Send + Sync {
    /// Time since the engine started; never goes back.
    fn now(&self) -> Micros;

    /// How long the driver may block when its next deadline is `timeout` away; None has no limit.
    ///
    /// A clock that jumps returns None and calls [`crate::Engine::wake`] after each jump.
    fn limit_on_blocking(&self, timeout: Option<Duration>) -> Option<Duration> {
        timeout
    }
}

/// The system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl SystemClock {
    /// A clock that reads zero now.
    pub fn start() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Micros {
        Micros(micros(self.0.elapsed()))
    }
}

/// Whole microseconds of a duration.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("a process does not run for 500,000 years")
}

/// From `start` to `end`; zero if the order is reversed.
pub fn since(start: Micros, end: Micros) -> Duration {
    Duration::from_micros(end.0.saturating_sub(start.0))
}
