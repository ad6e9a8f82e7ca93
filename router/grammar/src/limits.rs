//! How large a constraint may be, and how long its work may take.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use llguidance::api::ParserLimits;

/// Caps, before and during the work.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Of a JSON schema or a structural tag, in JSON.
    pub schema_bytes: usize,
    /// Arrays and objects inside each other in a schema.
    pub schema_depth: usize,
    /// Of a regular expression, `pattern` of a schema too.
    pub regex_bytes: usize,
    /// Texts to choose from.
    pub num_choices: usize,
    /// Of all these texts.
    pub choice_bytes: usize,
    /// Of a grammar in EBNF or Lark.
    pub grammar_bytes: usize,
    /// That a thread computes before a request is refused.
    pub compile_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            schema_bytes: 256 << 10,
            schema_depth: 64,
            regex_bytes: 8 << 10,
            num_choices: 1024,
            choice_bytes: 64 << 10,
            grammar_bytes: 64 << 10,
            compile_time: Duration::from_secs(2),
        }
    }
}

/// The library's own limits. Its defaults are for compilers that nobody waits for.
pub(crate) fn parser_limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2_000,
        initial_lexer_fuel: 500_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        max_grammar_size: 250_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// Ends a compilation early: its client is gone, or the server stops.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// From any thread.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
