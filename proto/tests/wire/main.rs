//! Claims about the wire.

#![allow(clippy::unwrap_used, reason = "a test that finds nothing fails")]

mod arbitrary;
mod fingerprints;
mod fuzz;
mod golden;
mod golden_files;
mod roundtrip;
mod rules;
