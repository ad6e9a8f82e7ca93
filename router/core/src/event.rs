//! What happened, told to the scheduler, and what follows from it, told to the caller.

use smallvec::SmallVec;

use crate::ids::{RequestId, StepId, TokenId};

/// What the scheduler is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A step's result came in; results come in the order of their steps.
    Result(StepResult<'a>),
    /// The client is gone: nothing more is emitted for this request.
    Abort(RequestId),
    /// A stop string was found in the request's text: it has all it needs.
    Stop(RequestId),
}

/// What the worker sampled in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepResult<'a> {
    /// Which step.
    pub step: StepId,
    /// For each row that sampled, in the plan's row order (last chunks, then decode rows): how many
    /// tokens were accepted.
    pub num_accepted: &'a [u32],
    /// Their tokens, one row after the other.
    pub token_ids: &'a [TokenId],
}

/// What the caller is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// New output tokens, each emitted once and in order.
    Tokens {
        /// Whose.
        request: RequestId,
        /// Index of the first of them in the request's output.
        first: u32,
        /// The tokens. With [`FinishReason::Stop`] following, the last one is the stop id.
        tokens: SmallVec<[TokenId; 2]>,
        /// Which of the step's sampling rows they came from (for the log-probabilities).
        sampled_row: u32,
    },
    /// The request ended; each submitted request ends exactly once.
    Finished {
        /// Which.
        request: RequestId,
        /// Why.
        reason: FinishReason,
    },
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FinishReason {
    /// A stop id was sampled, or [`Event::Stop`] came.
    Stop,
    /// The output has as many tokens as were due.
    Length,
    /// [`Event::Abort`] came.
    Abort,
}
