//! Requests that hold no pages, waiting or preempted, in order of admission.

use std::collections::{BTreeMap, BTreeSet};

use crate::fair_share::FairShare;
use crate::ids::TenantId;
use crate::request::Refusal;
use crate::settings::SchedulerSettings;
use crate::state::{Job, Order, Queued};

/// A request's key in the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueKey {
    /// The tenant; the same for all requests unless the policy is fair share.
    pub(crate) lane: TenantId,
    pub(crate) order: Order,
}

/// The first request of a lane, ordered between lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Head {
    /// Tokens served to the lane's tenant when it was last looked at. It may be more by now.
    num_served: u64,
    order: Order,
    lane: TenantId,
}

/// One tenant's requests in order. A lane is never empty.
#[derive(Clone, Debug)]
struct Lane {
    requests: BTreeMap<Order, Queued>,
    head: Head,
}

/// Waiting and preempted requests, each lane in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    lanes: BTreeMap<TenantId, Lane>,
    heads: BTreeSet<Head>,
    len: u32,
    num_tokens: u64,
}

impl Queue {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// Whether `num_requests` with `num_tokens` prompt tokens may join. An empty queue takes any number,
    /// because so many could never be served otherwise.
    pub(crate) fn check_room(
        &self,
        num_requests: usize,
        num_tokens: u64,
        settings: &SchedulerSettings,
    ) -> Result<(), Refusal> {
        if self.is_empty() {
            return Ok(());
        }
        if u64::from(self.len) + num_requests as u64 > settings.max_queue.into() {
            return Err(Refusal::QueueFull {
                waiting: self.len,
                limit: settings.max_queue,
            });
        }
        if self.num_tokens + num_tokens > settings.max_queue_tokens {
            return Err(Refusal::QueueTokensFull {
                waiting: self.num_tokens,
                limit: settings.max_queue_tokens,
            });
        }
        Ok(())
    }

    pub(crate) fn push(&mut self, lane: TenantId, queued: Queued) {
        self.len += 1;
        self.num_tokens += u64::from(queued.job().prompt_len());
        let order = queued.job().order;
        let head = Head {
            num_served: 0,
            order,
            lane,
        };
        let entry = self.lanes.entry(lane).or_insert_with(|| Lane {
            requests: BTreeMap::new(),
            head,
        });
        entry.requests.insert(order, queued);
        let head = Head {
            order: order.min(entry.head.order),
            ..entry.head
        };
        self.move_head(head);
    }

    /// The head of the queue: the first request of the lane whose tenant was served least.
    ///
    /// Served tokens only grow. A lane that seems first but was served more since is re-inserted;
    /// the others are not visited.
    pub(crate) fn first(&mut self, fair_share: Option<&FairShare>) -> Option<QueueKey> {
        loop {
            let head = *self.heads.first()?;
            let num_served = fair_share.map_or(0, |fair_share| fair_share.num_served(head.lane));
            if num_served == head.num_served {
                let Head { lane, order, .. } = head;
                return Some(QueueKey { lane, order });
            }
            self.move_head(Head { num_served, ..head });
        }
    }

    /// Re-inserts a lane under its current head.
    fn move_head(&mut self, head: Head) {
        if let Some(lane) = self.lanes.get_mut(&head.lane) {
            self.heads.remove(&lane.head);
            self.heads.insert(head);
            lane.head = head;
        }
    }

    pub(crate) fn job(&self, key: QueueKey) -> Option<&Job> {
        let lane = self.lanes.get(&key.lane)?;
        Some(lane.requests.get(&key.order)?.job())
    }

    pub(crate) fn job_mut(&mut self, key: QueueKey) -> Option<&mut Job> {
        let lane = self.lanes.get_mut(&key.lane)?;
        Some(lane.requests.get_mut(&key.order)?.job_mut())
    }

    pub(crate) fn remove(&mut self, key: QueueKey) -> Option<Queued> {
        let lane = self.lanes.get_mut(&key.lane)?;
        let queued = lane.requests.remove(&key.order)?;
        match lane.requests.first_key_value() {
            Some((order, _)) => {
                let head = Head {
                    order: *order,
                    ..lane.head
                };
                self.move_head(head);
            }
            None => {
                self.heads.remove(&lane.head);
                self.lanes.remove(&key.lane);
            }
        }
        self.len -= 1;
        self.num_tokens -= u64::from(queued.job().prompt_len());
        Some(queued)
    }
}
