//! Masks of constrained answers: which tokens each may sample next. They are filled by threads of their own while
//! the device computes the step's forward, and sent when they are there. A late one holds nobody but its own answer.

mod answers;
mod numbers;
mod pool;
#[cfg(test)]
mod tests;

pub use answers::{AwaitingRow, MaskAnswers, MaskEvent};
pub use pool::{MaskJobs, mask_threads};

use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use plait_core::TokenId;
use plait_grammar::{Allowed, Grammar, Matcher};
use plait_openai::RequestError;
use rustc_hash::FxHasher;

/// Follows one answer, and says which tokens may come next.
pub trait TokenMatcher: Send {
    /// Sets the bits of the tokens that may come in a mask of zeros: bit t % 32 of word t / 32.
    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, String>;

    /// The token came.
    fn accept(&mut self, token: TokenId) -> Result<(), String>;
}

impl TokenMatcher for Matcher {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, String> {
        Matcher::allowed(self, mask).map_err(|error| error.to_string())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        Matcher::accept(self, token).map_err(|error| error.to_string())
    }
}

/// A mask, compared by its hash first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    hash: u64,
    words: Arc<[u32]>,
}

impl Mask {
    fn new(words: Vec<u32>) -> Self {
        let mut hasher = FxHasher::default();
        words.hash(&mut hasher);
        Self {
            hash: hasher.finish(),
            words: words.into(),
        }
    }
}

impl Hash for Mask {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// What an answer may sample next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Every token.
    Any,
    /// Every token, from here to the answer's end.
    Free,
    /// The tokens of a mask.
    Masked(Mask),
    /// Nothing: the answer is complete.
    End,
}

/// An answer's matcher, and what it says of the answer's first token.
pub struct ConstrainedAnswer {
    matcher: Box<dyn TokenMatcher>,
    first: Next,
}

impl std::fmt::Debug for ConstrainedAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConstrainedAnswer")
            .field("first", &self.first)
            .finish_non_exhaustive()
    }
}

impl ConstrainedAnswer {
    /// At the beginning of an answer; fails if nothing may be answered.
    pub fn begin(grammar: &Grammar, vocab_size: u32) -> Result<Self, String> {
        Self::of(Box::new(grammar.matcher()), vocab_size)
    }

    /// The same with any matcher.
    pub fn of(mut matcher: Box<dyn TokenMatcher>, vocab_size: u32) -> Result<Self, String> {
        let first = fill(&mut *matcher, vocab_size)?;
        Ok(Self { matcher, first })
    }
}

/// What a client reads whose answer cannot follow its grammar.
pub fn grammar_failed(reason: impl std::fmt::Display) -> RequestError {
    RequestError {
        param: "structured_outputs".into(),
        code: "grammar_failed",
        message: format!("the answer's grammar cannot go on: {reason}; simplify it, or ask again"),
    }
}

/// What may come next. A panic of the matcher is its answer's error alone.
fn fill(matcher: &mut dyn TokenMatcher, vocab_size: u32) -> Result<Next, String> {
    let mut words = vec![0; vocab_size.div_ceil(u32::BITS) as usize];
    let allowed = guarded(|| matcher.allowed(&mut words))?;
    match allowed {
        Allowed::All => Ok(Next::Any),
        Allowed::Free => Ok(Next::Free),
        Allowed::OnlyEnd => Ok(Next::End),
        Allowed::Some if words.iter().all(|word| *word == 0) => {
            Err("it allows no token here".to_owned())
        }
        Allowed::Some => Ok(Next::Masked(Mask::new(words))),
    }
}

fn guarded<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err("its matcher failed".to_owned()))
}
