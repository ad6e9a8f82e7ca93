//! Masks by the lexer's state. Most tokens only lengthen the lexeme that a text is in, or cannot follow in it, whatever
//! the grammar says around it: that follows from the lexer's state alone, and many answers come to the same states. For
//! the others the grammar is asked, once for all tokens that end the lexeme alike and go on with the same bytes. So the
//! mask within a string of limited length, for which the library walks most of the vocabulary, takes microseconds from
//! then on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use llguidance::derivre::StateID;
use llguidance::earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer};
use llguidance::toktrie::{SimpleVob, TokTrie};

use crate::limits::parser_limits;
use crate::split::Split;

/// A mask that takes less is none to save.
const SHORT: Duration = Duration::from_micros(50);
/// What making a split takes, about: a state's masks must have taken as long before. So making it never doubles what an
/// answer waits for, however seldom the state comes.
const COST: Duration = Duration::from_millis(2);
/// Of a lexer's splits at most: 256 of the usual 40 kB. One in which many tokens end the lexeme has more than a megabyte.
const MAX_BYTES: usize = 10 << 20;
/// States of which more is known than nothing.
const MAX_STATES: usize = 1 << 14;

/// Computes the masks of parsers that share a lexer.
pub(crate) struct LexemeMasks {
    library: Arc<SlicedBiasComputer>,
    cost: Duration,
    max_bytes: usize,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    states: HashMap<StateID, State>,
    num_bytes: usize,
}

/// What is known of a lexer's state.
#[derive(Clone)]
enum State {
    /// Its masks took so long.
    Slow(Duration),
    /// It cannot be split.
    Whole,
    Split(Arc<Split>),
}

impl LexemeMasks {
    pub(crate) fn new(library: Arc<SlicedBiasComputer>) -> Self {
        Self::with_limits(COST, MAX_BYTES, library)
    }

    /// The same if a split were as cheap as that, and all of them had so many bytes at most.
    fn with_limits(cost: Duration, max_bytes: usize, library: Arc<SlicedBiasComputer>) -> Self {
        Self {
            library,
            cost,
            max_bytes,
            known: Mutex::default(),
        }
    }

    /// Memory that it keeps, about.
    pub(crate) fn num_bytes(&self) -> usize {
        self.with(|known| known.num_bytes)
    }

