//! What the user asked for, in tokens.

use std::sync::Arc;

use crate::ids::{TenantId, TokenId};

/// A request as the scheduler sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// At least one token.
    pub prompt: Arc<[TokenId]>,
    /// Output tokens asked for; the scheduler caps them by the model's length and the pool.
    pub max_tokens: u32,
    /// Tokens that end the output with [`crate::FinishReason::Stop`]: end tokens and stop ids.
    pub stop_ids: Arc<[TokenId]>,
    /// The log-probabilities of its prompt are reported, so that cached pages are computed again.
    pub prompt_logprobs: bool,
    /// Smaller goes first; arrival decides between equals. [`crate::Policy::Fcfs`] does not look at it.
    pub priority: i32,
    /// Whose share [`crate::Policy::Fair`] counts its tokens against.
    pub tenant: TenantId,
    /// Requests of different salts never share pages, so that neither can tell by the time of an answer
    /// what the other has asked.
    pub salt: u64,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The prompt is empty.
    #[error("the prompt has no tokens; at least one is needed")]
    EmptyPrompt,
    /// No output token is asked for.
    #[error("max_tokens is 0; at least 1 is needed")]
    NoOutput,
    /// The prompt leaves no room for one output token in the model's context.
    #[error(
        "the prompt has {prompt} tokens, the context holds {limit}, and at least one is for the answer; shorten the prompt"
    )]
    TooLongForModel {
        /// Tokens in the prompt.
        prompt: usize,
        /// The model's length.
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
    /// As many requests wait as may.
    #[error("the queue is full: {waiting} requests wait, {limit} may; try again later")]
    QueueFull {
        /// Requests waiting.
        waiting: u32,
        /// `max_queue`.
        limit: u32,
    },
    /// As many prompt tokens wait as may.
    #[error("the queue is full: {waiting} prompt tokens wait, {limit} may; try again later")]
    QueueTokensFull {
        /// Tokens waiting.
        waiting: u64,
        /// `max_queue_tokens`.
        limit: u64,
    },
    /// The replica is draining.
    #[error("the server is shutting down and takes no new requests")]
    Draining,
}
