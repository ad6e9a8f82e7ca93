//! Plait's scheduler: requests, pages and plans, without clock, socket or randomness.
//!
//! Three verbs: [`Scheduler::submit`], [`Scheduler::plan`], [`Scheduler::advance`].
//! The same calls give the same plans, byte for byte.

#![forbid(unsafe_code)]

mod draft;
mod event;
mod flight;
mod ids;
mod landing;
mod launch;
mod pages;
mod plan;
mod queue;
mod reclaim;
mod request;
mod roster;
mod scheduler;
mod settings;
mod state;
mod stats;
mod step_cost;
mod time_target;
mod turns;

pub use event::{Event, FinishReason, Output, StepResult, UnexpectedResult};
pub use ids::{Micros, PageId, RequestId, SlotId, StepId, TokenId};
pub use pages::PageCounts;
pub use plan::{DecodeRow, NewSlot, Plan, PrefillRow};
pub use request::{Refusal, Request, Sampling};
pub use scheduler::Scheduler;
pub use settings::{Settings, SettingsError};
pub use stats::{Carryover, Counts, Stats};
pub use step_cost::{StepCost, StepWork};
