//! A vocabulary of all bytes, some longer tokens, an end and a special token; and answers told as texts.

use std::sync::Arc;

use plait_grammar::{
    Allowed, Cancel, CompileError, Constraint, Grammar, Limits, Matcher, Token, TokenId,
    Vocabulary, Whitespace, compile,
};

pub const END: TokenId = 256;
pub const CALL: TokenId = 257;
/// The spelling of `CALL`.
pub const END_MARK: &str = "<|call|>";
const WORDS: [&[u8]; 12] = [
    b"{\"",
    b"\":",
    b"\",\"",
    b"true",
    b"name",
    b" 1",
    b"12",
    b"\n",
    b"\n\n",
    b"call>",
    b"}",
    "é".as_bytes(),
];

pub fn vocabulary() -> Arc<Vocabulary> {
    let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
    let tokens = bytes.iter().map(|byte| Token::Text(byte));
    let special = [Token::Special(b"<|end|>"), Token::Special(b"<|call|>")];
    let words = WORDS.iter().map(|word| Token::Text(word));
    let tokens = tokens.chain(special).chain(words);
    Arc::new(Vocabulary::new(tokens, &[END]).unwrap())
}

pub fn json(schema: &str) -> Constraint {
    Constraint::JsonSchema(schema.to_owned(), Whitespace::Free)
}

pub fn regex(regex: &str) -> Constraint {
    Constraint::Regex(regex.to_owned())
}

pub fn try_compile(constraint: &Constraint) -> Result<Grammar, CompileError> {
    compile(
        &vocabulary(),
        constraint,
        0,
        &Limits::default(),
        &Cancel::default(),
    )
}

pub fn grammar(constraint: &Constraint) -> Grammar {
    try_compile(constraint).unwrap_or_else(|error| panic!("{constraint:?}: {error}"))
}

/// The sentence with which a constraint is refused.
pub fn refusal(constraint: &Constraint) -> String {
    match try_compile(constraint) {
        Ok(_) => panic!("{constraint:?} was not refused"),
        Err(error) => error.to_string(),
    }
}

pub fn mask(matcher: &mut Matcher) -> (Allowed, Vec<u32>) {
    let mut mask = vec![0; vocabulary_words()];
    let allowed = matcher.allowed(&mut mask).unwrap();
    (allowed, mask)
}

fn vocabulary_words() -> usize {
    (258 + WORDS.len()).div_ceil(32)
}

pub fn has(mask: &[u32], token: TokenId) -> bool {
    mask[token as usize / 32] >> (token % 32) & 1 == 1
}

/// Whether every byte may come, one token each, and the end after them.
pub fn takes(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    for byte in text.bytes() {
        let (allowed, mask) = mask(&mut matcher);
        if allowed != Allowed::All && !has(&mask, byte.into()) {
            return false;
        }
        matcher.accept(byte.into()).unwrap();
    }
    has(&mask(&mut matcher).1, END)
}
