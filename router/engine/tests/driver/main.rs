//! The engine against ranks that speak the real protocol over real sockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod choices;
mod failures;
mod fake_worker;
mod flow;
mod group_graphs;
mod group_hangs;
mod groups;
mod harness;
mod kv_events;
mod manual_clock;
mod masks;
mod model;
mod moved_streams;
mod played_engine;
mod recovery;
mod remote_ranks;
mod replicas;
mod step_trace;
mod store;
mod streams;
