//! A histogram that one thread fills with atomics, without a lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

use crate::clock::micros;

/// Durations in buckets that double; clones share their counts.
#[derive(Clone, Debug)]
pub struct Histogram(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    /// Upper end of the first bucket.
    first: Duration,
    /// One a bucket; the last one has no upper end.
    buckets: Vec<AtomicU64>,
    sum_micros: AtomicU64,
}

impl Histogram {
    /// `num_bounded` buckets, the first ending at `first`, each next one at the double, and one more
    /// for what is longer still.
    pub fn doubling(first: Duration, num_bounded: usize) -> Self {
        let buckets = (0..=num_bounded).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Counts {
            first,
            buckets,
            sum_micros: AtomicU64::new(0),
        }))
    }

    /// Counts one duration.
    pub fn observe(&self, duration: Duration) {
        let counts = &*self.0;
        let ratio = micros(duration).div_ceil(micros(counts.first)).max(1);
        let bucket = (u64::BITS - (ratio - 1).leading_zeros()) as usize;
        let last = counts.buckets.len() - 1;
        counts.buckets[bucket.min(last)].fetch_add(1, Ordering::Relaxed);
        counts
            .sum_micros
            .fetch_add(micros(duration), Ordering::Relaxed);
    }

    /// Bucket ends in seconds, with how many lie in each.
    fn snapshot(&self) -> Vec<(f64, u64)> {
        let last = self.0.buckets.len() - 1;
        let end = |bucket: usize| match u32::try_from(bucket) {
            Ok(doublings) if bucket < last => {
                self.0.first.as_secs_f64() * f64::from(doublings).exp2()
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
        let sum = Duration::from_micros(self.0.sum_micros.load(Ordering::Relaxed)).as_secs_f64();
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
    fn bucket_ends_double() {
        let histogram = Histogram::doubling(Duration::from_millis(1), 3);
        let ends: Vec<f64> = histogram.snapshot().iter().map(|(end, _)| *end).collect();
        assert_eq!(ends, [0.001, 0.002, 0.004, f64::INFINITY]);
    }
}
