//! Rule 0: a request is validated, its output capped, and it enters the queue.

use crate::ids::{Micros, RequestId};
use crate::queue::QueueKey;
use crate::request::{Refusal, Rejected, Request};
use crate::scheduler::{Location, Scheduler};
use crate::state::{DueMicros, Job, Order, Queued, Sharing};

impl Scheduler {
    /// Puts a request into the queue. The model's length and the pool cap its output. Returns its first choice.
    pub fn submit(&mut self, request: Request, now: Micros) -> Result<RequestId, Refusal> {
        let ids = self.submit_all(vec![request], now)?;
        Ok(ids[0])
    }

    /// Puts requests that belong together into the queue: all or none. Returns the choices of the first request,
    /// then those of the others.
    ///
    /// An empty queue takes any number, because so many at once could never be served otherwise.
    pub fn submit_all(
        &mut self,
        requests: Vec<Request>,
        now: Micros,
    ) -> Result<Vec<RequestId>, Refusal> {
        if self.is_draining {
            return Err(Refusal::Draining);
        }
        let max_output_tokens: Vec<u32> = requests
            .iter()
            .map(|request| self.max_output_tokens(request))
            .collect::<Result<_, _>>()?;
        let displaced = self
            .queue
            .displaced_by(&requests, &self.settings.scheduler)?;
        for key in displaced {
            self.reject(key, Refusal::Displaced);
        }
        let each = requests.into_iter().zip(max_output_tokens);
        Ok(each
            .flat_map(|(request, max_output)| self.enqueue_choices(request, max_output, now))
            .collect())
    }

    pub(crate) fn next_id(&mut self) -> RequestId {
        let id = RequestId(self.queue.num_submitted);
        self.queue.num_submitted += 1;
        id
    }

    pub(crate) fn new_job(
        &self,
        id: RequestId,
        request: Request,
        max_output_tokens: u32,
        now: Micros,
    ) -> Job {
        let prefix_cache = self.settings.pages.prefix_cache;
        let sharing = Sharing::of(&request, prefix_cache, self.cache.keeps_slot_state());
        let order = Order::new(
            id,
            self.settings.scheduler.policy,
            self.due(request.priority, now),
        );
        Job::new(order, request, max_output_tokens, sharing)
    }

    /// Where a request of this priority comes in order.
    fn due(&self, priority: i32, now: Micros) -> DueMicros {
        let is_by_priority = self.settings.scheduler.policy.is_by_priority();
        let priority = if is_by_priority { priority } else { 0 };
        DueMicros::new(now, priority, self.limits.priority_aging)
    }

    pub(crate) fn enqueue(&mut self, queued: Queued) {
        let job = queued.job();
        let lane = self.queue.lane_of(job);
        let order = job.order;
        let location = Location::Queue(QueueKey { lane, order });
        self.locations.insert(job.id(), location);
        self.queue.push(lane, queued);
    }

    /// Requests that left the queue unserved since the last call, in order. Each has ended.
    pub fn take_rejected(&mut self) -> Vec<Rejected> {
        std::mem::take(&mut self.queue.rejected)
    }

    /// Requests that gave their pages back since the last call, or since the last plan was begun.
    pub fn take_preempted(&mut self) -> Vec<RequestId> {
        std::mem::take(&mut self.queue.preempted)
    }

    /// Ends requests that have waited too long.
    pub(crate) fn expire(&mut self, now: Micros) {
        let Some(limit) = self.limits.max_wait else {
            return;
        };
        while let Some(Location::Queue(key)) = self.oldest_unserved() {
            let waited = self.queue.get(key).map_or(Micros(0), |it| it.waited(now));
            if waited <= limit {
                return;
            }
            self.reject(key, Refusal::Expired { waited, limit });
        }
    }

    fn oldest_unserved(&self) -> Option<Location> {
        let oldest = self.queue.oldest_unserved()?;
        self.locations.get(&oldest).copied()
    }

    /// Ends a waiting request.
    fn reject(&mut self, key: QueueKey, refusal: Refusal) {
        let Some(queued) = self.queue.remove(key) else {
            return;
        };
        let request = queued.job().id();
        self.forget(queued.job());
        self.note_idle();
        self.queue.rejected.push(Rejected { request, refusal });
    }

    /// Rule 0: output tokens that a request may get.
    fn max_output_tokens(&self, request: &Request) -> Result<u32, Refusal> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        let least = u64::from(request.max_tokens.min(1));
        let left_of = |limit: u64| {
            let left = limit.checked_sub(prompt as u64);
            left.filter(|left| *left >= least)
        };
        let limit = self.settings.runtime.max_model_len;
        let in_model = left_of(limit.into()).ok_or(Refusal::TooLongForModel { prompt, limit })?;
        let limit = self.limits.pool_tokens;
        let in_pool = left_of(limit).ok_or(Refusal::TooLongForPool { prompt, limit })?;
        let num = u64::from(request.max_tokens).min(in_model).min(in_pool);
        Ok(u32::try_from(num).expect("no more than max_tokens"))
    }
}
