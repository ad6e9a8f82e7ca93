//! From a request's tokens to the bytes that its client reads.

use plait_core::{FinishReason, TokenId};

use crate::answer_parts::CallCounts;
use crate::choice_state::{Pushed, ResponseContext};
use crate::choices::Choices;
use crate::error::ApiError;
use crate::logprobs::TokenLogprobs;
use crate::logprobs_budget::Reservation;
use crate::renderer::Renderer;

/// Writes the answer of one HTTP request: server-sent events, or one body at the end.
///
/// It owns all it needs and lives on the output thread.
#[derive(Debug)]
pub struct ResponseWriter {
    context: ResponseContext,
    renderer: Box<dyn Renderer>,
    choices: Choices,
    pub(crate) reservation: Option<Reservation>,
}

/// Whether a request has more to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum ResponseState {
    /// Some choice goes on.
    Open,
    /// All choices ended and the answer is complete.
    Ended,
}

impl ResponseWriter {
    pub(crate) fn new(
        renderer: Box<dyn Renderer>,
        context: ResponseContext,
        choices: Choices,
    ) -> Self {
        Self {
            context,
            renderer,
            choices,
            reservation: None,
        }
    }

    /// Takes one choice's new tokens and appends what the client can read now to `out`, perhaps
    /// nothing.
    ///
    /// With `ends_with_stop_id` the last token is one that ends the output; its text is not shown.
    /// `logprobs` has one record for each token if the request asked for them.
    pub fn push(
        &mut self,
        choice: usize,
        tokens: &[TokenId],
        ends_with_stop_id: bool,
        logprobs: Option<&[TokenLogprobs]>,
        out: &mut Vec<u8>,
    ) -> Pushed {
        let state = self.choices.get_mut(choice);
        let pushed = state.push(&self.context, tokens, ends_with_stop_id, logprobs);
        self.renderer.write_news(&self.context, choice, state, out);
        pushed
    }

    /// Takes the records of the prompt tokens `first_position ..`; repeated ones (after a
    /// preemption) and those beyond the prompt are fine.
    pub fn push_prompt_logprobs(
        &mut self,
        choice: usize,
        first_position: u32,
        records: &[TokenLogprobs],
    ) {
        self.choices.set_scores(choice, first_position, records);
    }

    /// Takes the pooled hidden states of a choice's prompt, as the worker computed them.
    pub fn set_embedding(&mut self, choice: usize, embedding: Vec<f32>) {
        self.choices.set_embedding(choice, embedding);
    }

    /// Notes how many tokens of a choice's prompt the prefix cache had, for the usage.
    pub fn set_cached_tokens(&mut self, choice: usize, num_tokens: u32) {
        self.choices.set_cached_tokens(choice, num_tokens.into());
    }

    /// Whether the end of the answer is left to [`ResponseWriter::write_body`]: a body with
    /// log-probabilities may have tens of megabytes.
    pub fn defers_body(&self) -> bool {
        let report = self.context.report;
        !self.renderer.is_stream()
            && (report.logprobs.is_some()
                || report.prompt_logprobs.is_some()
                || report.embedding.is_some())
    }

    /// Appends a deferred body; all choices have ended.
    pub fn write_body(&mut self, out: &mut Vec<u8>) {
        self.renderer.write_end(&self.context, &self.choices, out);
    }

    /// Ends one choice and appends what is left of its text, or the whole answer unless that is deferred, to
    /// `out`.
    pub fn finish(
        &mut self,
        choice: usize,
        reason: FinishReason,
        out: &mut Vec<u8>,
    ) -> ResponseState {
        let state = self.choices.get_mut(choice);
        state.finish(&self.context, reason);
        self.renderer.write_news(&self.context, choice, state, out);
        self.renderer
            .write_choice_end(&self.context, choice, state, out);
        if !self.choices.have_ended() {
            return ResponseState::Open;
        }
        if !self.defers_body() {
            self.renderer.write_end(&self.context, &self.choices, out);
        }
        ResponseState::Ended
    }

    /// Ends a stream that cannot go on with an event of its own, where its API has one; false if it wrote nothing.
    pub fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) -> bool {
        self.renderer.write_failure(error, out)
    }

    /// Tokens of the prompts, and of the output so far.
    pub fn num_tokens(&self) -> [u64; 2] {
        let counts = self.choices.counts(&self.context);
        [counts.num_prompt, counts.num_output]
    }

    /// What became of a choice's tool calls so far.
    pub fn call_counts(&self, choice: usize) -> CallCounts {
        self.choices.get(choice).calls.counts
    }
}
