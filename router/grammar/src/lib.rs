//! Structured output: what a request constrains its answer to.
//!
//! [`compile`] turns a [`Constraint`] into a [`Grammar`], within [`Limits`]. Each choice of an answer gets its own
//! [`Matcher`], which says which tokens may come next and follows those that came. The work is the crate llguidance's;
//! here are its limits, the refusal of what it would loosen, and the cache.

mod abandoned;
mod cache;
mod compile;
mod constraint;
mod ebnf;
mod error;
mod form;
mod grammar;
mod lexeme_masks;
mod limits;
mod matcher;
mod productive;
mod schema;
mod schema_keywords;
mod split;
mod structural_format;
mod structural_tag;
mod thought;
mod vocabulary;
mod whitespace;

pub use cache::GrammarCache;
pub use compile::compile;
pub use constraint::Constraint;
pub use error::CompileError;
pub use form::{Form, Item, Span, check_schema};
pub use grammar::Grammar;
pub use limits::{Cancel, Limits};
pub use matcher::{Allowed, MatchError, Matcher};
pub use thought::ThoughtRule;
pub use vocabulary::{Token, TokenId, Vocabulary};
pub use whitespace::Whitespace;
