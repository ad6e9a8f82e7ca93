//! A histogram that one thread fills with atomics, without a lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

use crate::clock::micros;

/// Durations, or numbers of tokens, in buckets that double; clones share their counts.
#[derive(Clone, Debug)]
pub struct Histogram(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    /// Upper end of the first bucket, in units.
    first: u64,
    /// Units in one of what the page shows.
    units_of_one: f64,
    /// One a bucket; the last one has no upper end.
    buckets: Vec<AtomicU64>,
    /// In units.
    sum: AtomicU64,
}

impl Histogram {
    /// `num_bounded` buckets, the first ending at `first`, each next one at the double, and one more
    /// for what is longer still.
    pub fn doubling(first: Duration, num_bounded: usize) -> Self {
        Self::of_units(micros(first), 1e6, num_bounded)
    }

    /// The same of tokens; the first bucket ends at 1.
    pub fn of_tokens(num_bounded: usize) -> Self {
        Self::of_units(1, 1.0, num_bounded)
    }

    fn of_units(first: u64, units_of_one: f64, num_bounded: usize) -> Self {
        let buckets = (0..=num_bounded).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Counts {
            first,
            units_of_one,
            buckets,
            sum: AtomicU64::new(0),
        }))
    }

    /// Counts one duration.
    pub fn observe(&self, duration: Duration) {
        self.count(micros(duration));
    }

    /// Counts one number of tokens.
    pub fn observe_tokens(&self, num_tokens: u32) {
        self.count(num_tokens.into());
    }

    fn count(&self, units: u64) {
        let counts = &*self.0;
        let ratio = units.div_ceil(counts.first).max(1);
        let bucket = (u64::BITS - (ratio - 1).leading_zeros()) as usize;
        let last = counts.buckets.len() - 1;
        counts.buckets[bucket.min(last)].fetch_add(1, Ordering::Relaxed);
        counts.sum.fetch_add(units, Ordering::Relaxed);
    }

    /// In what the page shows.
    #[expect(clippy::cast_precision_loss, reason = "the page shows floats")]
    fn shown(&self, units: u64) -> f64 {
        units as f64 / self.0.units_of_one
    }

    /// Bucket ends as the page shows them, with how many lie in each.
    fn snapshot(&self) -> Vec<(f64, u64)> {
        let last = self.0.buckets.len() - 1;
        let end = |bucket: usize| match u32::try_from(bucket) {
            Ok(doublings) if bucket < last => {
                self.shown(self.0.first) * f64::from(doublings).exp2()
            }
            _ => f64::INFINITY,
        };
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.0
            .buckets
            .iter()
            .enumerate()
            .map(|(bucket, counter)| (end(bucket), count(counter)))
            .collect()
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        let buckets = self.snapshot();
        let count = buckets.iter().map(|(_, count)| count).sum();
        let sum = self.shown(self.0.sum.load(Ordering::Relaxed));
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

impl TypedMetric for Histogram {
    const TYPE: MetricType = MetricType::Histogram;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_lies_in_the_first_bucket_that_ends_at_or_after_it() {
        let histogram = Histogram::doubling(Duration::from_millis(1), 3);
        for millis in [0, 1, 2, 3, 4, 5, 900] {
            histogram.observe(Duration::from_millis(millis));
        }
        let counts: Vec<u64> = histogram
            .snapshot()
            .iter()
            .map(|(_, count)| *count)
            .collect();
        assert_eq!(counts, [2, 1, 2, 2]);
    }

    #[test]
    fn tokens_are_counted_by_doubling_numbers() {
        let histogram = Histogram::of_tokens(3);
        for num_tokens in [0, 1, 2, 3, 4, 5] {
            histogram.observe_tokens(num_tokens);
        }
        let expected = [(1.0, 2), (2.0, 1), (4.0, 2), (f64::INFINITY, 1)];
        assert_eq!(histogram.snapshot(), expected);
    }

    #[test]
    fn bucket_ends_double() {
        let histogram = Histogram::doubling(Duration::from_millis(1), 3);
        let ends: Vec<f64> = histogram.snapshot().iter().map(|(end, _)| *end).collect();
        assert_eq!(ends, [0.001, 0.002, 0.004, f64::INFINITY]);
    }
}
