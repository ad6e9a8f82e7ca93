//! The vocabulary as a state of the lexer divides it.

use std::collections::HashMap;
use std::ops::Range;

use llguidance::derivre::StateID;
use llguidance::earley::ParserRecognizer;
use llguidance::toktrie::{Recognizer, SimpleVob, TokTrie, TrieNode as Node};

use crate::vocabulary::TokenId;

/// Nodes of tokens that end the lexeme in one way, at most: where most do, nothing is won.
const MAX_ASKING: usize = 1 << 15;
/// States of the lexer that a split may go through. The library limits what a mask may cost: where it has gone through
/// them all, these cost nothing more, and where it did not need to, each is cheap.
const MAX_STATES: usize = 1024;

/// What a lexer's state says of each token.
pub(crate) struct Split {
    /// Tokens that lengthen the lexeme.
    within: SimpleVob,
    ends: Vec<End>,
}

/// A way in which the lexeme ends, with the tokens that end it so.
struct End {
    /// Leads to the end; any other bytes that lead there would do.
    path: Vec<u8>,
    /// What tokens have behind the end, in order.
    suffixes: Vec<Suffix>,
    tokens: Vec<TokenId>,
}

struct Suffix {
    bytes: Box<[u8]>,
    /// Of the end's tokens.
    tokens: Range<usize>,
}

/// What tells ends apart to the grammar.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Ending {
    /// The lexeme ends before the suffix's first byte, which it cannot take.
    Before(StateID),
    /// It ends with the path's last byte.
    With(StateID),
    /// The grammar is asked for all bytes of the token.
    Unknown,
}

impl Split {
    /// None where little would be won, or if it is not the library's `mask` that it gives.
    pub(crate) fn of(
        state: StateID,
        trie: &TokTrie,
        rec: &mut ParserRecognizer<'_>,
        mask: &SimpleVob,
    ) -> Option<Self> {
        // Such a lexeme ends before its last bytes, which then count.
        if rec.lexer_mut().possible_hidden_len(state) > 0 {
            return None;
        }
        let (within, found) = Walk::new(state, rec).run(trie)?;
        let ends: Option<_> = found.into_values().map(|it| End::new(it, trie)).collect();
        let ends = ends?;
        let split = Self { within, ends };
        (split.mask(rec) == *mask).then_some(split)
    }

    /// The tokens that may come.
    pub(crate) fn mask(&self, rec: &mut ParserRecognizer<'_>) -> SimpleVob {
        let mut mask = self.within.clone();
        rec.trie_started("split");
        for end in &self.ends {
            end.ask(rec, &mut mask);
        }
        rec.trie_finished();
        mask
    }

    pub(crate) fn num_bytes(&self) -> usize {
        let of_ends = self.ends.iter().map(|end| {
            let suffixes = end.suffixes.iter();
            let of_suffixes = suffixes.map(|it| size_of::<Suffix>() + it.bytes.len());
            of_suffixes.sum::<usize>() + end.path.len() + size_of_val(&end.tokens[..])
        });
        of_ends.sum::<usize>() + size_of_val(self.within.as_slice())
    }
}

impl End {
    /// None if its tokens are too many.
    fn new(found: Found, trie: &TokTrie) -> Option<Self> {
        let behind = tokens_behind(trie, found.places)?;
        let mut suffixes: Vec<Suffix> = Vec::new();
        let mut tokens = Vec::with_capacity(behind.len());
        for (bytes, token) in behind {
            let at = tokens.len();
            tokens.push(token);
            match suffixes.last_mut() {
                Some(last) if *last.bytes == *bytes => last.tokens.end = at + 1,
                _ => suffixes.push(Suffix {
                    bytes: bytes.into(),
                    tokens: at..at + 1,
                }),
            }
        }
        Some(Self {
            path: found.path,
            suffixes,
            tokens,
        })
    }

    /// Allows the tokens that the grammar does.
    fn ask(&self, rec: &mut ParserRecognizer<'_>, mask: &mut SimpleVob) {
        let mut pushed = Pushed::default();
        if pushed.go_to(&self.path, rec) {
            let mut behind = Pushed::default();
            for suffix in &self.suffixes {
                if behind.go_to(&suffix.bytes, rec) {
                    let tokens = &self.tokens[suffix.tokens.clone()];
                    tokens.iter().for_each(|token| mask.allow_token(*token));
                }
            }
            rec.pop_bytes(behind.num);
        }
        rec.pop_bytes(pushed.num);
    }
}

/// Bytes that the grammar was asked for.
#[derive(Default)]
struct Pushed<'a> {
    text: &'a [u8],
    /// That it took; the next one was refused if the text is longer.
    num: usize,
}

