//! A thought before the answer: anything up to its end mark, then the grammar.

use std::collections::VecDeque;

use crate::vocabulary::{TokenId, Vocabulary};

/// Line breaks between a thought and the answer that the grammar does not see.
const MAX_BREAKS: usize = 2;

/// The thought before an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ThoughtRule {
    /// With this mark the model may begin one. None: the prompt has begun it.
    pub open: Option<String>,
    /// With this mark it ends.
    pub close: String,
    /// So many tokens may come between the marks; then the end follows.
    pub max_tokens: Option<u32>,
}

/// A mark as the model writes it.
#[derive(Clone, Debug)]
enum Mark {
    /// A special token.
    Token(TokenId),
    /// A text, in as many tokens as it takes.
    Text(Vec<u8>),
}

impl Mark {
    fn new(vocabulary: &Vocabulary, spelling: &str) -> Self {
        match vocabulary.special_token(spelling) {
            Some(token) => Self::Token(token),
            None => Self::Text(spelling.as_bytes().to_vec()),
        }
    }

    /// The tokens of the mark behind its first bytes.
    fn tokens_behind(&self, vocabulary: &Vocabulary, num_bytes: usize) -> VecDeque<TokenId> {
        match self {
            Self::Token(token) => [*token].into(),
            Self::Text(text) => vocabulary.tokens_of(&text[num_bytes..]).into(),
        }
    }
}

/// How far a thought is.
#[derive(Clone, Debug)]
pub(crate) struct Thought {
    close: Mark,
    max_tokens: Option<u32>,
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    /// Nothing came, or the first bytes of the mark.
    Before {
        open: Mark,
        num_seen: usize,
    },
    Within(Within),
    /// So many line breaks came behind the end.
    Behind {
        num_breaks: usize,
    },
}

#[derive(Clone, Debug, Default)]
struct Within {
    /// The last bytes, fewer than the end mark has.
    tail: Vec<u8>,
    num_tokens: u32,
    /// What is left of the end mark, once it is due.
    due: VecDeque<TokenId>,
}

/// What a token did to a thought.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// It is the thought's.
    Taken,
    /// It is the thought's, if there will be one. The answer may have it, too.
    Shared,
    /// It ended the thought; these bytes of it are the answer's.
    Ended(Vec<u8>),
    /// It is the answer's.
    Passed,
}

/// Which tokens may come as far as the thought goes.
pub(crate) enum NextTokens {
    /// The answer's, and these with which a thought begins.
    AnswerAnd(Vec<TokenId>),
    /// Only this one.
    Only(TokenId),
    /// Every one but these, and no end of the answer.
    AllBut(Vec<TokenId>),
}

impl Thought {
    pub(crate) fn new(vocabulary: &Vocabulary, rule: &ThoughtRule) -> Self {
        let mut thought = Self {
            close: Mark::new(vocabulary, &rule.close),
            max_tokens: rule.max_tokens,
            place: Place::Within(Within::default()),
        };
        match &rule.open {
            Some(open) => {
                let open = Mark::new(vocabulary, open);
                thought.place = Place::Before { open, num_seen: 0 };
            }
            None => thought.end_if_due(vocabulary),
        }
        thought
    }

    pub(crate) fn next_tokens(&self, vocabulary: &Vocabulary) -> NextTokens {
        match &self.place {
            Place::Before { open, num_seen } => NextTokens::AnswerAnd(match open {
                Mark::Token(token) => vec![*token],
                Mark::Text(text) => vocabulary.tokens_along(&text[*num_seen..]),
            }),
            Place::Within(within) => match (within.due.front(), &self.close) {
                (Some(token), _) => NextTokens::Only(*token),
                (None, Mark::Token(_)) => NextTokens::AllBut(Vec::new()),
                (None, Mark::Text(close)) => {
                    NextTokens::AllBut(within.tokens_across(vocabulary, close))
                }
            },
            Place::Behind { num_breaks } => {
                NextTokens::AnswerAnd(breaks_behind(vocabulary, *num_breaks).collect())
            }
        }
    }

