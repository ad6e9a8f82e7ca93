//! Plait's scheduler, driven by traces in virtual time.
//!
//! It is the scheduler that serves, with a cost model in place of a worker.

#![forbid(unsafe_code)]

mod cost;
mod error;
mod fairness;
mod files;
mod group;
mod hardware;
mod model;
mod replica;
mod report;
mod routes;
mod run_metrics;
mod settings;
mod simulate;
mod time_units;
mod trace;

pub use cost::CostModel;
pub use error::SimError;
pub use model::ModelSize;
pub use report::{
    Composition, Percentiles, PrefillTokens, Report, Resolved, Summary, TenantSummary,
};
pub use settings::{Cluster, Load, Routing, Settings, Setup, Source};
pub use simulate::{OnProgress, simulate};
pub use trace::{Arrival, Content, Poisson, Profile, Scenario};