impl<'a> Pushed<'a> {
    /// Whether the grammar takes this text. Texts come in order, so that those of the same beginning are neighbours.
    fn go_to(&mut self, text: &'a [u8], rec: &mut ParserRecognizer<'_>) -> bool {
        let pairs = self.text.iter().zip(text);
        let common = pairs.take_while(|(one, other)| one == other).count();
        if common > self.num {
            return false;
        }
        rec.pop_bytes(self.num - common);
        (self.text, self.num) = (text, common);
        while self.num < text.len() && rec.try_push_byte(text[self.num]) {
            self.num += 1;
        }
        self.num == text.len()
    }
}

/// Goes through the vocabulary with the lexer alone.
struct Walk<'r, 'p> {
    rec: &'r mut ParserRecognizer<'p>,
    states: Vec<StateID>,
    path: Vec<u8>,
    ends: HashMap<Ending, Found>,
    is_seen: Vec<bool>,
    num_states: usize,
}

/// Where the vocabulary's trie has tokens that end the lexeme.
struct Found {
    path: Vec<u8>,
    /// Bytes that lead to the first of them, and how many of these are the lexeme's.
    places: Vec<(Vec<u8>, usize)>,
}

impl<'r, 'p> Walk<'r, 'p> {
    fn new(state: StateID, rec: &'r mut ParserRecognizer<'p>) -> Self {
        Self {
            rec,
            states: vec![state],
            path: Vec::new(),
            ends: HashMap::new(),
            is_seen: Vec::new(),
            num_states: 0,
        }
    }

    /// The tokens that lengthen the lexeme, and how the others end it. None if that goes through too many states.
    fn run(mut self, trie: &TokTrie) -> Option<(SimpleVob, HashMap<Ending, Found>)> {
        let mut within = trie.alloc_token_set();
        trie.add_bias(&mut self, &mut within, &[]);
        (self.num_states <= MAX_STATES).then_some((within, self.ends))
    }

    /// The lexeme has the first `num_bytes` of the path with this byte.
    fn end(&mut self, ending: Ending, num_bytes: usize, byte: u8) {
        let place = [&self.path[..], &[byte]].concat();
        let found = self.ends.entry(ending).or_insert_with(|| Found {
            path: place[..num_bytes].to_vec(),
            places: Vec::new(),
        });
        found.places.push((place, num_bytes));
    }

    fn enter(&mut self, state: StateID, byte: u8) {
        let at = state.as_usize();
        if at >= self.is_seen.len() {
            self.is_seen.resize(at + 1, false);
        }
        self.num_states += usize::from(!std::mem::replace(&mut self.is_seen[at], true));
        self.states.push(state);
        self.path.push(byte);
    }
}

/// Takes what lengthens the lexeme, and notes where it ends.
impl Recognizer for Walk<'_, '_> {
    fn pop_bytes(&mut self, num: usize) {
        let left = self.path.len() - num;
        self.path.truncate(left);
        self.states.truncate(left + 1);
    }

    fn collapse(&mut self) {}

    fn trie_finished(&mut self) {}

    fn try_push_byte(&mut self, byte: u8) -> bool {
        let (before, state) = (self.path.len(), self.states[self.path.len()]);
        if self.num_states > MAX_STATES {
            return false;
        }
        if before == 0 && byte == TokTrie::SPECIAL_TOKEN_MARKER {
            self.end(Ending::Unknown, 0, byte);
            return false;
        }
        let lexer = self.rec.lexer_mut();
        let next = lexer.transition_start_state(state, Some(byte), &None);
        if next.is_dead() {
            if !lexer.try_lexeme_end(state).is_error() {
                self.end(Ending::Before(state), before, byte);
            }
            return false;
        }
        if next.has_lowest_match() {
            self.end(Ending::With(next), before + 1, byte);
            return false;
        }
        self.enter(next, byte);
        true
    }
}

/// The tokens of these places, each with its bytes from the lexeme's end on; None if they are too many.
fn tokens_behind(
    trie: &TokTrie,
    mut places: Vec<(Vec<u8>, usize)>,
) -> Option<Vec<(Vec<u8>, TokenId)>> {
    // Tokens of the same bytes are places of their own.
    places.sort_unstable();
    places.dedup();
    let mut tokens = Vec::new();
    for (place, num_bytes) in places {
        let (byte, before) = place.split_last()?;
        let parent = trie.child_at_bytes(trie.root(), before)?;
        let children = trie.node_children(parent);
        let mut suffix = place[num_bytes..].to_vec();
        for child in children.filter(|it| it.byte() == *byte) {
            if tokens.len() + child.subtree_size() > MAX_ASKING {
                return None;
            }
            collect(trie, child, &mut suffix, &mut tokens);
        }
    }
    tokens.sort_unstable();
    Some(tokens)
}

/// The tokens of `node` and below it; `suffix` are the bytes up to `node`.
fn collect(trie: &TokTrie, node: &Node, suffix: &mut Vec<u8>, to: &mut Vec<(Vec<u8>, TokenId)>) {
    if let Some(token) = node.token_id() {
        to.push((suffix.clone(), token));
    }
    for child in trie.node_children(node) {
        suffix.push(child.byte());
        collect(trie, child, suffix, to);
        suffix.pop();
    }
}
