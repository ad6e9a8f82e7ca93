//! Constraints compiled and followed, over a small vocabulary.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod bombs;
mod cache;
mod constraints;
mod forms;
mod masks;
mod refusals;
mod support;
mod thoughts;
