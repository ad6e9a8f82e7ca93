//! What a client can read but was not sent: content, thoughts and tool calls.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use plait_core::TokenId;
use plait_text::{CallIds, Parsed};

use crate::logprobs::ScoredToken;

/// Parts of a choice that were not sent.
#[derive(Debug, Default)]
pub(crate) struct Unsent {
    pub(crate) text: String,
    pub(crate) thought: String,
    pub(crate) calls: Vec<CallPiece>,
    /// Empty unless the request asked for ids.
    pub(crate) token_ids: Vec<TokenId>,
    /// Empty unless the request asked for log-probabilities.
    pub(crate) scored: Vec<ScoredToken>,
    /// In which text, thoughts and calls came.
    order: Vec<Stretch>,
}

/// What came next: so many bytes of one kind, or a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stretch {
    Text(usize),
    Thought(usize),
    Call,
}

/// A part in the model's order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part<'a> {
    Text(&'a str),
    Thought(&'a str),
    Call(&'a CallPiece),
}

/// What is new of one call.
#[derive(Debug)]
pub(crate) struct CallPiece {
    pub(crate) index: usize,
    /// With the call's first piece.
    pub(crate) head: Option<CallHead>,
    pub(crate) arguments: String,
}

#[derive(Debug)]
pub(crate) struct CallHead {
    pub(crate) id: String,
    pub(crate) name: String,
}

impl Unsent {
    pub(crate) fn is_empty(&self) -> bool {
        self.has_no_text() && self.calls.is_empty()
    }

    /// Whether there is nothing but calls.
    pub(crate) fn has_no_text(&self) -> bool {
        let is_silent = self.text.is_empty() && self.thought.is_empty();
        is_silent && self.token_ids.is_empty() && self.scored.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        self.text.clear();
        self.thought.clear();
        self.calls.clear();
        self.token_ids.clear();
        self.scored.clear();
        self.order.clear();
    }

    /// Text, thoughts and calls in the model's order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Part<'_>> {
        let (mut text, mut thought) = (self.text.as_str(), self.thought.as_str());
        let mut calls = self.calls.iter();
        self.order.iter().filter_map(move |stretch| match *stretch {
            Stretch::Text(len) => Some(Part::Text(take_bytes(&mut text, len))),
            Stretch::Thought(len) => Some(Part::Thought(take_bytes(&mut thought, len))),
            Stretch::Call => calls.next().map(Part::Call),
        })
    }

    pub(crate) fn forget_thoughts(&mut self) {
        self.thought.clear();
        self.order
            .retain(|stretch| !matches!(stretch, Stretch::Thought(_)));
    }

    fn add_text(&mut self, piece: &str) {
        self.text.push_str(piece);
        match self.order.last_mut() {
            Some(Stretch::Text(len)) => *len += piece.len(),
            _ => self.order.push(Stretch::Text(piece.len())),
        }
    }

    fn add_thought(&mut self, piece: &str) {
        self.thought.push_str(piece);
        match self.order.last_mut() {
            Some(Stretch::Thought(len)) => *len += piece.len(),
            _ => self.order.push(Stretch::Thought(piece.len())),
        }
    }

    fn add_call(&mut self, call: CallPiece) {
        self.calls.push(call);
        self.order.push(Stretch::Call);
    }

    fn add_arguments(&mut self, index: usize, piece: &str) {
        match self.calls.last_mut().filter(|call| call.index == index) {
            Some(call) => call.arguments.push_str(piece),
            None => self.add_call(CallPiece {
                index,
                head: None,
                arguments: piece.to_owned(),
            }),
        }
    }
}

fn take_bytes<'a>(rest: &mut &'a str, len: usize) -> &'a str {
    let (taken, left) = rest.split_at(len);
    *rest = left;
    taken
}

/// How a request's calls are told.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallRules {
    /// The answer ends after one.
    pub(crate) is_single: bool,
    /// Of the tool that the request names: as `OpenAI` has it, such an answer ends with `stop`.
    pub(crate) is_named: bool,
    /// As `function_call`, the older name of `tool_calls`.
    pub(crate) are_functions: bool,
    pub(crate) ids: Option<CallIds>,
    /// Makes the request's ids differ from others'.
    pub(crate) id_seed: u64,
}

/// Tool calls by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCounts {
    /// Calls of declared tools, to their end.
    pub complete: u64,
    /// Calls within which the output ended.
    pub cut_off: u64,
    /// What looked like a call and became content: broken, or of an undeclared tool.
    pub as_text: u64,
}

/// The calls of one choice so far.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    num_begun: usize,
    pub(crate) counts: CallCounts,
}

impl Calls {
    /// Whether the one call that is allowed is complete.
    pub(crate) fn are_over(&self, rules: CallRules) -> bool {
        rules.is_single && self.counts.complete > 0
    }

    pub(crate) fn take(
        &mut self,
        parsed: Parsed<'_>,
        (choice, rules): (usize, CallRules),
        unsent: &mut Unsent,
    ) {
        if self.are_over(rules) {
            return;
        }
        match parsed {
            Parsed::Text(text) => unsent.add_text(text),
            Parsed::Thought(text) => unsent.add_thought(text),
            Parsed::CallBegun { name, id } => {
                let index = self.num_begun;
                let own = || call_id(rules, choice, index);
                unsent.add_call(CallPiece {
                    index,
                    head: Some(CallHead {
                        id: id.map_or_else(own, str::to_owned),
                        name: name.to_owned(),
                    }),
                    arguments: String::new(),
                });
                self.num_begun += 1;
            }
            Parsed::Arguments(piece) => {
                unsent.add_arguments(self.num_begun.saturating_sub(1), piece);
            }
            Parsed::CallEnded => self.counts.complete += 1,
            Parsed::CallCutOff => self.counts.cut_off += 1,
            Parsed::NoCall => self.counts.as_text += 1,
        }
    }
}

/// An id that no other call has.
fn call_id(rules: CallRules, choice: usize, call: usize) -> String {
    let bits = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        (rules.id_seed, choice, call, salt).hash(&mut hasher);
        hasher.finish()
    };
    match rules.ids {
        Some(CallIds::NineLetters) => nine_letters(bits(0)),
        _ => format!("call_{:016x}{:08x}", bits(0), bits(1) >> 32),
    }
}

fn nine_letters(mut bits: u64) -> String {
    const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let letter = |_| {
        let letter = LETTERS[usize::try_from(bits % 62).unwrap_or(0)];
        bits /= 62;
        char::from(letter)
    };
    (0..9).map(letter).collect()
}

/// A number that differs between requests' ids.
pub(crate) fn id_seed(request_id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    request_id.hash(&mut hasher);
    hasher.finish()
}
