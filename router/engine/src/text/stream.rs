//! From a request's tokens to the bytes that its client reads.

use std::sync::Arc;

use plait_core::{FinishReason, TokenId};

use super::choice::{Choice, Rules};
use super::detokenise::TextStart;
use super::envelope::{Envelope, Usage};
use super::logprobs::TokenLogprobs;
use super::{body, chunk};

/// Writes the answer of one HTTP request: server-sent events, or one body at the end.
///
/// It owns all it needs and lives on the output thread.
#[derive(Debug)]
pub struct StreamText {
    rules: Rules,
    envelope: Envelope,
    choices: Vec<Choice>,
}

/// What new tokens mean for a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pushed {
    /// It goes on.
    Continue,
    /// A stop string ended it: the scheduler is to be told ([`plait_core::Event::Stop`]). Tokens
    /// that still come for this choice are ignored.
    StopString,
}

/// Whether a request has more to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum StreamState {
    /// Some choice goes on.
    Open,
    /// All choices ended and the answer is complete.
    Ended,
}

impl StreamText {
    pub(super) fn new(
        rules: Rules,
        envelope: Envelope,
        prompts: Vec<(Arc<[TokenId]>, TextStart)>,
    ) -> Self {
        let choices = prompts
            .into_iter()
            .map(|(prompt, start)| Choice::new(&rules, prompt, start))
            .collect();
        Self {
            rules,
            envelope,
            choices,
        }
    }

    /// Takes one choice's new tokens and appends what the client can read now to `out`, perhaps
    /// nothing.
    ///
    /// With `ends_with_stop_id` the last token is one that ends the output; its text is not shown.
    /// `logprobs` has one record for each token where the request asked for them.
    pub fn push(
        &mut self,
        choice: usize,
        tokens: &[TokenId],
        ends_with_stop_id: bool,
        logprobs: Option<&[TokenLogprobs]>,
        out: &mut Vec<u8>,
    ) -> Pushed {
        let state = &mut self.choices[choice];
        let pushed = state.push(&self.rules, tokens, ends_with_stop_id, logprobs);
        if self.envelope.stream {
            chunk::write_news(&self.rules, &self.envelope, choice, state, out);
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
        let scores = &mut self.choices[choice].prompt_scores;
        let places = scores.iter_mut().skip(first_position as usize);
        for (place, record) in places.zip(records) {
            *place = Some(record.clone());
        }
    }

    /// Notes how many tokens of a choice's prompt the prefix cache had, for the usage.
    pub fn set_cached_tokens(&mut self, choice: usize, num_tokens: u32) {
        self.choices[choice].num_cached_tokens = num_tokens.into();
    }

    /// Ends one choice and appends what is left of its text, or the whole answer, to `out`.
    pub fn finish(
        &mut self,
        choice: usize,
        reason: FinishReason,
        out: &mut Vec<u8>,
    ) -> StreamState {
        let state = &mut self.choices[choice];
        let reason = state.finish(&self.rules, reason);
        if self.envelope.stream {
            chunk::write_news(&self.rules, &self.envelope, choice, state, out);
            chunk::write_end(&self.rules, &self.envelope, choice, state, reason, out);
        }
        if self.choices.iter().any(|it| it.ended.is_none()) {
            return StreamState::Open;
        }
        let usage = self.usage();
        if self.envelope.stream {
            self.envelope.end_stream(usage, out);
        } else {
            body::write(&self.rules, &self.envelope, &mut self.choices, usage, out);
        }
        StreamState::Ended
    }

    fn usage(&self) -> Usage {
        Usage {
            num_prompt_tokens: self.choices.iter().map(|it| it.prompt.len() as u64).sum(),
            num_cached_tokens: self.choices.iter().map(|it| it.num_cached_tokens).sum(),
            num_completion_tokens: self.choices.iter().map(|it| it.num_tokens).sum(),
        }
    }
}
