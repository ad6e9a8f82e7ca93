//! The engine's clock: microseconds since the engine started.

use std::time::{Duration, Instant};

use plait_core::Micros;

/// A monotonic clock with its own zero.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that reads zero now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Now.
    pub fn now(&self) -> Micros {
        Micros(micros(self.0.elapsed()))
    }
}

/// Whole microseconds of a duration.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("a process does not run for half a million years")
}

/// From `start` to `end`; nothing where the order is reversed.
pub fn since(start: Micros, end: Micros) -> Duration {
    Duration::from_micros(end.0.saturating_sub(start.0))
}
