//! Requests that hold nothing yet, or no longer: served strictly in order.

use std::collections::BTreeMap;

use crate::request::Refusal;
use crate::settings::Settings;
use crate::state::{Order, Queued};

/// The waiting and the preempted requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    by_order: BTreeMap<Order, Queued>,
    num_tokens: u64,
}

impl Queue {
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.by_order.len()).expect("bounded by max_queue and max_seqs")
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_order.is_empty()
    }

    /// Whether a prompt of `num_tokens` may join; an empty queue takes any.
    pub(crate) fn check_room(&self, num_tokens: usize, settings: &Settings) -> Result<(), Refusal> {
        if self.len() >= settings.max_queue {
            return Err(Refusal::QueueFull {
                waiting: self.len(),
                limit: settings.max_queue,
            });
        }
        let over = self.num_tokens + num_tokens as u64 > settings.max_queue_tokens;
        if over && !self.is_empty() {
            return Err(Refusal::QueueTokensFull {
                waiting: self.num_tokens,
                limit: settings.max_queue_tokens,
            });
        }
        Ok(())
    }

    pub(crate) fn push(&mut self, queued: Queued) {
        self.num_tokens += u64::from(queued.job().prompt_len());
        self.by_order.insert(queued.job().order, queued);
    }

    pub(crate) fn first(&self) -> Option<&Queued> {
        self.by_order.first_key_value().map(|(_, queued)| queued)
    }

    pub(crate) fn pop_first(&mut self) -> Option<Queued> {
        let (_, queued) = self.by_order.pop_first()?;
        Some(self.count_out(queued))
    }

    pub(crate) fn remove(&mut self, order: Order) -> Option<Queued> {
        let queued = self.by_order.remove(&order)?;
        Some(self.count_out(queued))
    }

    pub(crate) fn get(&self, order: Order) -> Option<&Queued> {
        self.by_order.get(&order)
    }

    fn count_out(&mut self, queued: Queued) -> Queued {
        self.num_tokens -= u64::from(queued.job().prompt_len());
        queued
    }
}
