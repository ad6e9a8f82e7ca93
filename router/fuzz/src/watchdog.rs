//! Ends the process if an input takes too long: a hang cannot be left otherwise.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// What this process may compute for one input. Computing, not waiting: a busy machine is no hang.
const MAX_CPU_MILLIS: u64 = 20_000;
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Of a process that hung.
pub const HUNG: i32 = 3;

static BEGAN_MILLIS: AtomicU64 = AtomicU64::new(u64::MAX);

/// What this process has computed.
pub fn cpu_millis() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec * 1000 + time.tv_nsec / 1_000_000).expect("time is not negative")
}

/// An input begins.
pub fn begin() {
    BEGAN_MILLIS.store(cpu_millis(), Relaxed);
}

/// It has ended.
pub fn end() {
    BEGAN_MILLIS.store(u64::MAX, Relaxed);
}

/// Watches from a thread of its own until the process ends.
pub fn start() {
    thread::spawn(|| {
        loop {
            thread::sleep(LOOK_INTERVAL);
            if cpu_millis().saturating_sub(BEGAN_MILLIS.load(Relaxed)) > MAX_CPU_MILLIS {
                std::process::exit(HUNG);
            }
        }
    });
}
