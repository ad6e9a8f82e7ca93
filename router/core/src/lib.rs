//! Plait's scheduler: requests, pages and plans, without clock, socket or randomness.
//!
//! Three verbs: [`Scheduler::submit`], [`Scheduler::plan`], [`Scheduler::advance`]. Replicas that step
//! together call [`Scheduler::vote`], [`decide`] and [`Scheduler::apply_decision`] between the last two.
//! The same calls give the same plans, byte for byte.

#![forbid(unsafe_code)]

mod admission;
mod cache_aware;
mod choices;
mod completion;
mod event;
mod eviction_order;
mod fair_share;
mod graph_size;
mod group;
mod held_pages;
mod ids;
mod in_flight;
mod index_list;
mod itl_target;
mod kv_cache;
mod kv_event;
mod launch;
mod least_squares;
mod moved_request;
mod outlook;
mod output_lengths;
mod page_pool;
mod plan;
mod plan_builder;
mod preemption;
mod prefix_hasher;
mod prefix_sharing;
mod prompt_share;
mod queue;
mod queue_limits;
mod replay;
mod replica_router;
mod request;
mod round_robin;
mod running_set;
mod scheduler;
mod served_rate;
mod service_charge;
mod settings;
mod slot_saves;
mod snapshot_pool;
mod state;
mod stats;
mod step_cost;
mod step_errors;
mod step_sizes;
mod step_times;
mod step_work;
mod submit;

pub use event::{Event, FAILED_ROW, FinishReason, Output, StepResult, UnexpectedResult};
pub use graph_size::GraphSize;
pub use group::{DecidedPlan, Decision, Disagreement, Mode, ReplicaTokens, Vote, decide};
pub use ids::{Micros, PageId, RequestId, SlotId, SnapshotId, StepId, TenantId, TokenId};
pub use kv_event::{KvEvent, StoredPage};
pub use moved_request::MovedRequest;
pub use page_pool::PageCounts;
pub use plan::{
    DecodeRow, NewSlot, OtherPage, Plan, PrefillRow, RestoredSlot, SavedSlot, TrimmedSlot,
};
pub use prefix_hasher::{HashSeed, PageHash};
pub use replica_router::{Availability, HashedPrompt, PromptHasher, ReplicaRouter, Route};
pub use request::{PooledTokens, Refusal, Rejected, Request};
pub use scheduler::Scheduler;
pub use settings::{
    Limits, PageSettings, Policy, PoolSize, RuntimeSettings, SchedulerSettings, Settings,
    SettingsError,
};
pub use snapshot_pool::SnapshotCounts;
pub use stats::{Carryover, Counts, Stats};
pub use step_cost::StepCost;
pub use step_times::StepTimeStats;
pub use step_work::StepWork;
