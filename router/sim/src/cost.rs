//! Step time: a roofline of hardware and model, or a fit to measured steps.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use plait_core::{Micros, Plan, StepCost, StepWork};
use serde::Deserialize;

use crate::error::SimError;
use crate::files::next_line;
use crate::hardware::Hardware;
use crate::model::ModelCost;
use crate::time_units::micros;

/// The time of any plan's step.
#[derive(Clone, Debug)]
pub enum CostModel {
    /// From rates and sizes.
    Roofline(Box<Roofline>),
    /// From measured steps.
    Fitted(Box<StepCost>),
}

impl CostModel {
    /// Time of this plan's step, at least a microsecond.
    pub fn time(&self, plan: &Plan) -> Micros {
        let work = StepWork::of(plan);
        let time = micros(match self {
            Self::Roofline(roofline) => roofline.seconds(&work, num_sampled(plan)) * 1e6,
            Self::Fitted(cost) => cost.estimate(&work),
        });
        time.max(Micros(1))
    }

    /// Time of a step of replicas that share their experts, one plan of each.
    pub fn group_time(&self, plans: &[Plan]) -> Micros {
        let Self::Roofline(roofline) = self else {
            unreachable!("the settings refuse a step trace for a group");
        };
        let parts = plans
            .iter()
            .map(|plan| (StepWork::of(plan), num_sampled(plan)));
        let parts: Vec<_> = parts.collect();
        micros(roofline.group_seconds(&parts) * 1e6).max(Micros(1))
    }
}

fn num_sampled(plan: &Plan) -> f64 {
    let num_last_chunks = plan.prefill.iter().filter(|row| row.is_last_chunk).count();
    (num_last_chunks + plan.decode.len()) as f64
}

/// A step reads its weights once or multiplies them with every token, whichever takes longer. The same
/// holds for the output head, and for the KV and its attention. These phases do not overlap.
#[derive(Clone, Debug)]
pub struct Roofline {
    hardware: Hardware,
    model: ModelCost,
    num_gpus: f64,
}

impl Roofline {
    /// A replica of `num_gpus` accelerators that share every layer.
    pub fn new(hardware: Hardware, model: ModelCost, num_gpus: u32) -> Self {
        Self {
            hardware,
            model,
            num_gpus: num_gpus.into(),
        }
    }

    fn seconds(&self, work: &StepWork, num_sampled: f64) -> f64 {
        let num_tokens = num_tokens(work);
        let model = &self.model;
        let layers = self.gemm_seconds(
            model.parameters_read(num_tokens),
            model.parameters_per_token() * num_tokens,
        );
        self.hardware.step_overhead_seconds
            + (layers + self.head_and_attention(work, num_sampled)) / self.num_gpus
            + self.all_reduces(num_tokens)
    }

    /// Each replica computes its dense parts, and all wait for the slowest. The experts are divided among all
    /// accelerators, and each row travels to them and back.
    fn group_seconds(&self, parts: &[(StepWork, f64)]) -> f64 {
        let model = &self.model;
        let own_parts = parts.iter().map(|(work, num_sampled)| {
            let dense = model.dense_parameters;
            let layers = self.gemm_seconds(dense, dense * num_tokens(work));
            (layers + self.head_and_attention(work, *num_sampled)) / self.num_gpus
                + self.all_reduces(num_tokens(work)) / 2.0
        });
        let all_tokens: f64 = parts.iter().map(|(work, _)| num_tokens(work)).sum();
        let read = model.parameters_read(all_tokens) - model.dense_parameters;
        let per_token = model.parameters_per_token() - model.dense_parameters;
        let experts = self.gemm_seconds(read, per_token * all_tokens);
        self.hardware.step_overhead_seconds
            + own_parts.fold(0.0, f64::max)
            + experts / (self.num_gpus * parts.len() as f64)
            + self.exchanges(all_tokens)
    }

