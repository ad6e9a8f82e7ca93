//! The states of a request, and the only ways from one to the next.
//!
//! [`Queued`] (waiting, or preempted) holds no page; [`Running`] (prefilling, decoding, or on its way
//! out) owns a lease and a slot. A transition consumes the old state, so a request is in one place.

use crate::event::{FinishReason, Output};
use crate::ids::{Micros, RequestId, SlotId, StepId, TokenId};
use crate::pages::Lease;
use crate::plan::NewSlot;
use crate::request::Request;

/// Who goes first: the smaller priority, and between equals the earlier arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Order {
    priority: i32,
    request: RequestId,
}

/// What stays with a request in every state.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) order: Order,
    request: Request,
    /// Output tokens after which the request ends.
    num_due: u32,
    output: Vec<TokenId>,
    /// Prompt positions below this one had their log-probabilities asked of the worker.
    num_prompt_reported: u32,
}

impl Job {
    pub(crate) fn new(id: RequestId, request: Request, num_due: u32) -> Self {
        let order = Order {
            priority: request.priority,
            request: id,
        };
        Self {
            order,
            request,
            num_due,
            output: Vec::new(),
            num_prompt_reported: 0,
        }
    }

    pub(crate) fn id(&self) -> RequestId {
        self.order.request
    }

    pub(crate) fn prompt_len(&self) -> u32 {
        len_u32(&self.request.prompt)
    }

    pub(crate) fn num_output(&self) -> u32 {
        len_u32(&self.output)
    }

    /// Tokens whose KV a lease must hold before the next output token can be sampled.
    pub(crate) fn num_known(&self) -> u32 {
        self.prompt_len() + self.num_output()
    }

    /// The tokens at positions `start..end` of prompt + output.
    pub(crate) fn extend_with_tokens(&self, tokens: &mut Vec<TokenId>, start: u32, end: u32) {
        let (start, end, prompt) = (start as usize, end as usize, &self.request.prompt);
        tokens.extend_from_slice(&prompt[start.min(prompt.len())..end.min(prompt.len())]);
        let past_prompt = |position: usize| position.saturating_sub(prompt.len());
        tokens.extend_from_slice(&self.output[past_prompt(start)..past_prompt(end)]);
    }

    /// Prompt positions that a chunk `start..end` predicts and no earlier chunk did.
    ///
    /// A chunk predicts the token after each of its own; a preempted request computes its prompt
    /// again, and what was reported once is not reported twice.
    pub(crate) fn claim_prompt_positions(&mut self, start: u32, end: u32) -> std::ops::Range<u32> {
        if self.request.sampling.prompt_logprobs.is_none() {
            return 0..0;
        }
        let first = (start + 1).max(self.num_prompt_reported);
        let past = (end + 1).min(self.prompt_len());
        self.num_prompt_reported = self.num_prompt_reported.max(past);
        first..past.max(first)
    }

    /// A middle chunk's last position predicts a token that the chunk itself does not hold.
    pub(crate) fn wants_lookahead(&self, chunk_end: u32) -> bool {
        self.request.sampling.prompt_logprobs.is_some() && chunk_end < self.prompt_len()
    }

    /// Takes one sampled token into the output; says whether it ends the request.
    fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        self.output.push(token);
        if self.request.stop_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else {
            (self.num_output() == self.num_due).then_some(FinishReason::Length)
        }
    }
}

/// A request that holds nothing on the device.
#[derive(Clone, Debug)]
pub(crate) enum Queued {
    /// Never admitted so far.
    Waiting {
        /// The request.
        job: Box<Job>,
        /// When it was submitted.
        since: Micros,
    },
    /// Gave its pages to one before it in order; it keeps its output and computes both again.
    Preempted {
        /// The request.
        job: Box<Job>,
    },
}

impl Queued {
    pub(crate) fn job(&self) -> &Job {
        match self {
            Self::Waiting { job, .. } | Self::Preempted { job } => job,
        }
    }

