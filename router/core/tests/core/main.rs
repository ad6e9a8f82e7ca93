//! The scheduler against a device that computes what its plans say.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod allocations;
mod device;
mod drafts;
mod elsewhere;
mod explorer;
mod fairness;
mod group;
mod oracle;
mod pages;
mod prefix;
mod properties;
mod queue;
mod rules;
mod time_target;
mod world;
