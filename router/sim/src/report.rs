//! The results of a simulation, as JSON.

use serde::Serialize;

use crate::fairness::fair_shares;
use crate::run_metrics::{Bin, RunMetrics, TenantMetrics};
use crate::settings::Setup;
use crate::time_units::seconds;
use crate::trace::num_distinct_tokens;

/// All results of a run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The figures.
    pub summary: Summary,
    /// By tenant.
    pub tenants: Vec<TenantSummary>,
    /// Settings that were left open, as they were used.
    pub resolved: Resolved,
    /// Pairs of an ITL in seconds and the share of longer ones, share first.
    pub itl_tail: Vec<(f64, f64)>,
    /// Steps over time.
    pub composition: Composition,
}

/// `summary.json` without its settings.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// From arrival to first token.
    pub ttft_seconds: Percentiles,
    /// Between tokens of a request.
    pub itl_seconds: Percentiles,
    /// From arrival to last token.
    pub e2e_seconds: Percentiles,
    /// Output tokens a second, from the first arrival to the last token.
    pub output_tokens_per_second: f64,
    /// Share of mixed steps.
    pub mixed_share: f64,
    /// Share of prompt tokens that were cached.
    pub prefix_hit_ratio: f64,
    /// Prefill by cause.
    pub prefill_tokens: PrefillTokens,
    /// Preemptions.
    pub num_preemptions: u64,
    /// Prefills that went first because they had waited too long.
    pub num_starvation_grants: u64,
    /// Requests that arrived.
    pub num_requests: u64,
    /// Rejected requests.
    pub num_refused: u64,
    /// Rejected requests that exceed context or pool. The others found a full queue.
    pub num_too_long: u64,
    /// Output tokens.
    pub num_output_tokens: u64,
    /// Steps of all replicas.
    pub num_steps: u64,
    /// From the first arrival to the last token.
    pub duration_seconds: f64,
}

/// Prefill tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PrefillTokens {
    /// That were computed.
    pub computed: u64,
    /// Those of them that a preemption made necessary.
    pub recomputed: u64,
    /// Of all prompts that arrived, those of equal prefixes counted once.
    pub distinct: u64,
}

/// What one tenant asked for and got.
#[derive(Clone, Debug, Serialize)]
pub struct TenantSummary {
    /// Which tenant.
    pub tenant: u32,
    /// Requests that arrived.
    pub num_requests: u64,
    /// Rejected requests.
    pub num_refused: u64,
    /// From arrival to first token.
    pub ttft_seconds: Percentiles,
    /// Between tokens of a request.
    pub itl_seconds: Percentiles,
    /// Prompts with a first token, and output tokens, up to the last arrival.
    pub num_served_tokens: u64,
    /// As many by max-min fairness, of all that was served up to then.
    pub num_fair_tokens: u64,
}

/// Nearest-rank percentiles; zeros without values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// 50%.
    pub p50: f64,
    /// 90%.
    pub p90: f64,
    /// 99%.
    pub p99: f64,
    /// 100%.
    pub max: f64,
}

/// Settings that were left open, as they were used.
#[derive(Debug, Serialize)]
pub struct Resolved {
    /// Pages of each replica.
    pub num_pages: u32,
    /// Longest prompt plus output.
    pub max_model_len: u32,
    /// Pages kept free at admission.
    pub watermark: u32,
    /// Tokens of one request's chunk at most.
    pub long_prefill_token_threshold: u32,
}

/// Steps over time, all replicas together, one number for each interval.
#[derive(Debug, Serialize)]
pub struct Composition {
    /// Length of an interval.
    pub bin_seconds: f64,
    /// Prefill tokens a second.
    pub prefill_tokens_per_second: Vec<f64>,
    /// Decode rows a second.
    pub decode_tokens_per_second: Vec<f64>,
    /// Share of the replicas' time in steps that only prefill.
    pub prefill_share: Vec<f64>,
    /// In steps that only decode.
    pub decode_share: Vec<f64>,
    /// In steps that do both.
    pub mixed_share: Vec<f64>,
}

impl Report {
    /// From the replicas' measurements together.
    pub fn new(setup: &Setup, mut metrics: RunMetrics) -> Self {
        metrics.e2e.sort_unstable();
        for tenant in metrics.tenants.values_mut() {
            tenant.ttft.sort_unstable();
            tenant.itl.sort_unstable();
        }
        let itl = merged(&metrics, |tenant| &tenant.itl);
        Self {
            summary: Summary::new(&metrics, &itl, num_distinct_tokens(&setup.arrivals)),
            tenants: tenant_summaries(&metrics),
            resolved: Resolved {
                num_pages: setup.scheduler.runtime.num_pages,
                max_model_len: setup.scheduler.runtime.max_model_len,
                watermark: setup.limits.watermark,
                long_prefill_token_threshold: setup.limits.long_prefill_token_threshold,
            },
            itl_tail: tail_quantiles(&itl),
            composition: Composition::new(&metrics, setup.num_replicas),
        }
    }

    /// The JSON.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and names only")
    }
}

