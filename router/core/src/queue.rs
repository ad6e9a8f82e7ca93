//! Requests that hold nothing yet, or no longer: served strictly in order.

use std::collections::BTreeMap;

use crate::ids::TenantId;
use crate::request::Refusal;
use crate::settings::Settings;
use crate::shares::Shares;
use crate::state::{Job, Order, Queued};

/// Where a request stands in the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueuePlace {
    /// Every request's is the same where tenants do not matter.
    pub(crate) lane: TenantId,
    pub(crate) order: Order,
}

/// The waiting and the preempted requests; each lane in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    lanes: BTreeMap<TenantId, BTreeMap<Order, Queued>>,
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

    /// Whether `num_requests` with `num_tokens` in their prompts may join; an empty queue takes any,
    /// or they could never be served.
    pub(crate) fn check_room(
        &self,
        num_requests: usize,
        num_tokens: u64,
        settings: &Settings,
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
        self.lanes.entry(lane).or_default().insert(order, queued);
    }

    /// The head of the queue: the first in order, of the lane whose tenant was served least.
    pub(crate) fn first(&self, shares: Option<&Shares>) -> Option<QueuePlace> {
        let heads = self.lanes.iter().filter_map(|(lane, requests)| {
            let (order, _) = requests.first_key_value()?;
            let (lane, order) = (*lane, *order);
            Some(QueuePlace { lane, order })
        });
        let num_served = |lane| shares.map_or(0, |shares| shares.num_served(lane));
        heads.min_by_key(|head| (num_served(head.lane), head.order))
    }

    pub(crate) fn job(&self, place: QueuePlace) -> Option<&Job> {
        Some(self.lanes.get(&place.lane)?.get(&place.order)?.job())
    }

    pub(crate) fn job_mut(&mut self, place: QueuePlace) -> Option<&mut Job> {
        let lane = self.lanes.get_mut(&place.lane)?;
        Some(lane.get_mut(&place.order)?.job_mut())
    }

    pub(crate) fn remove(&mut self, place: QueuePlace) -> Option<Queued> {
        let lane = self.lanes.get_mut(&place.lane)?;
        let queued = lane.remove(&place.order)?;
        if lane.is_empty() {
            self.lanes.remove(&place.lane);
        }
        self.len -= 1;
        self.num_tokens -= u64::from(queued.job().prompt_len());
        Some(queued)
    }
}
