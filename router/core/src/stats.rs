//! What the scheduler counts.

use crate::page_pool::PageCounts;
use crate::snapshot_pool::SnapshotCounts;
use crate::state::{Job, Sharing};

/// The current state, and counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests without a slot, waiting or preempted.
    pub num_waiting: u32,
    /// Requests that hold pages.
    pub num_running: u32,
    /// Steps in flight.
    pub num_in_flight: usize,
    /// The pages of the first cache kind by state.
    pub pages: PageCounts,
    /// Snapshots of slot state; all 0 for a model without.
    pub snapshots: SnapshotCounts,
    /// Since the start.
    pub counts: Counts,
}

/// Counts since the start; they only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Preempted requests.
    pub num_preemptions: u64,
    /// Requests that went on after the loss of all ranks.
    pub num_replays: u64,
    /// Decode rows that were put off, by cause.
    pub carryover: Carryover,
    /// Tokens of admitted requests that were cached, including returns from preemption.
    pub num_hit_tokens: u64,
    /// Tokens of admitted requests that were looked up in the prefix cache, including returns from preemption.
    pub num_query_tokens: u64,
    /// Cached pages that were evicted.
    pub num_evictions: u64,
    /// Prefills that went first because they had waited too long.
    pub num_starvation_grants: u64,
    /// Plans whose decode rows alone were expected to take longer than the ITL target.
    pub num_decodes_over_target: u64,
    /// Plans that admitted nobody because the ITL target carries no more decoders.
    pub num_admissions_over_target: u64,
}

impl Counts {
    /// Counts the tokens of a request whose prefix was looked up at its admission. Another choice of a prompt looks up
    /// nothing.
    pub(crate) fn count_lookup(&mut self, job: &Job) {
        if job.sharing() == Sharing::Everyone && job.is_first_choice() {
            self.num_query_tokens += u64::from(job.num_known());
        }
    }

    /// Counts prompt tokens that a request takes from pages that others have filled. Those that a choice takes from
    /// the first one are no hits.
    pub(crate) fn count_shared(&mut self, job: &Job, num_tokens: u32) {
        if job.sharing() == Sharing::Everyone && job.is_first_choice() {
            self.num_hit_tokens += u64::from(num_tokens);
        }
    }
}

/// Decode rows that were put off to a later plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carryover {
    /// The plan had no token left.
    pub tokens: u64,
    /// The plan had no row left.
    pub rows: u64,
    /// No page was free.
    pub pages: u64,
}