impl Summary {
    fn new(metrics: &RunMetrics, itl: &[u64], num_distinct_tokens: u64) -> Self {
        let counts = &metrics.counts;
        let duration = seconds(metrics.end.0);
        Self {
            ttft_seconds: Percentiles::of(&merged(metrics, |tenant| &tenant.ttft)),
            itl_seconds: Percentiles::of(itl),
            e2e_seconds: Percentiles::of(&metrics.e2e),
            output_tokens_per_second: counts.num_output_tokens as f64 / duration.max(1e-6),
            mixed_share: counts.mixed_share(),
            prefix_hit_ratio: counts.prefix_hit_ratio(),
            prefill_tokens: PrefillTokens {
                computed: counts.num_prefill_tokens,
                recomputed: counts.num_recomputed_tokens,
                distinct: num_distinct_tokens,
            },
            num_preemptions: counts.num_preemptions,
            num_starvation_grants: counts.num_starvation_grants,
            num_requests: counts.num_requests,
            num_refused: counts.num_refused,
            num_too_long: counts.num_too_long,
            num_output_tokens: counts.num_output_tokens,
            num_steps: counts.num_steps(),
            duration_seconds: duration,
        }
    }
}

/// All tenants' times, sorted.
fn merged(metrics: &RunMetrics, times: fn(&TenantMetrics) -> &Vec<u64>) -> Vec<u64> {
    let each = metrics.tenants.values().flat_map(times);
    let mut all: Vec<u64> = each.copied().collect();
    all.sort_unstable();
    all
}

fn tenant_summaries(metrics: &RunMetrics) -> Vec<TenantSummary> {
    let fair = fair_shares(metrics.tenants.values());
    let each = metrics.tenants.iter().zip(fair);
    each.map(|((tenant, metrics), num_fair_tokens)| TenantSummary {
        tenant: *tenant,
        num_requests: metrics.num_requests,
        num_refused: metrics.num_refused,
        ttft_seconds: Percentiles::of(&metrics.ttft),
        itl_seconds: Percentiles::of(&metrics.itl),
        num_served_tokens: metrics.num_served_tokens,
        num_fair_tokens,
    })
    .collect()
}

impl Percentiles {
    /// Of sorted microseconds, as seconds.
    pub fn of(sorted: &[u64]) -> Self {
        let Some(last) = sorted.last() else {
            return Self::default();
        };
        let at = |share: usize| seconds(sorted[(sorted.len() * share).div_ceil(100) - 1]);
        Self {
            p50: at(50),
            p90: at(90),
            p99: at(99),
            max: seconds(*last),
        }
    }
}

/// Points of the tail per power of ten.
const POINTS_PER_DECADE: u32 = 16;

/// The ITL that one in 10 to the power of i/16 exceeds, for each i up to the longest.
fn tail_quantiles(sorted: &[u64]) -> Vec<(f64, f64)> {
    let num = sorted.len();
    let decades = (num.max(1) as f64).log10();
    let num_points = (decades * f64::from(POINTS_PER_DECADE)).ceil();
    #[expect(clippy::cast_sign_loss, reason = "logarithms of counts are positive")]
    let points = 0..=num_points as u32;
    let point = |i: u32| {
        let share = 10_f64.powf(-f64::from(i) / f64::from(POINTS_PER_DECADE));
        #[expect(clippy::cast_sign_loss, reason = "a share of a count is positive")]
        let num_longer = ((share * num as f64) as usize).min(num.saturating_sub(1));
        let time = sorted.get(num - 1 - num_longer)?;
        Some((num_longer as f64 / num as f64, seconds(*time)))
    };
    if num == 0 {
        return Vec::new();
    }
    points.filter_map(point).collect()
}

impl Composition {
    fn new(metrics: &RunMetrics, num_replicas: u32) -> Self {
        let width = seconds(metrics.bins.width);
        let rate = |count: fn(&Bin) -> u64| {
            let bins = metrics.bins.bins.iter();
            bins.map(|bin| count(bin) as f64 / width).collect()
        };
        let share = |kind: usize| {
            let whole = width * f64::from(num_replicas);
            let bins = metrics.bins.bins.iter();
            bins.map(|bin| seconds(bin.busy[kind]) / whole).collect()
        };
        Self {
            bin_seconds: width,
            prefill_tokens_per_second: rate(|bin| bin.num_prefill_tokens),
            decode_tokens_per_second: rate(|bin| bin.num_decode_rows),
            prefill_share: share(0),
            decode_share: share(1),
            mixed_share: share(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let sorted: Vec<u64> = (1..=200).map(|i| i * 1_000_000).collect();
        let expected = Percentiles {
            p50: 100.0,
            p90: 180.0,
            p99: 198.0,
            max: 200.0,
        };
        assert_eq!(Percentiles::of(&sorted), expected);
        assert_eq!(Percentiles::of(&[]), Percentiles::default());
        assert_eq!(Percentiles::of(&[7_000_000]).p50, 7.0);
    }

    #[test]
    fn the_tail_ends_with_the_longest() {
        let sorted: Vec<u64> = (1..=1000).map(|i| i * 1_000_000).collect();
        let tail = tail_quantiles(&sorted);
        assert_eq!(tail.last(), Some(&(0.001, 999.0)));
    }
}
