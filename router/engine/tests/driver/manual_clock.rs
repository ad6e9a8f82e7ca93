//! A clock that a test advances.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use plait_core::Micros;
use plait_engine::Clock;

/// Starts at zero.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Wake the engine after this.
    pub fn advance(&self, by: Duration) {
        let micros = u64::try_from(by.as_micros()).unwrap();
        self.0.fetch_add(micros, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Micros {
        Micros(self.0.load(Ordering::SeqCst))
    }

    fn limit_on_blocking(&self, _timeout: Option<Duration>) -> Option<Duration> {
        None
    }
}
