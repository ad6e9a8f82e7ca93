//! Plait's scheduler: requests, pages and plans, without clock, socket or randomness.
//!
//! Three verbs: [`Scheduler::submit`], [`Scheduler::plan`], [`Scheduler::advance`].
//! In a group of replicas that step together, [`Scheduler::vote`], [`decide`] and [`Scheduler::apply_decision`]
//! come between the last two. The same calls give the same plans, byte for byte.

#![forbid(unsafe_code)]

mod admission;
mod draft;
mod event;
mod flight;
mod group;
mod ids;
mod landing;
mod launch;
mod pages;
mod plan;
mod prefix;
mod queue;
mod reclaim;
mod request;
mod ring;
mod roster;
mod scheduler;
mod settings;
mod shares;
mod state;
mod stats;
mod step_cost;
mod time_target;
mod turns;

pub use event::{Event, FinishReason, Output, StepResult, UnexpectedResult};
pub use group::{DecidedPlan, Decision, Disagreement, Mode, Vote, decide};
pub use ids::{Micros, PageId, RequestId, SlotId, StepId, TenantId, TokenId};
pub use pages::PageCounts;
pub use plan::{DecodeRow, NewSlot, Plan, PrefillRow};
pub use prefix::HashSeed;
pub use request::{Refusal, Request, Sampling};
pub use scheduler::Scheduler;
pub use settings::{Policy, Settings, SettingsError};
pub use stats::{Carryover, Counts, Stats};
pub use step_cost::{StepCost, StepWork};
