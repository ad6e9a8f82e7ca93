//! Panics of libraries that read what users wrote.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a library's code on a user's input. `None` is a panic in it: the end of that request, not of
/// the thread that serves everyone (minijinja 3.0.5 panics at `''[::-1]`, onig at its retry limit).
///
/// `work` must not leave anything half changed that is used afterwards.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
