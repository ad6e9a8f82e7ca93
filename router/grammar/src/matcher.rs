//! One answer's way through a grammar.

use std::sync::Arc;

use llguidance::api::StopReason;

use crate::error::is_too_complex;
use crate::thought::{NextTokens, Step, Thought};
use crate::vocabulary::{TokenId, Vocabulary};

/// Which tokens may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Every one: the mask need not be read.
    All,
    /// Every one, from here to the answer's end.
    Free,
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
    /// None: the answer may be any text.
    answer: Option<AnswerMatcher>,
    /// None once nothing of a thought can come.
    thought: Option<Thought>,
    /// The answer from its beginning, while it follows what may be a thought's.
    unbegun: Option<AnswerMatcher>,
    /// What came is the beginning of a thought, and of no answer.
    is_thought: bool,
    is_over: bool,
}

/// Follows the answer behind the thought.
#[derive(Clone)]
pub(crate) struct AnswerMatcher {
    pub(crate) inner: llguidance::Matcher,
    /// The mask of the answer's first token, until that is there.
    pub(crate) first: Option<Arc<[u32]>>,
}

impl Matcher {
    pub(crate) fn new(
        vocabulary: Arc<Vocabulary>,
        answer: Option<AnswerMatcher>,
        thought: Option<Thought>,
    ) -> Self {
        Self {
            vocabulary,
            answer,
            thought,
            unbegun: None,
            is_thought: false,
            is_over: false,
        }
    }

    /// Sets the bits of the tokens that may come, bit t % 32 of word t / 32, and clears the others.
    pub fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, MatchError> {
        mask.fill(0);
        if self.is_over {
            set_bits(mask, self.vocabulary.end_ids());
            return Ok(Allowed::OnlyEnd);
        }
        match self
            .thought
            .as_ref()
            .map(|it| it.next_tokens(&self.vocabulary))
        {
            None => self.allow_answer(mask),
            Some(NextTokens::AnswerAnd(more)) => self.allow_answer_and(&more, mask),
            Some(NextTokens::Only(token)) => {
                set_bits(mask, &[token]);
                Ok(Allowed::Some)
            }
            Some(NextTokens::AllBut(closed)) => Ok(self.allow_thought(&closed, mask)),
        }
    }

    /// The token came.
    pub fn accept(&mut self, token: TokenId) -> Result<(), MatchError> {
        if self.is_over {
            let is_end = self.vocabulary.end_ids().contains(&token);
            return is_end.then_some(()).ok_or(MatchError::NotAllowed(token));
        }
        let Some(thought) = &mut self.thought else {
            return self.consume(token);
        };
        let answer = &mut self.answer;
        let fits = || answer.as_mut().is_some_and(|it| it.takes(token));
        match thought.accept(&self.vocabulary, token, fits) {
            Step::Taken => Ok(()),
            Step::Shared => self.share(token),
            Step::Ended(_) if self.answer.is_none() => {
                self.thought = None;
                Ok(())
            }
            Step::Ended(behind) => self.accept_bytes(token, &behind),
            Step::Passed if self.is_thought => Err(MatchError::NotAllowed(token)),
            Step::Passed => {
                (self.thought, self.unbegun) = (None, None);
                self.consume(token)
            }
        }
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
            answer: self.answer.clone(),
            thought: self.thought.clone(),
            unbegun: self.unbegun.clone(),
            is_thought: self.is_thought,
            is_over: self.is_over,
        }
    }
}

impl Matcher {
    /// What the answer's grammar allows.
    fn allow_answer(&mut self, mask: &mut [u32]) -> Result<Allowed, MatchError> {
        let Some(answer) = &mut self.answer else {
            self.allow_all(mask);
            return Ok(Allowed::Free);
        };
        answer.fill(mask)?;
        match mask.iter().any(|word| *word != 0) {
            true => Ok(Allowed::Some),
            false => Err(MatchError::DeadEnd),
        }
    }

    fn allow_answer_and(
        &mut self,
        more: &[TokenId],
        mask: &mut [u32],
    ) -> Result<Allowed, MatchError> {
        match &mut self.answer {
            _ if self.is_thought => {}
            None => return Ok(self.allow_all(mask)),
            Some(answer) => answer.fill(mask)?,
        }
        set_bits(mask, more);
        match mask.iter().any(|word| *word != 0) {
            true => Ok(Allowed::Some),
            false => Err(MatchError::DeadEnd),
        }
    }

    /// Within a thought. Before a constrained answer it does not end with the model's end.
    fn allow_thought(&self, closed: &[TokenId], mask: &mut [u32]) -> Allowed {
        let allowed = self.allow_all(mask);
        if self.answer.is_none() {
            return allowed;
        }
        for &token in closed.iter().chain(self.vocabulary.end_ids()) {
            mask[token as usize / 32] &= !(1 << (token % 32));
        }
        Allowed::Some
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

    /// The token begins a thought, and perhaps an answer.
    fn share(&mut self, token: TokenId) -> Result<(), MatchError> {
        let Some(answer) = &mut self.answer else {
            return Ok(());
        };
        self.unbegun.get_or_insert_with(|| answer.clone());
        self.is_thought = self.is_thought || !answer.takes(token);
        match self.is_thought {
            true => Ok(()),
            false => self.consume(token),
        }
    }

    fn consume(&mut self, token: TokenId) -> Result<(), MatchError> {
        if let Some(answer) = &mut self.answer {
            self.is_over = answer.consume(&self.vocabulary, token)?;
        }
        Ok(())
    }

    /// The bytes of `token` behind a thought's end.
    fn accept_bytes(&mut self, token: TokenId, text: &[u8]) -> Result<(), MatchError> {
        self.is_thought = false;
        if let Some(unbegun) = self.unbegun.take() {
            self.answer = Some(unbegun);
        }
        for part in self.vocabulary.tokens_of(text) {
            match self.accept(part) {
                Ok(()) => {}
                Err(MatchError::NotAllowed(_)) => return Err(MatchError::NotAllowed(token)),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl AnswerMatcher {
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

    /// Whether the answer is complete.
    fn consume(&mut self, vocabulary: &Vocabulary, token: TokenId) -> Result<bool, MatchError> {
        self.first = None;
        if vocabulary.end_ids().contains(&token) {
            return match self.inner.is_accepting().unwrap_or(false) {
                true => Ok(true),
                false => Err(MatchError::NotAllowed(token)),
            };
        }
        if let Err(error) = self.inner.consume_token(token) {
            return Err(self.failure(&error.to_string(), MatchError::NotAllowed(token)));
        }
        Ok(self.inner.is_stopped())
    }

    fn takes(&mut self, token: TokenId) -> bool {
        matches!(self.inner.validate_tokens(&[token]), Ok(1))
    }

    fn failure(&self, problem: &str, otherwise: MatchError) -> MatchError {
        match self.inner.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                MatchError::TooComplex(first_line(problem))
            }
            // A matcher that has failed remembers no other reason.
            _ if is_too_complex(problem) => MatchError::TooComplex(first_line(problem)),
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

fn set_bits(mask: &mut [u32], tokens: &[TokenId]) {
    for token in tokens {
        mask[*token as usize / 32] |= 1 << (token % 32);
    }
}

fn first_line(problem: &str) -> String {
    problem.lines().next().unwrap_or_default().to_owned()
}