    fn with<T>(&self, run: impl FnOnce(&mut Known) -> T) -> T {
        run(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The library's mask; `before` is what those of the state took.
    fn mask_of_library(
        &self,
        rec: &mut ParserRecognizer<'_>,
        state: StateID,
        before: Duration,
    ) -> SimpleVob {
        let start = Instant::now();
        let mask = self.library.compute_bias(rec, &[]);
        let took = start.elapsed();
        if took >= SHORT.min(self.cost) {
            self.with(|known| known.note(state, State::Slow(before + took)));
        }
        mask
    }

    /// The library's mask. The next ones of the state come of its split, if that gives the same now.
    fn split(&self, rec: &mut ParserRecognizer<'_>, state: StateID) -> SimpleVob {
        let num_before = rec.stats_mut().all_items;
        let mask = self.library.compute_bias(rec, &[]);
        // Its parser has a limit for each mask, which both must fit.
        let is_cheap = rec.stats_mut().all_items - num_before < parser_limits().step_max_items / 4;
        let split = is_cheap.then(|| Split::of(state, self.trie(), rec, &mask));
        self.with(|known| known.note_split(state, split.flatten(), self.max_bytes));
        mask
    }
}

impl BiasComputer for LexemeMasks {
    fn compute_bias(&self, rec: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        if !start.is_empty() {
            return self.library.compute_bias(rec, start);
        }
        let state = rec.lexer_state();
        match self.with(|known| known.states.get(&state).cloned()) {
            None => self.mask_of_library(rec, state, Duration::ZERO),
            Some(State::Slow(took)) if took < self.cost => self.mask_of_library(rec, state, took),
            Some(State::Slow(_)) => self.split(rec, state),
            Some(State::Whole) => self.library.compute_bias(rec, start),
            Some(State::Split(split)) => split.mask(rec),
        }
    }

    fn trie(&self) -> &TokTrie {
        self.library.trie()
    }
}

impl Known {
    fn note(&mut self, state: StateID, what: State) {
        if self.states.len() == MAX_STATES && !self.states.contains_key(&state) {
            return;
        }
        self.states.insert(state, what);
    }

    /// Keeps a split if there is one, and room for it.
    fn note_split(&mut self, state: StateID, split: Option<Split>, max_bytes: usize) {
        let kept = split.filter(|it| self.num_bytes + it.num_bytes() <= max_bytes);
        self.num_bytes += kept.as_ref().map_or(0, Split::num_bytes);
        let what = kept.map_or(State::Whole, |it| State::Split(Arc::new(it)));
        self.note(state, what);
    }
}

#[cfg(test)]
mod tests {
    use llguidance::api::{GrammarInit, TopLevelGrammar};
    use llguidance::{Matcher, TokenParser};

    use super::*;
    use crate::vocabulary::{Token, Vocabulary};

    const WORDS: [&str; 24] = [
        "na",
        "name",
        "true",
        "12",
        "-1",
        " 1",
        "\n\n",
        "  ",
        "é",
        "日本",
        "日本\"",
        "é\",\"",
        "a\"",
        "aa\"",
        "a\":",
        "\":",
        "\", \"",
        "\"}",
        "{\"",
        "ab\\n",
        "\\u00",
        "abcdefghijkl",
        "\"\n",
        "12,",
    ];
    const GRAMMARS: [&str; 6] = [
        r#"start: %json {"type": "array", "items": {"type": "string", "maxLength": 7}}"#,
        r#"start: %json {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "number"}},
                         "required": ["name", "n"], "additionalProperties": {"maxLength": 3, "type": "string"}}"#,
        r#"start: %json {"type": "object", "x-guidance": {"whitespace_flexible": false}}"#,
        r"start: /(\w{1,4}|é+\n)*(true|12)?/",
        r#"start: word ("," word)* "end"
           word: /[a-z]{1,9}/ | /"[^"]{0,5}"/"#,
        r#"start: text "name"
           text[stop="12"]: /[a-z1"]*/"#,
    ];

    /// Bytes, words, and each word again: tokens of the same bytes.
    fn vocabulary() -> Vocabulary {
        let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
        let bytes = bytes.iter().map(|byte| Token::Text(byte));
        let words = WORDS.iter().chain(&WORDS);
        let words = words.map(|word| Token::Text(word.as_bytes()));
        Vocabulary::new(bytes.chain([Token::Special(b"<end>")]).chain(words), &[256]).unwrap()
    }

    fn parser(vocabulary: &Vocabulary, lark: &str) -> TokenParser {
        let grammar = TopLevelGrammar::from_lark(lark.to_owned());
        let factory = &vocabulary.factory;
        let parser = factory.create_parser_from_init_default(GrammarInit::Serialized(grammar));
        let mut parser = parser.unwrap();
        parser.start_without_prompt();
        parser
    }

    /// Writes an answer by `draw`, and compares the masks of both at every place.
    fn follow(ours: TokenParser, plain: TokenParser, mut draw: u64) {
        let (mut ours, mut plain) = (Matcher::new(Ok(ours)), Matcher::new(Ok(plain)));
        for place in 0..40 {
            let (Ok(mask), Ok(expected)) = (ours.compute_mask(), plain.compute_mask()) else {
                return;
            };
            assert!(mask == expected, "at {place}: {mask:?} for {expected:?}");
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let tokens: Vec<u32> = expected.iter().collect();
            let token = tokens[(draw >> 33) as usize % tokens.len()];
            ours.consume_token(token).unwrap();
            plain.consume_token(token).unwrap();
            if plain.is_stopped() {
                return;
            }
        }
    }

    #[test]
    fn masks_by_the_lexers_state_are_those_of_the_library() {
        let vocabulary = vocabulary();
        let mut num_splits = 0;
        for lark in GRAMMARS {
            let mut shared = parser(&vocabulary, lark);
            let library = vocabulary.factory.slicer();
            let masks = Arc::new(LexemeMasks::with_limits(Duration::ZERO, MAX_BYTES, library));
            shared.bias_computer = masks.clone();
            for draw in 0..60 {
                follow(shared.clone(), parser(&vocabulary, lark), draw);
            }
            let is_split = |state: &&State| matches!(state, State::Split(_));
            num_splits += masks.with(|known| known.states.values().filter(is_split).count());
        }
        assert!(num_splits > 50, "{num_splits}");
    }

    #[test]
    fn a_split_is_made_once_the_masks_of_a_state_have_taken_what_it_costs() {
        let vocabulary = vocabulary();
        for (cost, expected) in [(Duration::ZERO, true), (Duration::MAX, false)] {
            let mut shared = parser(&vocabulary, GRAMMARS[0]);
            let library = vocabulary.factory.slicer();
            let masks = Arc::new(LexemeMasks::with_limits(cost, MAX_BYTES, library));
            shared.bias_computer = masks.clone();
            for draw in 0..4 {
                follow(shared.clone(), parser(&vocabulary, GRAMMARS[0]), draw);
            }
            assert_eq!(masks.num_bytes() > 0, expected);
        }
    }

    #[test]
    fn splits_have_no_more_than_their_bytes() {
        let vocabulary = vocabulary();
        let mut most = [0; 2];
        for (max_bytes, most) in [4000, MAX_BYTES].into_iter().zip(&mut most) {
            let mut shared = parser(&vocabulary, GRAMMARS[0]);
            let library = vocabulary.factory.slicer();
            let masks = Arc::new(LexemeMasks::with_limits(Duration::ZERO, max_bytes, library));
            shared.bias_computer = masks.clone();
            for draw in 0..60 {
                follow(shared.clone(), parser(&vocabulary, GRAMMARS[0]), draw);
            }
            *most = masks.num_bytes();
        }
        assert!(0 < most[0] && most[0] <= 4000 && 4000 < most[1], "{most:?}");
    }
}
