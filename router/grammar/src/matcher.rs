//! One answer's way through a grammar.

use std::sync::Arc;

use llguidance::api::StopReason;

use crate::thought::{Thought, ThoughtEnd};
use crate::vocabulary::{TokenId, Vocabulary};

/// Which tokens may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Every one: the mask need not be read.
    All,
    /// Those of the mask.
    Some,
    /// None but the end tokens: the answer is complete.
    OnlyEnd,
}

/// Why a matcher does not go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    /// The token is not one of those that may come.
    #[error("the token {0} is not allowed here by the request's grammar")]
    NotAllowed(TokenId),
    /// No token of the vocabulary may come, the ends neither.
    #[error("the request's grammar allows no token of the model's vocabulary here")]
    DeadEnd,
    /// A mask would take too long, or too much memory.
    #[error("the request's grammar is too complex at this place of the answer: {0}")]
    TooComplex(String),
}

/// Follows an answer token by token. An error is final.
pub struct Matcher {
    vocabulary: Arc<Vocabulary>,
    inner: llguidance::Matcher,
    /// The mask of the answer's first token, until that is there.
    first: Option<Arc<[u32]>>,
    thought: Option<Thought>,
    is_over: bool,
}

impl Matcher {
    pub(crate) fn new(
        vocabulary: Arc<Vocabulary>,
        inner: llguidance::Matcher,
        first: Option<Arc<[u32]>>,
        thought: Option<ThoughtEnd>,
    ) -> Self {
        Self {
            vocabulary,
            inner,
            first,
            thought: thought.map(Thought::new),
            is_over: false,
        }
    }

    /// Sets the bits of the tokens that may come, bit t % 32 of word t / 32, and clears the others.
    pub fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, MatchError> {
        mask.fill(0);
        if self.is_over {
            self.set_ends(mask);
            return Ok(Allowed::OnlyEnd);
        }
        match &self.thought {
            Some(thought) if thought.is_open() => return Ok(self.allow_all(mask)),
            _ => self.fill(mask)?,
        }
        if let Some(thought) = &self.thought {
            for &token in thought.allowed_breaks(&self.vocabulary) {
                set_bit(mask, token);
            }
        }
        match mask.iter().any(|word| *word != 0) {
            true => Ok(Allowed::Some),
            false => Err(MatchError::DeadEnd),
        }
    }

    /// The token came.
    pub fn accept(&mut self, token: TokenId) -> Result<(), MatchError> {
        let is_end = self.vocabulary.end_ids().contains(&token);
        if self.is_over {
            return is_end.then_some(()).ok_or(MatchError::NotAllowed(token));
        }
        let text = self.vocabulary.text_of(token);
        match &mut self.thought {
            Some(thought) if thought.is_open() => {
                self.is_over = is_end;
                return match thought.accept(token, text) {
                    Some(behind) => self.accept_bytes(token, &behind),
                    None => Ok(()),
                };
            }
            Some(thought)
                if thought.is_break(&self.vocabulary, token) && !takes(&mut self.inner, token) =>
            {
                thought.accept_break(text);
                return Ok(());
            }
            _ => {}
        }
        self.thought = None;
        self.consume(token)
    }

    /// Whether nothing may follow but an end token.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// The same place in the same grammar, for another answer with the same tokens so far.
    #[must_use]
    pub fn clone_for_choice(&self) -> Self {
        Self {
            vocabulary: self.vocabulary.clone(),
            inner: self.inner.clone(),
            first: self.first.clone(),
            thought: self.thought.clone(),
            is_over: self.is_over,
        }
    }
}

impl Matcher {
    fn fill(&mut self, mask: &mut [u32]) -> Result<(), MatchError> {
        if let Some(first) = &self.first {
            mask.copy_from_slice(first);
            return Ok(());
        }
        match self.inner.compute_mask() {
            Ok(allowed) => {
                let words = allowed.as_slice();
                let num_words = mask.len().min(words.len());
                mask[..num_words].copy_from_slice(&words[..num_words]);
                Ok(())
            }
            Err(error) => Err(self.failure(&error.to_string(), MatchError::DeadEnd)),
        }
    }

    fn allow_all(&self, mask: &mut [u32]) -> Allowed {
        mask.fill(u32::MAX);
        let num_last = self.vocabulary.num_tokens() % 32;
        if let Some(last) = mask.last_mut()
            && num_last != 0
        {
            *last = (1 << num_last) - 1;
        }
        Allowed::All
    }

    fn set_ends(&self, mask: &mut [u32]) {
        for &token in self.vocabulary.end_ids() {
            set_bit(mask, token);
        }
    }

    fn consume(&mut self, token: TokenId) -> Result<(), MatchError> {
        self.first = None;
        if self.vocabulary.end_ids().contains(&token) {
            self.is_over = self.inner.is_accepting().unwrap_or(false);
            return match self.is_over {
                true => Ok(()),
                false => Err(MatchError::NotAllowed(token)),
            };
        }
        if let Err(error) = self.inner.consume_token(token) {
            return Err(self.failure(&error.to_string(), MatchError::NotAllowed(token)));
        }
        self.is_over = self.inner.is_stopped();
        Ok(())
    }

    /// The bytes of `token` behind a thought's end.
    fn accept_bytes(&mut self, token: TokenId, text: &[u8]) -> Result<(), MatchError> {
        for part in self.vocabulary.tokens_of(text) {
            match self.accept(part) {
                Ok(()) => {}
                Err(MatchError::NotAllowed(_)) => return Err(MatchError::NotAllowed(token)),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn failure(&self, problem: &str, otherwise: MatchError) -> MatchError {
        match self.inner.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                MatchError::TooComplex(first_line(problem))
            }
            _ => otherwise,
        }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher")
            .field("is_over", &self.is_over)
            .finish_non_exhaustive()
    }
}

fn takes(matcher: &mut llguidance::Matcher, token: TokenId) -> bool {
    matches!(matcher.validate_tokens(&[token]), Ok(1))
}

fn set_bit(mask: &mut [u32], token: TokenId) {
    mask[token as usize / 32] |= 1 << (token % 32);
}

fn first_line(problem: &str) -> String {
    problem.lines().next().unwrap_or_default().to_owned()
}
