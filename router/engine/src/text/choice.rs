//! One choice of an answer: from tokens to the text that its client has not read yet.

use std::sync::Arc;

use plait_core::{FinishReason, TokenId};

use super::detokenise::{Detokeniser, TextStart};
use super::logprobs::{ScoredToken, TokenLogprobs};
use super::request::ReportFields;
use super::stop::StopScan;
use super::stream::Pushed;
use super::vocabulary::Vocabulary;

/// What all choices of one answer share.
#[derive(Debug)]
pub(super) struct Rules {
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) eos_token_ids: Arc<[TokenId]>,
    pub(super) stops: Vec<String>,
    pub(super) report: ReportFields,
}

/// One choice.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) prompt: Arc<[TokenId]>,
    /// Leading prompt tokens that the prefix cache had.
    pub(super) num_cached_tokens: u64,
    /// One for each prompt token where they were asked for, else empty.
    pub(super) prompt_scores: Vec<Option<TokenLogprobs>>,
    pub(super) unsent: Unsent,
    pub(super) num_tokens: u64,
    /// Characters of the tokens whose log-probabilities were written.
    pub(super) num_scored_chars: u64,
    /// Something of it was written.
    pub(super) spoke: bool,
    pub(super) ended: Option<FinishReason>,
    pub(super) stopped_by: Option<StoppedBy>,
    detokeniser: Detokeniser,
    scan: StopScan,
}

/// What ended a choice, other than the model's own end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoppedBy {
    /// The stop string of this index.
    Text(usize),
    /// A stop id of the request.
    Token(TokenId),
}

/// What a client can read but was not sent.
#[derive(Debug, Default)]
pub(super) struct Unsent {
    pub(super) text: String,
    /// Kept only where the request asked for ids.
    pub(super) token_ids: Vec<TokenId>,
    /// Kept only where the request asked for log-probabilities.
    pub(super) scored: Vec<ScoredToken>,
}

impl Unsent {
    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.token_ids.is_empty() && self.scored.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.text.clear();
        self.token_ids.clear();
        self.scored.clear();
    }
}

impl Choice {
    pub(super) fn new(rules: &Rules, prompt: Arc<[TokenId]>, start: TextStart) -> Self {
        let num_scores = match rules.report.prompt_logprobs {
            Some(_) => prompt.len(),
            None => 0,
        };
        Self {
            prompt,
            num_cached_tokens: 0,
            prompt_scores: vec![None; num_scores],
            unsent: Unsent::default(),
            num_tokens: 0,
            num_scored_chars: 0,
            spoke: false,
            ended: None,
            stopped_by: None,
            detokeniser: Detokeniser::new(&rules.vocabulary, start),
            scan: StopScan::default(),
        }
    }

    /// Takes tokens up to the one that ends the choice; what comes after it is dropped.
    pub(super) fn push(
        &mut self,
        rules: &Rules,
        tokens: &[TokenId],
        ends_with_stop_id: bool,
        logprobs: Option<&[TokenLogprobs]>,
    ) -> Pushed {
        if self.stopped_by.is_some() || self.ended.is_some() {
            return Pushed::Continue;
        }
        for (index, &token) in tokens.iter().enumerate() {
            self.count(
                rules,
                token,
                logprobs.and_then(|records| records.get(index)),
            );
            if ends_with_stop_id && index + 1 == tokens.len() {
                self.stop_at(rules, token);
            } else if self.read(rules, token) {
                return Pushed::StopString;
            }
        }
        Pushed::Continue
    }

    /// No token follows: what was held back is shown, unless it completes a stop string.
    pub(super) fn finish(&mut self, rules: &Rules, reason: FinishReason) -> FinishReason {
        if !matches!(self.stopped_by, Some(StoppedBy::Text(_))) {
            let mut rest = String::new();
            self.detokeniser.finish(&rules.vocabulary, &mut rest);
            self.show(rules, &rest);
            self.scan.finish(&mut self.unsent.text);
        }
        let reason = match self.stopped_by {
            Some(StoppedBy::Text(_)) => FinishReason::Stop,
            _ => reason,
        };
        self.ended = Some(reason);
        reason
    }

    fn count(&mut self, rules: &Rules, token: TokenId, scores: Option<&TokenLogprobs>) {
        self.num_tokens += 1;
        if rules.report.return_token_ids {
            self.unsent.token_ids.push(token);
        }
        if let Some(scores) = scores {
            let scores = scores.clone();
            self.unsent.scored.push(ScoredToken { token, scores });
        }
    }

    fn stop_at(&mut self, rules: &Rules, token: TokenId) {
        if !rules.eos_token_ids.contains(&token) {
            self.stopped_by = Some(StoppedBy::Token(token));
        }
    }

    /// Whether a stop string is complete with this token.
    fn read(&mut self, rules: &Rules, token: TokenId) -> bool {
        let mut piece = String::new();
        self.detokeniser.push(&rules.vocabulary, token, &mut piece);
        self.show(rules, &piece)
    }

    fn show(&mut self, rules: &Rules, piece: &str) -> bool {
        let stop = self.scan.push(&rules.stops, piece, &mut self.unsent.text);
        if let Some(index) = stop {
            self.stopped_by = Some(StoppedBy::Text(index));
        }
        stop.is_some()
    }
}
