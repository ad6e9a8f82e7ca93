//! Tokens to text, one token at a time.

use plait_core::TokenId;

use crate::vocabulary::{Joining, LeadingStrip, PieceKind, Vocabulary};

/// Turns one output's tokens into text.
///
/// All its text together is what decoding all tokens at once gives. No part of it ends within a
/// character. A token costs its own length, however long the output is.
#[derive(Clone, Debug)]
pub(crate) struct Detokeniser {
    /// Bytes of a character that is not complete.
    pending: Vec<u8>,
    strip: LeadingStrip,
    skips_special: bool,
}

/// How an output's tokens become the text that a client reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextStyle {
    /// What comes before it.
    pub start: TextStart,
    /// Special tokens are not shown.
    pub skips_special: bool,
    /// The stop string that ends it is shown.
    pub shows_stop: bool,
}

impl TextStyle {
    /// The usual one: neither special tokens nor stop strings are shown.
    pub fn plain(start: TextStart) -> Self {
        Self {
            start,
            skips_special: true,
            shows_stop: false,
        }
    }
}

/// Whether an output is a text of its own or continues the prompt's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextStart {
    /// A text of its own, such as a chat's answer.
    Fresh,
    /// It continues the prompt's text.
    Continued,
}

const NOTHING: LeadingStrip = LeadingStrip {
    content: ' ',
    num_left: 0,
};

impl Detokeniser {
    pub(crate) fn new(vocabulary: &Vocabulary, style: TextStyle) -> Self {
        let strip = match (&vocabulary.joining, style.start) {
            (Joining::ByteFallback { strip }, TextStart::Fresh) => *strip,
            _ => NOTHING,
        };
        Self {
            pending: Vec::new(),
            strip,
            skips_special: style.skips_special,
        }
    }

    /// Takes the next token and appends the text that is certain now.
    pub(crate) fn push(&mut self, vocabulary: &Vocabulary, token: TokenId, text: &mut String) {
        let piece = vocabulary.piece(token);
        match (&vocabulary.joining, piece.kind) {
            (_, PieceKind::Hidden) if self.skips_special => {}
            (Joining::ByteLevel, _) => {
                self.pending.extend_from_slice(piece.bytes);
                self.take_characters(text);
            }
            (Joining::ByteFallback { .. }, PieceKind::Byte) => {
                self.pending.extend_from_slice(piece.bytes);
            }
            (Joining::ByteFallback { .. }, PieceKind::Text | PieceKind::Hidden) => {
                self.end_run(text);
                self.append(&String::from_utf8_lossy(piece.bytes), text);
            }
        }
    }

    /// No token follows: appends what is pending, U+FFFD for what is not UTF-8.
    pub(crate) fn finish(&mut self, vocabulary: &Vocabulary, text: &mut String) {
        match vocabulary.joining {
            Joining::ByteLevel if self.pending.is_empty() => {}
            Joining::ByteLevel => {
                self.pending.clear();
                text.push(char::REPLACEMENT_CHARACTER);
            }
            Joining::ByteFallback { .. } => self.end_run(text),
        }
    }

    /// Moves complete characters, and U+FFFD for each sequence that cannot become one.
    fn take_characters(&mut self, text: &mut String) {
        let mut rest = &self.pending[..];
        while !rest.is_empty() {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(std::str::from_utf8(valid).expect("valid_up_to says so"));
            rest = after;
            let Some(num_invalid) = error.error_len() else {
                break;
            };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[num_invalid..];
        }
        let num_taken = self.pending.len() - rest.len();
        self.pending.drain(..num_taken);
    }

    /// A run of byte tokens is text only if all of it is UTF-8; else each byte is U+FFFD.
    fn end_run(&mut self, text: &mut String) {
        if self.pending.is_empty() {
            return;
        }
        let run = std::mem::take(&mut self.pending);
        match std::str::from_utf8(&run) {
            Ok(valid) => self.append(valid, text),
            Err(_) => {
                let unknown = String::from(char::REPLACEMENT_CHARACTER).repeat(run.len());
                self.append(&unknown, text);
            }
        }
    }

    fn append(&mut self, mut piece: &str, text: &mut String) {
        while self.strip.num_left > 0 && !piece.is_empty() {
            match piece.strip_prefix(self.strip.content) {
                Some(rest) => {
                    self.strip.num_left -= 1;
                    piece = rest;
                }
                None => self.strip.num_left = 0,
            }
        }
        text.push_str(piece);
    }
}
