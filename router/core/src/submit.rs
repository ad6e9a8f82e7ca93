//! Rule 0: a request is validated, its output capped, and it enters the queue.

use crate::ids::{Micros, RequestId, TenantId};
use crate::queue::QueueKey;
use crate::request::{Refusal, Request};
use crate::scheduler::{Location, Scheduler};
use crate::state::{Job, Queued};

impl Scheduler {
    /// Puts a request into the queue. The model's length and the pool cap its output.
    pub fn submit(&mut self, request: Request, now: Micros) -> Result<RequestId, Refusal> {
        let ids = self.submit_all(vec![request], now)?;
        Ok(ids[0])
    }

    /// Puts requests that belong together into the queue: all or none.
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
        let num_tokens = requests.iter().map(|it| it.prompt.len() as u64).sum();
        self.queue
            .check_room(requests.len(), num_tokens, &self.settings.scheduler)?;
        let each = requests.into_iter().zip(max_output_tokens);
        Ok(each
            .map(|(request, max_output_tokens)| self.enqueue_new(request, max_output_tokens, now))
            .collect())
    }

    fn enqueue_new(&mut self, request: Request, max_output_tokens: u32, now: Micros) -> RequestId {
        let id = RequestId(self.num_submitted);
        self.num_submitted += 1;
        if let Some(fair_share) = &mut self.fair_share {
            fair_share.enter(request.tenant);
        }
        let job = Box::new(Job::new(
            id,
            request,
            max_output_tokens,
            self.settings.scheduler.policy,
        ));
        self.enqueue(Queued::Waiting { job, since: now });
        id
    }

    pub(crate) fn enqueue(&mut self, queued: Queued) {
        let (job, is_fair) = (queued.job(), self.fair_share.is_some());
        let lane = if is_fair {
            job.tenant()
        } else {
            TenantId::default()
        };
        let order = job.order;
        let location = Location::Queue(QueueKey { lane, order });
        self.locations.insert(job.id(), location);
        self.queue.push(lane, queued);
    }

    /// Rule 0: output tokens that a request may get.
    fn max_output_tokens(&self, request: &Request) -> Result<u32, Refusal> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        if request.max_tokens == 0 {
            return Err(Refusal::NoOutput);
        }
        let left_of = |limit: u64| limit.checked_sub(prompt as u64).filter(|left| *left > 0);
        let limit = self.settings.runtime.max_model_len;
        let in_model = left_of(limit.into()).ok_or(Refusal::TooLongForModel { prompt, limit })?;
        let limit = self.limits.pool_tokens;
        let in_pool = left_of(limit).ok_or(Refusal::TooLongForPool { prompt, limit })?;
        let num = u64::from(request.max_tokens).min(in_model).min(in_pool);
        Ok(u32::try_from(num).expect("no more than max_tokens"))
    }
}
