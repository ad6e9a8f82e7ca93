//! What the scheduler is told, and what it answers.

use std::ops::RangeInclusive;

use smallvec::SmallVec;

use crate::ids::{Micros, RequestId, StepId, TokenId};

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A step's result. Results come in the order of their steps.
    Result(StepResult<'a>),
    /// How long a step in flight took; it comes before the step's result. Only
    /// [`crate::SchedulerSettings::itl_target_ms`] needs it.
    Measured {
        /// Which step.
        step: StepId,
        /// From the start of the first row to the last token, on the worker's clock.
        elapsed: Micros,
    },
    /// The mask is there that a row of this request lacked. It may come before the result in which that row
    /// accepts no token, but not before those of earlier steps.
    MaskReady(RequestId),
    /// The client is gone. Only [`Output::Finished`] is still emitted.
    Abort(RequestId),
    /// A stop string was found in the request's text.
    Stop(RequestId),
    /// Nobody finds a page again that could be found until now. Requests that run keep theirs, and publish what they
    /// compute from now on.
    FlushCache,
}

/// Stands for the token of a row whose logits were NaN or infinite.
pub const FAILED_ROW: TokenId = TokenId::MAX;

/// What the worker sampled in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepResult<'a> {
    /// Which step.
    pub step: StepId,
    /// Accepted tokens of each sampling row, in the plan's row order: last chunks, then decode rows. A row of a
    /// masked request accepts none if its mask was late.
    pub num_accepted: &'a [u32],
    /// These tokens, row after row; [`FAILED_ROW`] of a row whose logits were NaN or infinite.
    pub token_ids: &'a [TokenId],
}

/// A result that fits no step in flight. Worker and scheduler disagree, so the worker is unusable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnexpectedResult {
    /// Every step has one result, and results come in the order of their steps.
    #[error("a result of step {} came in while {} was due", .given.0, next_step(*.expected))]
    Step {
        /// The result's step.
        given: StepId,
        /// The oldest step in flight.
        expected: Option<StepId>,
    },
    /// The number of sampled rows is not the plan's.
    #[error("the result of step {} has {given} sampled rows, its plan has {expected}", .step.0)]
    Rows {
        /// Which step.
        step: StepId,
        /// Rows in the result.
        given: usize,
        /// Rows of the plan that sample.
        expected: usize,
    },
    /// A row accepted no token though it needs no mask, or more than it computed, or some after one whose mask
    /// was late.
    #[error("the result of step {} accepts {given} tokens in sampled row {row}; {} to {} were possible", .step.0, .possible.start(), .possible.end())]
    Accepted {
        /// Which step.
        step: StepId,
        /// Index among the sampling rows.
        row: usize,
        /// Tokens accepted.
        given: u32,
        /// What the row could accept.
        possible: RangeInclusive<u32>,
    },
    /// The number of tokens is not the sum of the accepted counts.
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

/// What follows for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// New output tokens, each emitted once and in order.
    Tokens {
        /// Whose.
        request: RequestId,
        /// Index of the first of them in the request's output.
        first: u32,
        /// The tokens. Before [`FinishReason::Stop`], the last one is the stop id.
        tokens: SmallVec<[TokenId; 2]>,
        /// Index of their row among the step's sampling rows, to find the log-probabilities.
        sampled_row: u32,
    },
    /// The request ended. Each submitted request ends exactly once.
    Finished {
        /// Which.
        request: RequestId,
        /// Why.
        reason: FinishReason,
    },
    /// The request ended in a row that failed. Nothing else comes of it.
    Failed {
        /// Which.
        request: RequestId,
    },
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FinishReason {
    /// A stop id was sampled, or [`Event::Stop`] came.
    Stop,
    /// The output has all tokens that were due, or none was and the prompt is computed.
    Length,
    /// [`Event::Abort`] came.
    Abort,
}
