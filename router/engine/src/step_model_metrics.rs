//! Metrics of the step-time model and of the ITL target that needs it.

use std::sync::atomic::AtomicU64;

use plait_core::{Counts, StepTimeStats};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::metrics::{labelled, registered, set_counter};

/// In the order of [`StepTimeStats::coefficients`].
const TERMS: [&str; 5] = [
    "step",
    "prefill_token",
    "prefill_pair",
    "decode_row",
    "decode_kv_token",
];

/// Copied from the scheduler after each step.
#[derive(Debug)]
pub struct StepModelMetrics {
    seconds: [Gauge<f64, AtomicU64>; 5],
    margin: Gauge<f64, AtomicU64>,
    hiccups: Counter,
    over_target: Counter,
    admissions_over_target: Counter,
}

impl StepModelMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        Self {
            seconds: labelled(
                registry,
                "plait_step_model_seconds",
                "Step-time model: expected seconds of a step and of each unit that it computes",
                "term",
                TERMS,
            ),
            margin: registered(
                registry,
                "plait_step_model_margin_ratio",
                "Step-time model: by how much 99 of 100 mixed steps exceed their expected time at most, \
                 as a share of --itl-target-ms or of that time",
            ),
            hiccups: registered(
                registry,
                "plait_step_hiccups",
                "Steps that took twice their expected time or longer, while the steps after them did not",
            ),
            over_target: registered(
                registry,
                "plait_itl_target_missed",
                "Steps whose decode rows alone were expected to take longer than --itl-target-ms",
            ),
            admissions_over_target: registered(
                registry,
                "plait_itl_target_waits",
                "Plans that admitted nobody because --itl-target-ms leaves no time for another decoder",
            ),
        }
    }

    /// Copies what the scheduler has learned and counted.
    pub fn copy(&self, model: &StepTimeStats, counts: &Counts) {
        for (gauge, micros) in self.seconds.iter().zip(model.coefficients) {
            gauge.set(micros / 1e6);
        }
        self.margin.set(model.margin);
        set_counter(&self.hiccups, model.num_hiccups);
        set_counter(&self.over_target, counts.num_decodes_over_target);
        set_counter(
            &self.admissions_over_target,
            counts.num_admissions_over_target,
        );
    }
}
