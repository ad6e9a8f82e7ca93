//! From a request's tokens to the bytes that its client reads.

use plait_core::{FinishReason, TokenId};

use crate::answer_parts::CallCounts;
use crate::choice_state::{Pushed, ResponseContext};
use crate::choices::Choices;
use crate::chunk_writer::{ChunkUsage, ChunkWriter};
use crate::logprobs::TokenLogprobs;
use crate::logprobs_budget::Reservation;
use crate::request::GenerateRequest;
use crate::response_body;
use crate::response_head::{Api, ChunkFrame, Head, Usage};

/// Writes the answer of one HTTP request: server-sent events, or one body at the end.
///
/// It owns all it needs and lives on the output thread.
#[derive(Debug)]
pub struct ResponseWriter {
    context: ResponseContext,
    api: Api,
    head: Head,
    /// `None` for one body.
    chunks: Option<ChunkWriter>,
    include_usage: bool,
    prompt_tokens_details: bool,
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
        request: &GenerateRequest,
        context: ResponseContext,
        choices: Choices,
    ) -> Self {
        let (api, head) = (Api::of(request), Head::new(request));
        let tells_cached = request.prompt_tokens_details;
        let usage = match request.continuous_usage_stats {
            true => ChunkUsage::SoFar { tells_cached },
            false => ChunkUsage::Untold,
        };
        let null_usage = request.include_usage && usage == ChunkUsage::Untold;
        let chunks = request.stream.then(|| ChunkWriter {
            api,
            frame: ChunkFrame::new(&head, null_usage),
            usage,
        });
        Self {
            context,
            api,
            head,
            chunks,
            include_usage: request.include_usage,
            prompt_tokens_details: request.prompt_tokens_details,
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
        if let Some(chunks) = &self.chunks {
            chunks.write_delta(&self.context, choice, state, out);
        }
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

    /// Notes how many tokens of a choice's prompt the prefix cache had, for the usage.
    pub fn set_cached_tokens(&mut self, choice: usize, num_tokens: u32) {
        self.choices.set_cached_tokens(choice, num_tokens.into());
    }

    /// Whether the end of the answer is left to [`ResponseWriter::write_body`]: a body with
    /// log-probabilities may have tens of megabytes.
    pub fn defers_body(&self) -> bool {
        let report = self.context.report;
        self.chunks.is_none() && (report.logprobs.is_some() || report.prompt_logprobs.is_some())
    }

    /// Appends a deferred body; all choices have ended.
    pub fn write_body(&self, out: &mut Vec<u8>) {
        self.write_response_end(out);
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
        if let Some(chunks) = &self.chunks {
            chunks.write_delta(&self.context, choice, state, out);
            chunks.write_end(&self.context, choice, state, out);
        }
        if !self.choices.have_ended() {
            return ResponseState::Open;
        }
        if !self.defers_body() {
            self.write_response_end(out);
        }
        ResponseState::Ended
    }

    fn write_response_end(&self, out: &mut Vec<u8>) {
        let usage = self.usage();
        if self.chunks.is_none() {
            response_body::write(
                &self.context,
                self.api,
                &self.head,
                &self.choices,
                usage,
                out,
            );
            return;
        }
        if self.include_usage {
            out.extend_from_slice(b"data: ");
            response_body::write_usage(&self.head, usage, out);
            out.extend_from_slice(b"\n\n");
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn num_thought_tokens(&self) -> Option<u64> {
        let counts = self
            .choices
            .iter()
            .map(|(it, _)| it.num_thought_tokens(&self.context));
        counts.sum()
    }

    /// What became of a choice's tool calls so far.
    pub fn call_counts(&self, choice: usize) -> CallCounts {
        self.choices.get(choice).calls.counts
    }

    fn usage(&self) -> Usage {
        let num_cached = self.choices.firsts().map(|it| it.num_cached_tokens).sum();
        Usage::new(
            self.choices.firsts().map(|it| it.prompt.len() as u64).sum(),
            self.prompt_tokens_details.then_some(num_cached),
            self.choices.num_tokens(),
        )
        .with_thoughts(self.num_thought_tokens())
    }
}