    fn head_and_attention(&self, work: &StepWork, num_sampled: f64) -> f64 {
        let model = &self.model;
        let head = if num_sampled > 0.0 {
            self.gemm_seconds(model.head_parameters, model.head_parameters * num_sampled)
        } else {
            0.0
        };
        head + self.prefill_attention(work) + self.decode_attention(work)
    }

    /// Seconds of GEMMs that read `num_read` parameters and do `num_macs` multiply-adds.
    fn gemm_seconds(&self, num_read: f64, num_macs: f64) -> f64 {
        let rates = self.hardware.flops_per_second;
        let flops = if self.model.is_float8() {
            rates.float8
        } else {
            rates.bfloat16
        };
        let reading = num_read * self.model.weight_bytes / self.hardware.bytes_per_second;
        reading.max(2.0 * num_macs / flops)
    }

    fn prefill_attention(&self, work: &StepWork) -> f64 {
        work.num_prefill_pairs as f64 * self.model.prefill_flops_per_pair
            / self.hardware.attention_flops_per_second
    }

    fn decode_attention(&self, work: &StepWork) -> f64 {
        let reading = self.model.kv_bytes_per_token / self.hardware.bytes_per_second;
        let computing = self.model.decode_flops_per_pair / self.hardware.attention_flops_per_second;
        work.num_decode_kv_tokens as f64 * reading.max(computing)
    }

    /// Two per layer, if there is more than one accelerator.
    fn all_reduces(&self, num_tokens: f64) -> f64 {
        if self.num_gpus == 1.0 {
            return 0.0;
        }
        self.exchanges(num_tokens)
    }

    /// Two per layer: an all-reduce each, or an all-gather and a reduce-scatter.
    fn exchanges(&self, num_tokens: f64) -> f64 {
        let bytes = 2.0 * num_tokens * self.model.hidden_size;
        let seconds =
            self.hardware.link_latency_seconds + bytes / self.hardware.link_bytes_per_second;
        2.0 * self.model.num_layers * seconds
    }
}

fn num_tokens(work: &StepWork) -> f64 {
    (work.num_prefill_tokens + work.num_decode_rows) as f64
}

/// One measured step.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StepRecord {
    prefill_tokens: u64,
    prefill_pairs: u64,
    decode_rows: u64,
    decode_kv_tokens: u64,
    seconds: f64,
}

/// Fewer steps cannot tell five coefficients apart.
const MIN_RECORDS: usize = 10;
/// Longest plausible step.
const MAX_SECONDS: f64 = 3600.0;

/// Fits a run's step trace, one JSON object per line.
pub fn fit(path: &Path) -> Result<StepCost, SimError> {
    let file = File::open(path).map_err(|source| SimError::File {
        path: path.to_owned(),
        source,
    })?;
    let mut file = BufReader::new(file);
    let mut steps = Vec::new();
    for number in 1.. {
        let wrong = |problem| SimError::line(path, number, problem);
        let Some(line) = next_line(&mut file).map_err(wrong)? else {
            break;
        };
        steps.push(step_record(&line).map_err(wrong)?);
    }
    if steps.len() < MIN_RECORDS {
        let problem = format!(
            "it holds {} steps; at least {MIN_RECORDS} are needed",
            steps.len()
        );
        return Err(SimError::content(path, problem));
    }
    Ok(StepCost::fitted(&steps))
}

fn step_record(line: &[u8]) -> Result<(StepWork, Micros), String> {
    let record: StepRecord = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    if !(record.seconds > 0.0 && record.seconds <= MAX_SECONDS) {
        return Err(format!(
            "seconds is {}; allowed: over 0 and up to {MAX_SECONDS}",
            record.seconds
        ));
    }
    let work = StepWork {
        num_prefill_tokens: record.prefill_tokens,
        num_prefill_pairs: record.prefill_pairs,
        num_decode_rows: record.decode_rows,
        num_decode_kv_tokens: record.decode_kv_tokens,
    };
    Ok((work, micros(record.seconds * 1e6)))
}
