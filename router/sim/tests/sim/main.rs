//! Claims about traces, runs in virtual time, and the ITL target.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod descriptions;
mod runs;
mod scenarios;
mod setup;
mod target;
mod traces;
