//! Plait's scheduler: requests, pages and plans, without clock, socket or randomness.
//!
//! Three verbs: [`Scheduler::submit`], [`Scheduler::plan`], [`Scheduler::advance`].
//! The same calls give the same plans, byte for byte.

mod event;
mod ids;
mod plan;
mod request;
mod settings;

pub use event::{Event, FinishReason, Output, StepResult};
pub use ids::{Micros, PageId, RequestId, SlotId, StepId, TokenId};
pub use plan::{DecodeRow, NewSlot, Plan, PrefillRow};
pub use request::{Refusal, Request, Sampling};
pub use settings::{Settings, SettingsError};
