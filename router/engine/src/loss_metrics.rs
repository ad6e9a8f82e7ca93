//! Losses of a replica's ranks, and what follows.

use plait_core::Counts;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::metrics::{registered, set_counter};

/// Of one replica.
#[derive(Debug)]
pub struct LossMetrics {
    /// Times at which its ranks were lost.
    pub num_losses: Counter,
    /// 1 while it has no ranks.
    pub is_down: Gauge,
    /// Requests that it gave to other replicas.
    pub num_moved: Counter,
    num_replays: Counter,
}

impl LossMetrics {
    /// All at zero.
    pub fn register(registry: &mut Registry) -> Self {
        Self {
            num_losses: registered(
                registry,
                "plait_rank_losses",
                "Losses of the replica's ranks, after which its requests waited for new ones (--restart)",
            ),
            is_down: registered(
                registry,
                "plait_replica_down",
                "1 while the replica waits for its ranks to start again",
            ),
            num_replays: registered(
                registry,
                "plait_requests_replayed",
                "Requests under way at a loss that went on with new ranks, or in another replica",
            ),
            num_moved: registered(
                registry,
                "plait_requests_moved",
                "Requests that went on in another replica because this one had lost its ranks",
            ),
        }
    }

    /// Copies the scheduler's count.
    pub fn copy(&self, counts: &Counts) {
        set_counter(&self.num_replays, counts.num_replays);
    }
}
