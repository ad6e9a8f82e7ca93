//! Panics of libraries that read what users wrote.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    /// Calls of [`catch_panic`] under way on this thread.
    static NUM_CAUGHT: Cell<u32> = const { Cell::new(0) };
}

/// Runs a library's code on a user's input; `None` if it panics. The panic ends that request, not the
/// thread, and writes nothing: users could fill the log. minijinja 3.0.5 panics at `''[::-1]`, onig at its
/// retry limit.
///
/// `work` must leave nothing half changed that is used afterwards.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    silence_caught_panics();
    NUM_CAUGHT.set(NUM_CAUGHT.get() + 1);
    let result = catch_unwind(AssertUnwindSafe(work)).ok();
    NUM_CAUGHT.set(NUM_CAUGHT.get() - 1);
    result
}

/// Puts a hook before the process's own, which prints a message and a backtrace.
fn silence_caught_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if NUM_CAUGHT.get() == 0 {
                print(panic);
            }
        }));
    });
}
