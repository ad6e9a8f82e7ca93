//! Compiles schemas and follows instances through them: a filter for scripts.
//!
//! A line of stdin is `{"schema": ..., "instances": [text, ...], "num_walks": 3}`; `tokens`, a file of the first
//! argument, holds the vocabulary as JSON texts of Latin-1 letters, one letter a byte. A line of stdout says for each
//! whether the instance is taken token by token, what random walks through the masks wrote, and what it took.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

use plait_grammar::{
    Allowed, Cancel, Constraint, Grammar, Limits, Token, TokenId, Vocabulary, Whitespace, compile,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// Of a walk.
const MAX_TOKENS: usize = 600;

#[derive(Deserialize)]
struct Case {
    schema: Value,
    #[serde(default)]
    instances: Vec<String>,
    #[serde(default)]
    num_walks: u64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tokens = match std::env::args().nth(1) {
        Some(path) => read_tokens(&path)?,
        None => (0..=u8::MAX).map(|byte| vec![byte]).collect(),
    };
    let end = u32::try_from(tokens.len())?;
    let texts = tokens.iter().map(|bytes| Token::Text(bytes));
    let start = Instant::now();
    let vocabulary = Vocabulary::new(texts.chain([Token::Special(b"<end>")]), &[end])?;
    eprintln!("{end} tokens in {:.3} s", start.elapsed().as_secs_f64());
    let walker = Walker {
        vocabulary: Arc::new(vocabulary),
        tokens,
        end,
    };
    for line in std::io::stdin().lock().lines() {
        let case: Case = serde_json::from_str(&line?)?;
        writeln!(std::io::stdout(), "{}", walker.check(&case))?;
    }
    Ok(())
}

fn read_tokens(path: &str) -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error>> {
    let texts: Vec<String> = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let bytes = |text: &String| text.chars().map(|letter| letter as u8).collect();
    Ok(texts.iter().map(bytes).collect())
}

struct Walker {
    vocabulary: Arc<Vocabulary>,
    tokens: Vec<Vec<u8>>,
    end: TokenId,
}

impl Walker {
    fn check(&self, case: &Case) -> Value {
        let constraint = Constraint::JsonSchema(case.schema.to_string(), Whitespace::Free);
        let start = Instant::now();
        let limits = Limits::default();
        let grammar = compile(
            &self.vocabulary,
            &constraint,
            0,
            &limits,
            &Cancel::default(),
        );
        let seconds = start.elapsed().as_secs_f64();
        match grammar {
            Err(error) => json!({"error": error.to_string(), "seconds": seconds}),
            Ok(grammar) => {
                let taken = case.instances.iter().map(|text| self.takes(&grammar, text));
                let taken: Vec<bool> = taken.collect();
                let mut mask_seconds = Vec::new();
                let walks =
                    (0..case.num_walks).map(|seed| self.walk(&grammar, seed, &mut mask_seconds));
                let walks: Vec<Option<String>> = walks.collect();
                json!({
                    "taken": taken, "walks": walks, "seconds": seconds, "mask_seconds": mask_seconds,
                    "bytes": grammar.num_bytes(),
                })
            }
        }
    }

    /// Byte by byte, which every vocabulary of a model has.
    fn takes(&self, grammar: &Grammar, text: &str) -> bool {
        let mut matcher = grammar.matcher();
        let mut mask = vec![0; grammar.num_mask_words()];
        for byte in text.bytes() {
            let Some(token) = self.tokens.iter().position(|it| it[..] == [byte]) else {
                return false;
            };
            let token = token as TokenId;
            if matcher.allowed(&mut mask).is_err() || !has(&mask, token) {
                return false;
            }
            if matcher.accept(token).is_err() {
                return false;
            }
        }
        matcher.allowed(&mut mask).is_ok() && has(&mask, self.end)
    }

    /// What draws from the masks write; None where the limit ends it.
    fn walk(&self, grammar: &Grammar, seed: u64, seconds: &mut Vec<f64>) -> Option<String> {
        let mut draw = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut matcher = grammar.matcher();
        let mut mask = vec![0; grammar.num_mask_words()];
        let mut text = Vec::new();
        for step in 0..MAX_TOKENS {
            let start = Instant::now();
            let allowed = matcher.allowed(&mut mask);
            seconds.push(start.elapsed().as_secs_f64());
            if allowed == Ok(Allowed::OnlyEnd) || (step > 40 && has(&mask, self.end)) {
                return String::from_utf8(text).ok();
            }
            allowed.ok()?;
            let tokens =
                (0..self.end).filter(|token| has(&mask, *token) && self.is_plain(*token, step));
            let mut tokens: Vec<TokenId> = tokens.collect();
            if tokens.is_empty() {
                tokens = (0..self.end).filter(|token| has(&mask, *token)).collect();
            }
            if tokens.is_empty() {
                return String::from_utf8(text).ok();
            }
            draw ^= draw << 13;
            draw ^= draw >> 7;
            draw ^= draw << 17;
            let token = tokens[(draw >> 11) as usize % tokens.len()];
            text.extend_from_slice(&self.tokens[token as usize]);
            matcher.accept(token).ok()?;
        }
        None
    }

    /// Late in a walk what closes goes first, so that most walks end.
    fn is_plain(&self, token: TokenId, step: usize) -> bool {
        let bytes = &self.tokens[token as usize];
        match step {
            0..60 => !bytes.iter().all(u8::is_ascii_whitespace),
            _ => bytes.iter().all(|byte| b"}]\"0:".contains(byte)),
        }
    }
}

fn has(mask: &[u32], token: TokenId) -> bool {
    mask[token as usize / 32] >> (token % 32) & 1 == 1
}
