//! A compiled constraint.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::TokenParser;

use crate::lexeme_masks::LexemeMasks;
use crate::limits::parser_limits;
use crate::matcher::{AnswerMatcher, Matcher};
use crate::thought::{Thought, ThoughtRule};
use crate::vocabulary::Vocabulary;

/// Answers of one grammar share lexers, each of which computes one mask at a time.
const NUM_LEXERS: usize = 4;
/// Bytes of a symbol of the compiled grammar, about.
const SYMBOL_BYTES: usize = 300;

/// A compiled constraint. Clones share it.
#[derive(Clone)]
pub struct Grammar {
    vocabulary: Arc<Vocabulary>,
    /// None: any text.
    shared: Option<Arc<Shared>>,
    thought: Option<ThoughtRule>,
}

struct Shared {
    /// Never asked for a mask, so that its lexer stays small.
    fresh: TokenParser,
    /// The mask of an answer's first token.
    first: Arc<[u32]>,
    num_symbols: usize,
    lexers: Mutex<Lexers>,
}

/// Parsers whose lexers remember what masks needed. They grow with what answers say, up to a limit.
#[derive(Default)]
struct Lexers {
    parsers: Vec<(TokenParser, Arc<LexemeMasks>)>,
    next: usize,
}

impl Grammar {
    pub(crate) fn new(
        vocabulary: Arc<Vocabulary>,
        fresh: TokenParser,
        first: Arc<[u32]>,
        num_symbols: usize,
    ) -> Self {
        Self {
            vocabulary,
            shared: Some(Arc::new(Shared {
                fresh,
                first,
                num_symbols,
                lexers: Mutex::default(),
            })),
            thought: None,
        }
    }

    /// The grammar of any text.
    pub(crate) fn free(vocabulary: Arc<Vocabulary>) -> Self {
        Self {
            vocabulary,
            shared: None,
            thought: None,
        }
    }

    /// The same grammar behind a thought.
    #[must_use]
    pub fn behind_thought(&self, thought: ThoughtRule) -> Self {
        Self {
            thought: Some(thought),
            ..self.clone()
        }
    }

    /// For one answer, at its beginning.
    pub fn matcher(&self) -> Matcher {
        let answer = self.shared.as_ref().map(|shared| AnswerMatcher {
            inner: llguidance::Matcher::new(Ok(shared.parser(&self.vocabulary))),
            first: Some(shared.first.clone()),
        });
        let thought = self.thought.as_ref();
        let thought = thought.map(|rule| Thought::new(&self.vocabulary, rule));
        Matcher::new(self.vocabulary.clone(), answer, thought)
    }

    /// Words of its masks.
    pub fn num_mask_words(&self) -> usize {
        self.vocabulary.num_mask_words()
    }

    /// Memory that it keeps, about. Its lexers grow as answers go through it.
    pub fn num_bytes(&self) -> usize {
        self.shared.as_ref().map_or(0, |shared| shared.num_bytes())
    }
}

impl Shared {
    /// A parser at the beginning, of the lexer whose turn it is.
    fn parser(&self, vocabulary: &Vocabulary) -> TokenParser {
        let mut lexers = self.lock();
        let turn = lexers.next;
        lexers.next = (turn + 1) % NUM_LEXERS;
        if turn >= lexers.parsers.len() {
            lexers.parsers.push(self.with_lexer(vocabulary));
        } else if Size::of(&lexers.parsers[turn].0).is_large() {
            lexers.parsers[turn] = self.with_lexer(vocabulary);
        }
        lexers.parsers[turn].0.clone()
    }

    /// A parser with a lexer of its own.
    fn with_lexer(&self, vocabulary: &Vocabulary) -> (TokenParser, Arc<LexemeMasks>) {
        let mut parser = self.fresh.deep_clone();
        let masks = Arc::new(LexemeMasks::new(vocabulary.factory.slicer()));
        parser.bias_computer = masks.clone();
        (parser, masks)
    }

    fn num_bytes(&self) -> usize {
        let lexers = self.lock();
        let of_lexer = |(parser, masks): &(TokenParser, Arc<LexemeMasks>)| {
            Size::of(parser).num_bytes + masks.num_bytes()
        };
        let lexer_bytes: usize = lexers.parsers.iter().map(of_lexer).sum();
        lexer_bytes
            + Size::of(&self.fresh).num_bytes
            + self.num_symbols * SYMBOL_BYTES
            + self.first.len() * size_of::<u32>()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Lexers> {
        self.lexers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Of a parser's lexer.
struct Size {
    num_states: usize,
    num_bytes: usize,
}

impl Size {
    /// A lexer in which the library panicked counts as the largest: nobody gets it any more.
    fn of(parser: &TokenParser) -> Self {
        let stats = catch_unwind(AssertUnwindSafe(|| parser.parser.lexer_stats()));
        match stats {
            Ok(stats) => Self {
                num_states: stats.num_states,
                num_bytes: stats.num_bytes,
            },
            Err(_) => Self {
                num_states: usize::MAX,
                num_bytes: 0,
            },
        }
    }

    /// Half of what a lexer may have: an answer that begins now has the other half.
    fn is_large(&self) -> bool {
        self.num_states > parser_limits().max_lexer_states / 2
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar")
            .field("thought", &self.thought)
            .finish_non_exhaustive()
    }
}

/// Answers differ by their grammar if it is another one.
impl PartialEq for Grammar {
    fn eq(&self, other: &Self) -> bool {
        let is_same = match (&self.shared, &other.shared) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        };
        is_same && self.thought == other.thought
    }
}
