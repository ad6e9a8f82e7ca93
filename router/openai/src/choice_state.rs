//! One choice of an answer: its text so far, and what its client has not read yet.

use std::sync::Arc;

use plait_core::{FinishReason, TokenId};
use plait_text::{OutputText, Vocabulary};
use serde::Serialize;

use crate::logprobs::{ScoredToken, TokenLogprobs, TokenNames};
use crate::request::OutputFields;
use crate::response_head::Usage;

/// What all choices of one answer share.
#[derive(Debug)]
pub(crate) struct ResponseContext {
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) eos_token_ids: Arc<[TokenId]>,
    pub(crate) stops: Vec<String>,
    /// The answer begins with the prompt.
    pub(crate) echo: bool,
    /// Tokens after which stop strings are looked for.
    pub(crate) min_tokens: u32,
    pub(crate) report: OutputFields,
}

impl ResponseContext {
    /// What tokens are called in log-probabilities.
    pub(crate) fn names(&self) -> TokenNames<'_> {
        TokenNames {
            vocabulary: &self.vocabulary,
            as_ids: self.report.return_tokens_as_token_ids,
        }
    }

    /// Best tokens that the log-probabilities of an echoed prompt list; `None` if the answer has none.
    pub(crate) fn num_echoed(&self) -> Option<usize> {
        let asked = self.report.logprobs.filter(|_| self.echo)?;
        usize::try_from(asked).ok()
    }
}

/// What new tokens mean for a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pushed {
    /// It goes on.
    Continue,
    /// A stop string ended it: the scheduler needs [`plait_core::Event::Stop`]. Tokens that still come
    /// for this choice are ignored.
    StopString,
}

/// One choice.
#[derive(Debug)]
pub(crate) struct ChoiceState {
    pub(crate) prompt: Arc<[TokenId]>,
    /// The prompt's text, if the answer begins with it; a stream has sent it with its first chunk.
    pub(crate) echo: Option<Arc<str>>,
    /// Leading prompt tokens that the prefix cache had.
    pub(crate) num_cached_tokens: u64,
    pub(crate) unsent: Unsent,
    pub(crate) num_tokens: u64,
    /// Characters of the tokens whose log-probabilities were sent.
    pub(crate) num_scored_chars: u64,
    pub(crate) has_first_chunk: bool,
    pub(crate) ended: Option<FinishReason>,
    stopped_by: Option<StoppedBy>,
    output: OutputText,
}

/// What ended a choice, other than the model's own end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoppedBy {
    /// The stop string of this index.
    Text(usize),
    /// A stop id of the request.
    Token(TokenId),
}

/// `stop_reason` (vLLM's): the stop string or stop id that ended a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum StopReason<'a> {
    None,
    Text(&'a str),
    Token(TokenId),
}

/// `finish_reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FinishWord {
    Stop,
    Length,
    Abort,
}

impl From<FinishReason> for FinishWord {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Abort => Self::Abort,
        }
    }
}

/// What a client can read but was not sent.
#[derive(Debug, Default)]
pub(crate) struct Unsent {
    pub(crate) text: String,
    /// Empty unless the request asked for ids.
    pub(crate) token_ids: Vec<TokenId>,
    /// Empty unless the request asked for log-probabilities.
    pub(crate) scored: Vec<ScoredToken>,
}

impl Unsent {
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.token_ids.is_empty() && self.scored.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.token_ids.clear();
        self.scored.clear();
    }
}

impl ChoiceState {
    pub(crate) fn new(prompt: Arc<[TokenId]>, echo: Option<Arc<str>>, output: OutputText) -> Self {
        Self {
            prompt,
            echo,
            num_cached_tokens: 0,
            unsent: Unsent::default(),
            num_tokens: 0,
            num_scored_chars: 0,
            has_first_chunk: false,
            ended: None,
            stopped_by: None,
            output,
        }
    }

