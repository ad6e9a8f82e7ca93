//! Several answers to one prompt, which is computed once.
//!
//! Each choice is a request of its own with an arrival of its own, so every other rule holds for it. The choices share
//! the full pages of their prompt as requests with equal prefixes do (`prefix_sharing`): the others wait while the
//! first one's prompt is computed, and each computes the last tokens, less than a page, anew. With the prefix cache
//! off only the choices find these pages. Those that no choice leases stay for choices that find no slot yet, are
//! evicted before anybody is preempted, and go with the last choice.

use crate::ids::{Micros, RequestId};
use crate::request::Request;
use crate::scheduler::Scheduler;
use crate::state::{Job, Queued, Sharing};

impl Scheduler {
    /// Queues the choices of a request whose output is capped to `max_output_tokens`. Returns them in order.
    pub(crate) fn enqueue_choices(
        &mut self,
        request: Request,
        max_output_tokens: u32,
        now: Micros,
    ) -> impl Iterator<Item = RequestId> + use<> {
        let num_choices = request.num_choices.get();
        let first = self.next_id();
        let mut job = self.new_job(first, request, max_output_tokens, now);
        if num_choices > 1 {
            // Hashed once for all.
            self.cache.hash_prompt(&mut job, &mut self.sharing.hasher);
            if job.sharing() == Sharing::Choices {
                self.sharing.num_choices.insert(first, num_choices);
            }
        }
        let others: Vec<Job> = (1..num_choices)
            .map(|_| job.choice(self.next_id()))
            .collect();
        for job in std::iter::once(job).chain(others) {
            self.enqueue_new(job, now);
        }
        (0..u64::from(num_choices)).map(move |index| RequestId(first.0 + index))
    }

    fn enqueue_new(&mut self, job: Job, now: Micros) {
        if let Some(fair_share) = &mut self.queue.fair_share {
            fair_share.enter(job.tenant(), job.weight());
        }
        self.enqueue(Queued::Waiting {
            job: Box::new(job),
            since: now,
        });
    }

    /// Leading tokens of a choice's prompt that it expects to find in the pages of the first one.
    pub(crate) fn num_from_siblings(&self, job: &Job) -> u32 {
        match job.is_first_choice() {
            true => 0,
            false => self.cache.block_start(job.prompt_len() - 1),
        }
    }

    /// A request has ended. With the last choice go the pages that only choices of its prompt could find.
    pub(crate) fn leave_choices(&mut self, job: &Job) {
        let first = job.first_choice();
        let Some(num_left) = self.sharing.num_choices.get_mut(&first) else {
            return;
        };
        *num_left -= 1;
        if *num_left == 0 {
            self.sharing.num_choices.remove(&first);
            self.cache.unpublish(job);
        }
    }
}
