//! Rates of one accelerator.

use std::path::Path;

use serde::Deserialize;

use crate::error::SimError;
use crate::files::{BuiltIn, describe};

const BUILT_IN: [BuiltIn; 2] = [
    ("h200", include_str!("../data/hardware/h200.json")),
    ("b200", include_str!("../data/hardware/b200.json")),
];

/// One accelerator: the rates it reaches, and the overhead of a step.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Its name.
    pub name: String,
    /// Source of the figures.
    pub source: String,
    /// Of large GEMMs, by number format.
    pub flops_per_second: Flops,
    /// Of prefill attention.
    pub attention_flops_per_second: f64,
    /// Memory bandwidth.
    pub bytes_per_second: f64,
    /// Memory size.
    pub memory_bytes: f64,
    /// Fixed cost of a step: launches, sampling, messages.
    pub step_overhead_seconds: f64,
    /// Latency of one all-reduce between a replica's accelerators.
    pub link_latency_seconds: f64,
    /// Tensor bytes that an all-reduce processes per second.
    pub link_bytes_per_second: f64,
}

/// Floating point operations a second, by number format.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flops {
    /// 16 bits.
    pub bfloat16: f64,
    /// 8 bits.
    pub float8: f64,
}

impl Hardware {
    /// A built-in one (`h200`, `b200`), or the file at this path.
    pub fn named(name: &str) -> Result<Self, SimError> {
        let hardware: Self = describe("--hardware", name, &BUILT_IN)?;
        hardware.check(Path::new(name))?;
        Ok(hardware)
    }

    fn check(&self, path: &Path) -> Result<(), SimError> {
        let rates = [
            ("flops_per_second.bfloat16", self.flops_per_second.bfloat16),
            ("flops_per_second.float8", self.flops_per_second.float8),
            (
                "attention_flops_per_second",
                self.attention_flops_per_second,
            ),
            ("bytes_per_second", self.bytes_per_second),
            ("memory_bytes", self.memory_bytes),
            ("link_bytes_per_second", self.link_bytes_per_second),
        ];
        let times = [
            ("step_overhead_seconds", self.step_overhead_seconds),
            ("link_latency_seconds", self.link_latency_seconds),
        ];
        let bad_rate = rates
            .iter()
            .find(|(_, rate)| !(*rate > 0.0 && rate.is_finite()));
        let bad_time = times.iter().find(|(_, time)| !(0.0..=10.0).contains(time));
        let problem = match (bad_rate, bad_time) {
            (Some((name, rate)), _) => format!("{name} is {rate}; a number over 0 is needed"),
            (_, Some((name, time))) => format!("{name} is {time}; allowed: 0 to 10"),
            _ => return Ok(()),
        };
        Err(SimError::content(path, problem))
    }
}