    /// Takes tokens up to the one that ends the choice; what comes after it is dropped.
    pub(crate) fn push(
        &mut self,
        context: &ResponseContext,
        tokens: &[TokenId],
        ends_with_stop_id: bool,
        logprobs: Option<&[TokenLogprobs]>,
    ) -> Pushed {
        if self.stopped_by.is_some() || self.ended.is_some() {
            return Pushed::Continue;
        }
        for (index, &token) in tokens.iter().enumerate() {
            let scores = logprobs.and_then(|records| records.get(index));
            self.count(context, token, scores);
            if ends_with_stop_id && index + 1 == tokens.len() {
                self.stop_at(context, token);
                if context.report.include_stop_str_in_output {
                    self.read(context, token);
                }
            } else if self.read(context, token) {
                return Pushed::StopString;
            }
        }
        Pushed::Continue
    }

    /// No token follows: what was held back is shown, unless it completes a stop string.
    pub(crate) fn finish(&mut self, context: &ResponseContext, reason: FinishReason) {
        if !self.is_stopped_by_text() {
            let stops = self.stops(context);
            let text = &mut self.unsent.text;
            let stop = self.output.finish(&context.vocabulary, stops, text);
            self.stopped_by = stop.map(StoppedBy::Text).or(self.stopped_by);
        }
        self.ended = Some(if self.is_stopped_by_text() {
            FinishReason::Stop
        } else {
            reason
        });
    }

    /// `stop_reason`.
    pub(crate) fn stop_reason<'a>(&self, context: &'a ResponseContext) -> StopReason<'a> {
        match self.stopped_by {
            None => StopReason::None,
            Some(StoppedBy::Text(index)) => StopReason::Text(&context.stops[index]),
            Some(StoppedBy::Token(token)) => StopReason::Token(token),
        }
    }

    /// What it has cost so far; `tells_cached` for a client that may know what the prefix cache had.
    pub(crate) fn usage(&self, tells_cached: bool) -> Usage {
        let num_cached = tells_cached.then_some(self.num_cached_tokens);
        Usage::new(self.prompt.len() as u64, num_cached, self.num_tokens)
    }

    /// `token_ids` of what was not sent yet, if the request asked for ids.
    pub(crate) fn token_ids(&self, context: &ResponseContext) -> Option<&[TokenId]> {
        let wanted = context.report.return_token_ids;
        wanted.then_some(&self.unsent.token_ids)
    }

    /// `prompt_token_ids`, if the request asked for ids.
    pub(crate) fn prompt_token_ids(&self, context: &ResponseContext) -> Option<&[TokenId]> {
        context.report.return_token_ids.then_some(&self.prompt)
    }

    /// The stop strings that are looked for by now.
    fn stops<'a>(&self, context: &'a ResponseContext) -> &'a [String] {
        match self.num_tokens > context.min_tokens.into() || context.min_tokens == 0 {
            true => &context.stops,
            false => &[],
        }
    }

    fn is_stopped_by_text(&self) -> bool {
        matches!(self.stopped_by, Some(StoppedBy::Text(_)))
    }

    fn count(&mut self, context: &ResponseContext, token: TokenId, scores: Option<&TokenLogprobs>) {
        self.num_tokens += 1;
        if context.report.return_token_ids {
            self.unsent.token_ids.push(token);
        }
        if let Some(scores) = scores {
            let scores = scores.clone();
            self.unsent.scored.push(ScoredToken { token, scores });
        }
    }

    fn stop_at(&mut self, context: &ResponseContext, token: TokenId) {
        if !context.eos_token_ids.contains(&token) {
            self.stopped_by = Some(StoppedBy::Token(token));
        }
    }

    /// Whether a stop string is complete with this token.
    fn read(&mut self, context: &ResponseContext, token: TokenId) -> bool {
        let stops = self.stops(context);
        let text = &mut self.unsent.text;
        let stop = self.output.push(&context.vocabulary, stops, token, text);
        self.stopped_by = stop.map(StoppedBy::Text).or(self.stopped_by);
        stop.is_some()
    }
}
