//! One choice of an answer: its text so far, and what its client has not read yet.

use std::sync::Arc;

use plait_core::{FinishReason, TokenId};
use plait_text::{OutputText, Parsed, Vocabulary};
use serde::Serialize;

use crate::answer_parts::{CallRules, Calls, Unsent};
use crate::logprobs::{ScoredToken, TokenLogprobs, TokenNames};
use crate::request::OutputFields;
use crate::response_head::TokenCounts;

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
    pub(crate) calls: CallRules,
    /// Thoughts are told apart, so that the usage counts them.
    pub(crate) finds_thoughts: bool,
    /// The usage says how much of the prompt was cached.
    pub(crate) tells_cached: bool,
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
    /// A stop string or its only call ended it: the scheduler needs [`plait_core::Event::Stop`]. Tokens that still come
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
    num_thought_tokens: u64,
    pub(crate) calls: Calls,
    /// Its index in the answer.
    index: usize,
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
    /// The one call that the request wants.
    Call,
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
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishWord {
    Stop,
    Length,
    Abort,
    ToolCalls,
    /// The older name of `tool_calls`.
    FunctionCall,
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

impl ChoiceState {
    pub(crate) fn new(
        prompt: Arc<[TokenId]>,
        echo: Option<Arc<str>>,
        (index, output): (usize, OutputText),
    ) -> Self {
        Self {
            prompt,
            echo,
            num_cached_tokens: 0,
            unsent: Unsent::default(),
            num_tokens: 0,
            num_thought_tokens: 0,
            calls: Calls::default(),
            index,
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
            } else if self.read(context, token) || self.ends_after_call(context) {
                return Pushed::StopString;
            }
        }
        Pushed::Continue
    }

    /// No token follows: what was held back is shown, unless it completes a stop string.
    pub(crate) fn finish(&mut self, context: &ResponseContext, reason: FinishReason) {
        if !self.is_stopped_by_text() {
            let stops = self.stops(context);
            let rules = (self.index, context.calls);
            let (output, calls, unsent) = (&mut self.output, &mut self.calls, &mut self.unsent);
            let stop = output.finish(&context.vocabulary, stops, &mut |parsed| {
                calls.take(parsed, rules, unsent);
            });
            self.stopped_by = stop.map(StoppedBy::Text).or(self.stopped_by);
        } else if self.stopped_by != Some(StoppedBy::Call) {
            self.finish_stopped(context);
        }
        self.forget_thoughts(context);
        self.ended = Some(if self.is_stopped_by_text() {
            FinishReason::Stop
        } else {
            reason
        });
    }

    /// `stop_reason`.
    pub(crate) fn stop_reason<'a>(&self, context: &'a ResponseContext) -> StopReason<'a> {
        match self.stopped_by {
            None | Some(StoppedBy::Call) => StopReason::None,
            Some(StoppedBy::Text(index)) => StopReason::Text(&context.stops[index]),
            Some(StoppedBy::Token(token)) => StopReason::Token(token),
        }
    }

    /// What it has cost so far.
    pub(crate) fn counts(&self, context: &ResponseContext) -> TokenCounts {
        TokenCounts {
            num_prompt: self.prompt.len() as u64,
            num_cached: context.tells_cached.then_some(self.num_cached_tokens),
            num_output: self.num_tokens,
            num_thought: self.num_thought_tokens(context),
        }
    }

    /// Tokens within thoughts, if thoughts are told apart.
    pub(crate) fn num_thought_tokens(&self, context: &ResponseContext) -> Option<u64> {
        context.finds_thoughts.then_some(self.num_thought_tokens)
    }

    /// `finish_reason`, once it has ended.
    pub(crate) fn finish_word(&self, context: &ResponseContext) -> Option<FinishWord> {
        let word = FinishWord::from(self.ended?);
        let has_calls = self.calls.counts.complete > 0 && !context.calls.is_named;
        Some(match (word, has_calls, context.calls.are_functions) {
            (FinishWord::Stop, true, false) => FinishWord::ToolCalls,
            (FinishWord::Stop, true, true) => FinishWord::FunctionCall,
            (word, ..) => word,
        })
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
        matches!(self.stopped_by, Some(StoppedBy::Text(_) | StoppedBy::Call))
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
        let rules = (self.index, context.calls);
        let was_thinking = self.output.is_thinking();
        let (output, calls, unsent) = (&mut self.output, &mut self.calls, &mut self.unsent);
        let stop = output.push(&context.vocabulary, stops, token, &mut |parsed| {
            calls.take(parsed, rules, unsent);
        });
        self.num_thought_tokens += u64::from(was_thinking && self.output.is_thinking());
        self.forget_thoughts(context);
        self.stopped_by = stop.map(StoppedBy::Text).or(self.stopped_by);
        stop.is_some()
    }

    /// Whether the one call that the request wants is complete.
    fn ends_after_call(&mut self, context: &ResponseContext) -> bool {
        let is_over = self.calls.are_over(context.calls);
        if is_over {
            self.stopped_by = Some(StoppedBy::Call);
        }
        is_over
    }

    /// A stop string ended the text: what the parser held back is passed on.
    fn finish_stopped(&mut self, context: &ResponseContext) {
        let rules = (self.index, context.calls);
        let (calls, unsent) = (&mut self.calls, &mut self.unsent);
        let emit = &mut |parsed: Parsed<'_>| calls.take(parsed, rules, unsent);
        self.output.finish_parsing(emit);
    }

    fn forget_thoughts(&mut self, context: &ResponseContext) {
        if !context.report.include_reasoning {
            self.unsent.forget_thoughts();
        }
    }
}
