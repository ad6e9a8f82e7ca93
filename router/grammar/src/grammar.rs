//! A compiled constraint.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::TokenParser;

use crate::limits::parser_limits;
use crate::matcher::Matcher;
use crate::thought::ThoughtEnd;
use crate::vocabulary::Vocabulary;

/// Answers of one grammar share lexers, each of which computes one mask at a time.
const NUM_LEXERS: usize = 4;
/// Bytes of a symbol of the compiled grammar, about.
const SYMBOL_BYTES: usize = 300;

/// A compiled constraint. Clones share it.
#[derive(Clone)]
pub struct Grammar {
    shared: Arc<Shared>,
    thought: Option<ThoughtEnd>,
}

struct Shared {
    vocabulary: Arc<Vocabulary>,
    /// Never asked for a mask, so that its lexer stays small.
    fresh: TokenParser,
    /// The mask of an answer's first token.
    first: Arc<[u32]>,
    num_symbols: usize,
    lexers: Mutex<Lexers>,
}

/// Parsers whose lexers remember what masks needed. They grow with what answers say, up to a limit.
struct Lexers {
    parsers: Vec<TokenParser>,
    next: usize,
}

impl Grammar {
    pub(crate) fn new(
        vocabulary: Arc<Vocabulary>,
        fresh: TokenParser,
        first: Arc<[u32]>,
        num_symbols: usize,
    ) -> Self {
        let lexers = Mutex::new(Lexers {
            parsers: Vec::new(),
            next: 0,
        });
        Self {
            shared: Arc::new(Shared {
                vocabulary,
                fresh,
                first,
                num_symbols,
                lexers,
            }),
            thought: None,
        }
    }

    /// The same grammar behind a thought, which ends so.
    #[must_use]
    pub fn behind_thought(&self, end: ThoughtEnd) -> Self {
        Self {
            shared: self.shared.clone(),
            thought: Some(end),
        }
    }

    /// For one answer, at its beginning.
    pub fn matcher(&self) -> Matcher {
        let parser = self.shared.parser();
        let inner = llguidance::Matcher::new(Ok(parser));
        let first = Some(self.shared.first.clone());
        let vocabulary = self.shared.vocabulary.clone();
        Matcher::new(vocabulary, inner, first, self.thought.clone())
    }

    /// Words of its masks.
    pub fn num_mask_words(&self) -> usize {
        self.shared.vocabulary.num_mask_words()
    }

    /// Memory that it keeps, about. Its lexers grow as answers go through it.
    pub fn num_bytes(&self) -> usize {
        let lexers = self.shared.lock();
        let parsers = lexers.parsers.iter().chain([&self.shared.fresh]);
        let lexer_bytes: usize = parsers.map(|it| Size::of(it).num_bytes).sum();
        lexer_bytes
            + self.shared.num_symbols * SYMBOL_BYTES
            + self.shared.first.len() * size_of::<u32>()
    }
}

impl Shared {
    /// A parser at the beginning, of the lexer whose turn it is.
    fn parser(&self) -> TokenParser {
        let mut lexers = self.lock();
        let turn = lexers.next;
        lexers.next = (turn + 1) % NUM_LEXERS;
        if turn >= lexers.parsers.len() {
            lexers.parsers.push(self.fresh.deep_clone());
        } else if Size::of(&lexers.parsers[turn]).is_large() {
            lexers.parsers[turn] = self.fresh.deep_clone();
        }
        lexers.parsers[turn].clone()
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
        Arc::ptr_eq(&self.shared, &other.shared) && self.thought == other.thought
    }
}