    /// The token came; `fits` tells whether the answer would take it.
    pub(crate) fn accept(
        &mut self,
        vocabulary: &Vocabulary,
        token: TokenId,
        fits: impl FnOnce() -> bool,
    ) -> Step {
        let text = vocabulary.text_of(token);
        match &mut self.place {
            Place::Before { open, num_seen } => match open.begins_with(*num_seen, token, text) {
                Begun::No => Step::Passed,
                Begun::Partly => {
                    *num_seen += text.len();
                    Step::Shared
                }
                Begun::Wholly(behind) => {
                    self.place = Place::Within(Within::default());
                    let step = self.think(&behind, token);
                    self.end_if_due(vocabulary);
                    step
                }
            },
            Place::Within(within) => {
                within.num_tokens += 1;
                within.due.pop_front();
                let is_ending = !within.due.is_empty();
                let step = self.think(text, token);
                if !is_ending {
                    self.end_if_due(vocabulary);
                }
                step
            }
            Place::Behind { num_breaks } => {
                let mut breaks = breaks_behind(vocabulary, *num_breaks);
                if breaks.all(|it| it != token) || fits() {
                    return Step::Passed;
                }
                *num_breaks += text.len();
                Step::Taken
            }
        }
    }

    /// A token's text within the thought.
    fn think(&mut self, text: &[u8], token: TokenId) -> Step {
        let Place::Within(within) = &mut self.place else {
            return Step::Passed;
        };
        let behind = match &self.close {
            Mark::Token(close) => (*close == token).then(Vec::new),
            Mark::Text(close) => within.push(text, close),
        };
        match behind {
            Some(behind) => {
                self.place = Place::Behind { num_breaks: 0 };
                Step::Ended(behind)
            }
            None => Step::Taken,
        }
    }

    /// Makes the end due if the thought has all its tokens.
    fn end_if_due(&mut self, vocabulary: &Vocabulary) {
        let Place::Within(within) = &mut self.place else {
            return;
        };
        if self.max_tokens.is_some_and(|max| within.num_tokens >= max) {
            let num_seen = match &self.close {
                Mark::Token(_) => 0,
                Mark::Text(close) => overlap(&within.tail, close),
            };
            within.due = self.close.tokens_behind(vocabulary, num_seen);
        }
    }
}

/// Line breaks that may follow so many others behind a thought.
fn breaks_behind(vocabulary: &Vocabulary, num_breaks: usize) -> impl Iterator<Item = TokenId> + '_ {
    let fits = move |token: &TokenId| vocabulary.text_of(*token).len() + num_breaks <= MAX_BREAKS;
    vocabulary.breaks().iter().copied().filter(fits)
}

/// How much of a mark a token is.
enum Begun {
    No,
    Partly,
    /// All that was missing, and these bytes behind it.
    Wholly(Vec<u8>),
}

impl Mark {
    fn begins_with(&self, num_seen: usize, token: TokenId, text: &[u8]) -> Begun {
        match self {
            Self::Token(mark) if *mark == token => Begun::Wholly(Vec::new()),
            Self::Token(_) => Begun::No,
            Self::Text(mark) => {
                let rest = &mark[num_seen..];
                match text.strip_prefix(rest) {
                    Some(behind) => Begun::Wholly(behind.to_vec()),
                    None if !text.is_empty() && rest.starts_with(text) => Begun::Partly,
                    None => Begun::No,
                }
            }
        }
    }
}

impl Within {
    /// The bytes behind the end mark, if it is complete.
    fn push(&mut self, text: &[u8], close: &[u8]) -> Option<Vec<u8>> {
        self.tail.extend_from_slice(text);
        let found = find(&self.tail, close);
        let behind = found.map(|at| self.tail[at + close.len()..].to_vec());
        let num_kept = self.tail.len().min(close.len().saturating_sub(1));
        self.tail.drain(..self.tail.len() - num_kept);
        behind
    }

    /// Tokens that would complete a begun end mark and say more than line breaks behind it.
    fn tokens_across(&self, vocabulary: &Vocabulary, close: &[u8]) -> Vec<TokenId> {
        match overlap(&self.tail, close) {
            0 => Vec::new(),
            num_seen => vocabulary.tokens_beyond(&close[num_seen..]),
        }
    }
}

/// Bytes of the mark with which the text ends.
fn overlap(text: &[u8], mark: &[u8]) -> usize {
    let most = text.len().min(mark.len().saturating_sub(1));
    let mut sizes = (1..=most).rev();
    sizes
        .find(|size| text.ends_with(&mark[..*size]))
        .unwrap_or(0)
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len().max(1)).position(|it| it == part)
}
