//! A request leaves the scheduler of a replica that lost its ranks, and goes on in another one's.
//!
//! It keeps prompt, parameters, output and its losses; pages and hashes stay behind. Choices of one
//! prompt go on as requests of their own.

use std::sync::Arc;

use crate::ids::{RequestId, TokenId};
use crate::request::Refusal;
use crate::scheduler::{Location, Scheduler};
use crate::state::Queued;

/// A request between two schedulers.
#[derive(Debug)]
pub struct MovedRequest(Queued);

impl MovedRequest {
    /// Its prompt.
    pub fn prompt(&self) -> &Arc<[TokenId]> {
        self.0.job().prompt()
    }

    /// Only requests with the same salt share its pages.
    pub fn salt(&self) -> u64 {
        self.0.job().asked_salt()
    }

    /// Output tokens that it has, which are computed again.
    pub fn num_output(&self) -> u32 {
        self.0.job().num_output()
    }

    /// Tokens that it may come to, with its prompt's.
    pub fn most_tokens(&self) -> u64 {
        self.0.job().most_tokens()
    }

    /// Output tokens that it may still get.
    pub fn num_left(&self) -> u32 {
        self.0.job().max_output() - self.0.job().num_output()
    }
}

impl Scheduler {
    /// Gives up a request that waits for pages; None if it runs or has ended.
    pub fn release(&mut self, request: RequestId) -> Option<MovedRequest> {
        let Location::Queue(key) = *self.locations.get(&request)? else {
            return None;
        };
        let queued = self.queue.remove(key)?;
        self.forget(queued.job());
        self.note_idle();
        Some(MovedRequest(queued))
    }

    /// Queues a request of another replica, which had been accepted: neither a drain nor a full queue refuses it.
    /// Fails if this replica has too few pages for what it was promised.
    pub fn take_over(&mut self, moved: MovedRequest) -> Result<RequestId, Refusal> {
        let job = moved.0.job();
        let (prompt, limit) = (job.prompt_len() as usize, self.limits.pool_tokens);
        if job.most_tokens() > limit {
            return Err(Refusal::TooLongForPool { prompt, limit });
        }
        let id = self.next_id();
        let queued = self.renumbered(moved.0, id);
        if queued.job().num_losses > 0 {
            self.in_flight.trials.begin(queued.job());
        }
        self.enqueue(queued);
        Ok(id)
    }

    fn renumbered(&mut self, queued: Queued, id: RequestId) -> Queued {
        let (mut job, since) = match queued {
            // Others of its answer may have begun, so that it may not leave unserved.
            Queued::Waiting { job, since } if job.is_only_choice() => (job, Some(since)),
            Queued::Waiting { job, .. } | Queued::Preempted { job } => (job, None),
        };
        let prefix_cache = self.settings.pages.prefix_cache;
        job.renumber(id, prefix_cache, self.cache.keeps_slot_state());
        if let Some(fair_share) = &mut self.queue.fair_share {
            fair_share.enter(job.tenant(), job.weight());
            if since.is_none() {
                job.set_virtual_time(fair_share.time(job.tenant()));
            }
        }
        match since {
            Some(since) => Queued::Waiting { job, since },
            None => Queued::Preempted { job },
        }
    }
}
