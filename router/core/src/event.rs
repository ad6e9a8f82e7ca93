//! What happened, told to the scheduler, and what follows from it, told to the caller.

use smallvec::SmallVec;

use crate::ids::{Micros, RequestId, StepId, TokenId};

/// What the scheduler is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A step's result came in; results come in the order of their steps.
    Result(StepResult<'a>),
    /// How long a step on the wire took, told before its result; only [`crate::Settings::itl_target`]
    /// asks for it.
    Measured {
        /// Which step.
        step: StepId,
        /// From its first row's start to its last token, on the worker's clock.
        elapsed: Micros,
    },
    /// The client is gone: of this request only [`Output::Finished`] is still emitted.
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

/// A result that fits no step on the wire: the worker and the scheduler disagree, so the worker cannot
/// be used any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnexpectedResult {
    /// Results come in the order of their steps, one for each.
    #[error("a result of step {} came in while {} was due", .given.0, next_step(*.expected))]
    Step {
        /// The result's step.
        given: StepId,
        /// The oldest step on the wire.
        expected: Option<StepId>,
    },
    /// Not as many rows sampled as the plan said.
    #[error("the result of step {} has {given} sampled rows, its plan has {expected}", .step.0)]
    Rows {
        /// Which step.
        step: StepId,
        /// Rows in the result.
        given: usize,
        /// Rows of the plan that sample.
        expected: usize,
    },
    /// A row accepted no token, or more than it computed.
    #[error("the result of step {} accepts {given} tokens in sampled row {row}; {planned} were planned", .step.0)]
    Accepted {
        /// Which step.
        step: StepId,
        /// Which of the rows that sample.
        row: usize,
        /// Tokens accepted.
        given: u32,
        /// The most that the row could accept.
        planned: u32,
    },
    /// Not as many tokens as were accepted.
    #[error("the result of step {} has {given} tokens, its rows accepted {expected}", .step.0)]
    Tokens {
        /// Which step.
        step: StepId,
        /// Tokens in the result.
        given: usize,
        /// The sum of the accepted counts.
        expected: usize,
    },
}

fn next_step(expected: Option<StepId>) -> String {
    expected.map_or_else(
        || "none".to_owned(),
        |step| format!("that of step {}", step.0),
    )
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
