//! Panics of libraries that read what users wrote.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a library's code on a user's input; `None` if it panics. The panic ends that request, not the
/// thread. minijinja 3.0.5 panics at `''[::-1]`, onig at its retry limit.
///
/// `work` must leave nothing half changed that is used afterwards.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
