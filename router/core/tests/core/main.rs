//! The scheduler against a device that computes what its plans say.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod allocations;
mod bugs_of_other_schedulers;
mod cache_aware;
mod cache_kinds;
mod choices;
mod explorer;
mod failed_rows;
mod fairness;
mod fake_device;
mod fixtures;
mod group;
mod harness;
mod itl_target;
mod kv_events;
mod late_masks;
mod masks;
mod moves;
mod oracle;
mod overload;
mod pacing;
mod planning_rules;
mod preemption;
mod prefix_cache;
mod prefix_sharing;
mod priority;
mod properties;
mod queue;
mod replay;
mod routing;
mod settings_mirror;
mod slot_memory;
mod slot_state;
mod spec;
mod speculative_tokens;
mod step_cost;