    /// Gives the request a slot and an empty lease.
    pub(crate) fn admit(self, slot: SlotId, step: StepId, now: Micros) -> (Running, NewSlot) {
        let (job, waited) = match self {
            Self::Waiting { job, since } => (job, Some(Micros(now.0.saturating_sub(since.0)))),
            Self::Preempted { job } => (job, None),
        };
        let new_slot = NewSlot {
            slot,
            request: job.id(),
            sampling: job.request.sampling.clone(),
            next_output: job.num_output(),
            waited,
        };
        (Running::new(job, slot, step), new_slot)
    }
}

/// How far a request that holds a lease has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Tokens of its prompt (or of the output it had before a preemption) are not planned yet.
    Prefilling,
    /// It takes turns for rows of one token.
    Decoding,
    /// Every token it is due is on the wire: it needs no more rows.
    FullyPlanned,
    /// It gets no more rows, and gives its pages up when its results are in.
    Held,
}

/// A request that owns a lease and a slot.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) job: Box<Job>,
    pub(crate) slot: SlotId,
    pub(crate) lease: Lease,
    pub(crate) phase: Phase,
    /// Positions whose computation is done or on the wire: where the next row starts.
    pub(crate) num_planned: u32,
    /// The last step in which it had a row.
    pub(crate) last_step: StepId,
    num_rows_in_flight: u32,
    num_samples_in_flight: u32,
}

impl Running {
    fn new(job: Box<Job>, slot: SlotId, step: StepId) -> Self {
        Self {
            job,
            slot,
            lease: Lease::default(),
            phase: Phase::Prefilling,
            num_planned: 0,
            last_step: step,
            num_rows_in_flight: 0,
            num_samples_in_flight: 0,
        }
    }

    /// Tokens of prompt and earlier output that are not planned yet.
    pub(crate) fn num_to_prefill(&self) -> u32 {
        self.job.num_known() - self.num_planned
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.num_rows_in_flight > 0
    }

    /// Books a row of `length` tokens, and gives the phase that follows.
    pub(crate) fn book_row(&mut self, step: StepId, length: u32, samples: bool) -> Phase {
        self.num_planned += length;
        self.last_step = step;
        self.num_rows_in_flight += 1;
        self.num_samples_in_flight += u32::from(samples);
        match (
            samples,
            self.job.num_output() + self.num_samples_in_flight < self.job.num_due,
        ) {
            (false, _) => Phase::Prefilling,
            (true, true) => Phase::Decoding,
            (true, false) => Phase::FullyPlanned,
        }
    }

    /// A middle chunk's result is in.
    pub(crate) fn land_chunk(&mut self) {
        self.num_rows_in_flight -= 1;
    }

    /// A sampling row's result is in: the output that follows, and whether it ends the request.
    pub(crate) fn land_sample(
        &mut self,
        token: TokenId,
        sampled_row: u32,
    ) -> (Output, Option<FinishReason>) {
        self.num_rows_in_flight -= 1;
        self.num_samples_in_flight -= 1;
        let first = self.job.num_output();
        let end = self.job.push(token);
        let tokens = smallvec::smallvec![token];
        (
            Output::Tokens {
                request: self.job.id(),
                first,
                tokens,
                sampled_row,
            },
            end,
        )
    }

    /// Back to the queue; the lease and the slot are the caller's to release.
    pub(crate) fn preempt(self) -> (Queued, Lease, SlotId) {
        assert!(
            !self.is_in_flight(),
            "{:?} in {:?} cannot be preempted: its rows are on the wire",
            self.job.id(),
            self.phase
        );
        (Queued::Preempted { job: self.job }, self.lease, self.slot)
    }
}

fn len_u32(tokens: &[TokenId]) -> u32 {
    u32::try_from(tokens.len()).expect("submit keeps prompt and output within max_model_len")
}
