//! What the user asked for, in tokens.

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::ids::{Micros, RequestId, TenantId, TokenId};

/// A request as the scheduler sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// At least one token.
    pub prompt: Arc<[TokenId]>,
    /// Output tokens asked for. The model's length and the pool cap them. With 0 the prompt is computed and
    /// nothing is sampled.
    pub max_tokens: u32,
    /// Token ids that end the output with [`crate::FinishReason::Stop`].
    pub stop_ids: Arc<[TokenId]>,
    /// Answers to the prompt. It is computed once for all, but each is a request of its own.
    pub num_choices: NonZeroU32,
    /// The prompt's log-probabilities are reported, so cached pages are computed again. Of several choices only the
    /// first reports them.
    pub prompt_logprobs: bool,
    /// The prompt's hidden states that its answer is made of, if it is pooled.
    pub pooled: Option<PooledTokens>,
    /// Every token is sampled under a mask that depends on those before it. A row whose mask is late accepts none.
    pub is_masked: bool,
    /// Words that travel with the request when it enters a slot, its output so far apart; 0 for most.
    pub num_slot_words: u32,
    /// Smaller goes first; arrival breaks ties. [`crate::Policy::Fcfs`] ignores it.
    pub priority: i32,
    /// The tenant that [`crate::Policy::Fair`] charges.
    pub tenant: TenantId,
    /// The tenant's share against others'. Its last request's counts.
    pub weight: NonZeroU32,
    /// Requests with different salts never share pages. Neither can then tell from its latency what the
    /// other has asked.
    pub salt: u64,
}

/// The tokens of a prompt whose hidden states are pooled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PooledTokens {
    /// The last one, which is always computed.
    Last,
    /// All of them, so none is taken from the cache.
    All,
}

/// Why a request was rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The prompt is empty.
    #[error("the prompt has no tokens; at least one is needed; send some")]
    EmptyPrompt,
    /// The prompt leaves no room for one output token in the model's context.
    #[error(
        "the prompt has {prompt} tokens, the context holds {limit}, and at least one is for the answer; shorten the prompt"
    )]
    TooLongForModel {
        /// Tokens in the prompt.
        prompt: usize,
        /// The model's context length.
        limit: u32,
    },
    /// The prompt leaves no room for one output token in the KV pool.
    #[error(
        "the prompt has {prompt} tokens, the KV pool holds {limit}, and at least one is for the answer; shorten the prompt or start the server with more pages (--num-pages)"
    )]
    TooLongForPool {
        /// Tokens in the prompt.
        prompt: usize,
        /// Tokens that the whole pool holds.
        limit: u64,
    },
    /// Too many requests wait.
    #[error("the queue is full: {waiting} requests wait, {limit} may; try again later")]
    QueueFull {
        /// Requests waiting.
        waiting: u32,
        /// `max_queue`.
        limit: u32,
    },
    /// Too many prompt tokens wait.
    #[error("the queue is full: {waiting} prompt tokens wait, {limit} may; try again later")]
    QueueTokensFull {
        /// Tokens waiting.
        waiting: u64,
        /// `max_queue_tokens`.
        limit: u64,
    },
    /// It waited, the queue became full, and its tenant had more requests in it than another.
    #[error(
        "the queue became full, and this tenant had the most waiting in it; send fewer requests at a time, or try again later"
    )]
    Displaced,
    /// It waited too long.
    #[error(
        "the request waited {} s in the queue, where at most {} s are allowed (--max-queue-seconds); try again later, or send less at a time",
        seconds(*.waited), seconds(*.limit)
    )]
    Expired {
        /// How long it waited.
        waited: Micros,
        /// `max_queue_seconds`.
        limit: Micros,
    },
    /// The replica is draining.
    #[error(
        "the server is shutting down and takes no new requests; send them to another server, or try again later"
    )]
    Draining,
}

/// A request that was queued, and left the queue unserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// Which.
    pub request: RequestId,
    /// Why.
    pub refusal: Refusal,
}

/// To a millisecond.
fn seconds(micros: Micros) -> f64 {
    (micros.0 as f64 / 1e3).round() / 1e3
}
