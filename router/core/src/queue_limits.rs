//! The queue's limits, and who makes room where it is full.
//!
//! Under fair share a newcomer is refused only if its own lane is the longest. Otherwise the longest lane
//! gives up its last waiting requests, which are answered as if the queue had been full for them.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use crate::ids::TenantId;
use crate::queue::{Queue, QueueKey};
use crate::request::{Refusal, Request};
use crate::settings::SchedulerSettings;
use crate::state::Job;

/// Loads count in so many parts, so that a lane's load can be divided by its weight.
const PARTS: u64 = 1 << 16;

/// What waits, as the two limits count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) num_requests: u64,
    /// Prompt tokens. A prompt with several choices counts once, with the first.
    pub(crate) num_tokens: u64,
}

impl Load {
    pub(crate) fn of<'a>(requests: impl IntoIterator<Item = &'a Request>) -> Self {
        let mut load = Self::default();
        for request in requests {
            load.num_requests += u64::from(request.num_choices.get());
            load.num_tokens += request.prompt.len() as u64;
        }
        load
    }

    fn of_job(job: &Job) -> Self {
        Self {
            num_requests: 1,
            num_tokens: match job.is_first_choice() {
                true => job.prompt_len().into(),
                false => 0,
            },
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            num_requests: self.num_requests + other.num_requests,
            num_tokens: self.num_tokens.saturating_add(other.num_tokens),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            num_requests: self.num_requests.saturating_sub(other.num_requests),
            num_tokens: self.num_tokens.saturating_sub(other.num_tokens),
        }
    }

    fn covers(self, other: Self) -> bool {
        self.num_requests >= other.num_requests && self.num_tokens >= other.num_tokens
    }
}

/// Which limit a comparison of lanes is about.
#[derive(Clone, Copy)]
enum Limit {
    Requests,
    Tokens,
}

/// One lane's load and its tenant's weight.
#[derive(Clone, Copy, Debug)]
struct LaneLoad {
    load: Load,
    weight: u64,
}

impl LaneLoad {
    /// Its share of the limit, comparable between lanes.
    fn share(self, limit: Limit) -> u64 {
        let load = match limit {
            Limit::Requests => self.load.num_requests,
            // A choice whose prompt counts with the first one computes a token at least.
            Limit::Tokens => self.load.num_tokens.saturating_add(self.load.num_requests),
        };
        load.saturating_mul(PARTS) / self.weight
    }
}

/// The loads of all lanes.
#[derive(Clone, Debug, Default)]
pub(crate) struct QueueLimits {
    total: Load,
    lanes: FxHashMap<TenantId, LaneLoad>,
    by_requests: BTreeSet<(u64, TenantId)>,
    by_tokens: BTreeSet<(u64, TenantId)>,
}

impl QueueLimits {
    pub(crate) fn total(&self) -> Load {
        self.total
    }

    /// Requests that wait.
    pub(crate) fn num_requests(&self) -> u32 {
        u32::try_from(self.total.num_requests).unwrap_or(u32::MAX)
    }

    pub(crate) fn add(&mut self, lane: TenantId, job: &Job) {
        let load = Load::of_job(job);
        self.total = self.total.plus(load);
        let old = self.take(lane);
        self.put(
            lane,
            LaneLoad {
                load: old.map_or(load, |old| old.load.plus(load)),
                weight: job.weight().get().into(),
            },
        );
    }

    pub(crate) fn remove(&mut self, lane: TenantId, job: &Job) {
        let load = Load::of_job(job);
        self.total = self.total.minus(load);
        if let Some(old) = self.take(lane) {
            let load = old.load.minus(load);
            if load.num_requests > 0 {
                self.put(lane, LaneLoad { load, ..old });
            }
        }
    }

    fn take(&mut self, lane: TenantId) -> Option<LaneLoad> {
        let old = self.lanes.remove(&lane)?;
        self.by_requests.remove(&(old.share(Limit::Requests), lane));
        self.by_tokens.remove(&(old.share(Limit::Tokens), lane));
        Some(old)
    }

    fn put(&mut self, lane: TenantId, load: LaneLoad) {
        self.by_requests.insert((load.share(Limit::Requests), lane));
        self.by_tokens.insert((load.share(Limit::Tokens), lane));
        self.lanes.insert(lane, load);
    }

    /// The lane with the largest share of a limit.
    fn longest(&self, limit: Limit) -> Option<TenantId> {
        let by_share = match limit {
            Limit::Requests => &self.by_requests,
            Limit::Tokens => &self.by_tokens,
        };
        by_share.last().map(|(_, lane)| *lane)
    }

    /// What is over the limits once `more` has joined.
    fn excess(&self, more: Load, settings: &SchedulerSettings) -> Load {
        self.total.plus(more).minus(Load {
            num_requests: settings.max_queue.into(),
            num_tokens: settings.max_queue_tokens,
        })
    }

    fn refusal(&self, excess: Load, settings: &SchedulerSettings) -> Refusal {
        if excess.num_requests > 0 {
            return Refusal::QueueFull {
                waiting: self.num_requests(),
                limit: settings.max_queue,
            };
        }
        Refusal::QueueTokensFull {
            waiting: self.total.num_tokens,
            limit: settings.max_queue_tokens,
        }
    }
}

impl Queue {
    /// The requests that must leave so that these of one tenant may join: none while there is room.
    ///
    /// An empty queue takes any number, because so many could never be served otherwise.
    pub(crate) fn displaced_by(
        &self,
        requests: &[Request],
        settings: &SchedulerSettings,
    ) -> Result<Vec<QueueKey>, Refusal> {
        let more = Load::of(requests);
        let excess = self.room.excess(more, settings);
        if self.is_empty() || excess == Load::default() {
            return Ok(Vec::new());
        }
        let displaced = self.displaced_from_longest(requests, more, excess);
        displaced.ok_or_else(|| self.room.refusal(excess, settings))
    }

    /// The last requests of the longest lane that make up for `excess`, if it stays the longer one.
    fn displaced_from_longest(
        &self,
        requests: &[Request],
        more: Load,
        excess: Load,
    ) -> Option<Vec<QueueKey>> {
        self.fair_share.as_ref()?;
        let limit = if excess.num_requests > 0 {
            Limit::Requests
        } else {
            Limit::Tokens
        };
        let (asker, weight) = requests.first().map(|it| (it.tenant, it.weight.get()))?;
        let own = self.room.lanes.get(&asker).map(|lane| lane.load);
        let joined = LaneLoad {
            load: own.unwrap_or_default().plus(more),
            weight: weight.into(),
        };
        let longest = self.room.longest(limit).filter(|lane| *lane != asker)?;
        let LaneLoad { load, weight } = self.room.lanes[&longest];
        let (mut left, mut freed) = (load, Load::default());
        let mut displaced = Vec::new();
        for (key, job) in self.unserved_backwards(longest) {
            let load = Load::of_job(job);
            (left, freed) = (left.minus(load), freed.plus(load));
            displaced.push(key);
            if (LaneLoad { load: left, weight }).share(limit) < joined.share(limit) {
                return None;
            }
            if freed.covers(excess) {
                return Some(displaced);
            }
        }
        None
    }
}
