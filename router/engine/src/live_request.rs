//! What the driver keeps of a request until it ends.

use std::sync::Arc;

use plait_core::{Micros, PrefillRow, Request, TokenId};
use plait_openai::{Pooled, PreparedChoice};
use plait_proto::{Adjustment, SamplingParams};

use crate::first_uses::Way;
use crate::output_queue::StreamId;
use crate::stream_times::{Moment, StreamTimes};

/// A request that the scheduler has.
#[derive(Debug)]
pub struct LiveRequest {
    /// Whose answer it is part of.
    pub stream: StreamId,
    /// When it came.
    pub received: Micros,
    /// When its first row was planned.
    pub first_row: Option<Micros>,
    /// When its first token came.
    pub first_token: Option<Micros>,
    /// Tokens that it has sampled.
    pub num_output: u32,
    /// Times of its stream.
    pub times: Arc<StreamTimes>,
    /// When its last token came.
    pub last_token: Option<Micros>,
    /// No token of it has come from the ranks that it waits for or runs on.
    pub awaits_token: bool,
    /// How its tokens are sampled.
    pub sampling: SamplingParams,
    /// What it changes about its logits.
    pub adjustment: Option<Arc<Adjustment>>,
    /// Tokens whose log-probabilities it wants besides the best ones'.
    pub scored_ids: Arc<[TokenId]>,
    /// How its prompt is pooled, if it is.
    pub pooled: Option<Pooled>,
    /// Whether any token is to be sampled.
    pub has_output: bool,
    /// Whether its tokens are sampled under masks.
    pub is_masked: bool,
    /// Where its prompt's tokens come from.
    pub prompt: PromptProgress,
}

impl LiveRequest {
    /// One choice of a prompt before its first row.
    pub fn new(
        prompt: &Request,
        choice: PreparedChoice,
        stream: StreamId,
        received: Micros,
        times: Arc<StreamTimes>,
    ) -> Self {
        Self {
            stream,
            received,
            first_row: None,
            first_token: None,
            num_output: 0,
            times,
            last_token: None,
            awaits_token: true,
            sampling: choice.sampling,
            adjustment: choice.adjustment,
            scored_ids: choice.scored_ids,
            pooled: choice.pooled,
            has_output: prompt.max_tokens > 0,
            is_masked: prompt.is_masked,
            prompt: PromptProgress::new(prompt.prompt.len()),
        }
    }

    /// It has a row in a plan.
    pub fn begin(&mut self, now: Micros) {
        if self.first_row.is_none() {
            self.first_row = Some(now);
            self.times.note(Moment::FirstRow, now);
        }
    }

    /// Its next tokens came. Returns when the last ones did.
    pub fn take_tokens(&mut self, num_tokens: usize, now: Micros) -> Option<Micros> {
        self.num_output += u32::try_from(num_tokens).unwrap_or(u32::MAX);
        let last = self.last_token.replace(now);
        if last.is_none() {
            self.first_token = Some(now);
            self.times.note(Moment::FirstToken, now);
        }
        last
    }

    /// How it samples.
    pub fn way(&self) -> Way {
        Way::new(&self.sampling, self.adjustment.is_some(), self.has_output).masked(self.is_masked)
    }

    /// Whether the worker sends records for it.
    pub fn wants_logprobs(&self) -> bool {
        self.sampling.logprobs.is_some() || self.sampling.prompt_logprobs.is_some()
    }
}

/// Prompt tokens that no row of the request computed were cached, or computed by another request beside it.
#[derive(Debug)]
pub struct PromptProgress {
    num_tokens: u32,
    /// Where its rows, or cached tokens, have reached so far.
    end: u32,
    num_cached: u32,
}

impl PromptProgress {
    /// Tokens of the prompt.
    pub fn num_tokens(&self) -> u32 {
        self.num_tokens
    }

    fn new(num_tokens: usize) -> Self {
        Self {
            num_tokens: u32::try_from(num_tokens).expect("a prompt has at most a u32 of tokens"),
            end: 0,
            num_cached: 0,
        }
    }

    /// A row computes the next tokens. Returns the cached tokens so far if they have become more.
    pub fn advance(&mut self, row: &PrefillRow) -> Option<u32> {
        let start = row.start.min(self.num_tokens);
        let num_new = start.saturating_sub(self.end);
        self.num_cached += num_new;
        self.end = self.end.max((row.start + row.length).min(self.num_tokens));
        (num_new > 0).then_some(self.num_cached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plait_core::{RequestId, SlotId};

    fn row(start: u32, length: u32) -> PrefillRow {
        PrefillRow {
            slot: SlotId(0),
            request: RequestId(0),
            start,
            length,
            is_last_chunk: false,
            lookahead: false,
            prompt_logprobs: 0..0,
        }
    }

    #[test]
    fn tokens_before_each_row_that_none_of_its_own_computed_are_cached() {
        let mut prompt = PromptProgress::new(100);
        assert_eq!(prompt.advance(&row(32, 16)), Some(32));
        assert_eq!(prompt.advance(&row(48, 16)), None);
        assert_eq!(prompt.advance(&row(80, 20)), Some(48));
    }

    #[test]
    fn what_a_preempted_request_computed_itself_is_not_cached() {
        let mut prompt = PromptProgress::new(100);
        assert_eq!(prompt.advance(&row(0, 100)), None);
        assert_eq!(prompt.advance(&row(112, 8)), None);
    }
}
