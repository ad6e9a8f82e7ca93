//! The place of tool-call and reasoning parsers: between the sampled tokens and the detokeniser.
//!
//! Many markers of tool calls and of reasoning are special tokens, whose text the detokeniser hides. A
//! parser therefore reads tokens, not text.

use std::fmt::Debug;

use plait_core::TokenId;

use crate::vocabulary::Piece;

/// What a parser makes of a token. Reasoning and tool calls become variants of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParsedOutput {
    /// Its text belongs to the answer's content.
    Content(TokenId),
}

/// Sorts one output's tokens.
pub trait OutputParser: Debug + Send {
    /// Takes the next sampled token, special tokens too, and passes on what it means. A parser may hold
    /// tokens back until later ones decide.
    fn push(&mut self, token: TokenId, piece: Piece<'_>, emit: &mut dyn FnMut(ParsedOutput));

    /// No token follows: passes on what it held back.
    fn finish(&mut self, emit: &mut dyn FnMut(ParsedOutput));
}

/// Every token is content.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassThrough;

impl OutputParser for PassThrough {
    fn push(&mut self, token: TokenId, _: Piece<'_>, emit: &mut dyn FnMut(ParsedOutput)) {
        emit(ParsedOutput::Content(token));
    }

    fn finish(&mut self, _: &mut dyn FnMut(ParsedOutput)) {}
}
