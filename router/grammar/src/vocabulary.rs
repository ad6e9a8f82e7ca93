//! The model's tokens as a trie of their bytes.

use std::panic::catch_unwind;
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::limits::parser_limits;

/// Index of a token in the model's output head.
pub type TokenId = u32;

/// Longer tokens are never allowed: the trie holds none.
const MAX_TOKEN_BYTES: usize = 1000;
/// Where a model has no end token.
const NO_TOKEN: TokenId = llguidance::toktrie::INVALID_TOKEN;

/// What a token is to a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// Adds these bytes.
    Text(&'a [u8]),
    /// A special token, with its spelling. A text that has the spelling is not the token.
    Special(&'a [u8]),
}

/// The model's tokens, ready for masks. Built once for a model and shared by all grammars.
pub struct Vocabulary {
    pub(crate) factory: ParserFactory,
    end_ids: Vec<TokenId>,
    breaks: Vec<TokenId>,
    /// Spellings of special tokens, the longest first.
    special: Vec<(String, TokenId)>,
    num_tokens: usize,
}

impl Vocabulary {
    /// Builds the trie; `end_ids` are the tokens that end an answer. An error says what is wrong with the tokens.
    pub fn new<'a>(
        tokens: impl IntoIterator<Item = Token<'a>>,
        end_ids: &[TokenId],
    ) -> Result<Self, String> {
        let tokens: Vec<Token<'_>> = tokens.into_iter().collect();
        let special = spellings(&tokens);
        let tokens: Vec<Vec<u8>> = tokens.into_iter().map(bytes_in_trie).collect();
        let num_tokens = tokens.len();
        let end_ids: Vec<TokenId> = end_ids.to_vec();
        if let Some(id) = end_ids.iter().find(|id| **id as usize >= num_tokens) {
            return Err(format!(
                "the end token {id} is not one of the {num_tokens} tokens"
            ));
        }
        let ends = end_ids.clone();
        // The library asserts the limits of its trie.
        let factory = catch_unwind(|| factory(&tokens, &ends))
            .map_err(|_| format!("{num_tokens} tokens are more than a trie for grammars holds"))?
            .map_err(|error| format!("no trie can be made of the vocabulary: {error}"))?;
        let is_break = |bytes: &[u8]| matches!(bytes, b"\n" | b"\n\n");
        let breaks = (0..).zip(&tokens).filter(|(_, bytes)| is_break(bytes));
        Ok(Self {
            factory,
            end_ids,
            breaks: breaks.map(|(token, _)| token).collect(),
            special,
            num_tokens,
        })
    }

    /// Rows of the output head.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Words of a mask: bit t % 32 of word t / 32 is token t.
    pub fn num_mask_words(&self) -> usize {
        self.num_tokens.div_ceil(32)
    }

    /// Tokens that end an answer.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.end_ids
    }

    /// The special token of this spelling.
    pub fn special_token(&self, spelling: &str) -> Option<TokenId> {
        self.trie().get_special_token(spelling)
    }

    /// The text in parts, each with the special token whose spelling follows it.
    pub(crate) fn split_at_special<'a>(&self, text: &'a str) -> Vec<(&'a str, Option<TokenId>)> {
        let mut parts = Vec::new();
        let mut rest = text;
        loop {
            let found = self.special.iter().filter_map(|(spelling, id)| {
                let at = rest.find(spelling.as_str())?;
                Some((at, spelling.len(), *id))
            });
            // Of several at a place the longest comes first.
            let Some((at, length, id)) = found.min_by_key(|(at, ..)| *at) else {
                parts.push((rest, None));
                return parts;
            };
            parts.push((&rest[..at], Some(id)));
            rest = &rest[at + length..];
        }
    }

    /// The bytes that a token adds to a text.
    pub(crate) fn text_of(&self, token: TokenId) -> &[u8] {
        if token as usize >= self.num_tokens || self.trie().is_special_token(token) {
            return &[];
        }
        self.trie().token(token)
    }

    /// Tokens that join to a text; not as the tokenizer would have them.
    pub(crate) fn tokens_of(&self, text: &[u8]) -> Vec<TokenId> {
        self.trie().greedy_tokenize(text)
    }

    /// Tokens with which a text may go on that is to be this one: its first bytes, or all of it and more.
    pub(crate) fn tokens_along(&self, text: &[u8]) -> Vec<TokenId> {
        self.tokens_where(|token| text.starts_with(token) || token.starts_with(text))
    }

    /// Tokens that are this text and more than line breaks behind it.
    pub(crate) fn tokens_beyond(&self, text: &[u8]) -> Vec<TokenId> {
        self.tokens_where(|token| {
            let behind = token.strip_prefix(text).unwrap_or_default();
            !matches!(behind, b"" | b"\n" | b"\n\n")
        })
    }

    fn tokens_where(&self, is_meant: impl Fn(&[u8]) -> bool) -> Vec<TokenId> {
        let ids = (0..).zip(0..self.num_tokens).map(|(id, _)| id);
        let texts = ids.map(|id| (id, self.text_of(id)));
        let meant = texts.filter(|(_, text)| !text.is_empty() && is_meant(text));
        meant.map(|(id, _)| id).collect()
    }

    /// Tokens that are line breaks and nothing else.
    pub(crate) fn breaks(&self) -> &[TokenId] {
        &self.breaks
    }

    fn trie(&self) -> &TokTrie {
        self.factory.tok_env().tok_trie()
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary")
            .field("num_tokens", &self.num_tokens)
            .field("end_ids", &self.end_ids)
            .finish_non_exhaustive()
    }
}

/// The special tokens by their spellings, the longest first.
fn spellings(tokens: &[Token<'_>]) -> Vec<(String, TokenId)> {
    let special = (0..).zip(tokens).filter_map(|(id, token)| match token {
        Token::Special(bytes) if !bytes.is_empty() && bytes.len() <= MAX_TOKEN_BYTES => {
            Some((str::from_utf8(bytes).ok()?.to_owned(), id))
        }
        _ => None,
    });
    let mut special: Vec<(String, TokenId)> = special.collect();
    special.sort_by_key(|(spelling, _)| std::cmp::Reverse(spelling.len()));
    special
}

/// A special token's bytes begin with 0xff, which no UTF-8 text has.
fn bytes_in_trie(token: Token<'_>) -> Vec<u8> {
    const MARKER: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
    match token {
        Token::Text(bytes) if bytes.len() > MAX_TOKEN_BYTES || bytes.starts_with(&[MARKER]) => {
            Vec::new()
        }
        Token::Text(bytes) => bytes.to_vec(),
        Token::Special(bytes) if bytes.is_empty() || bytes.len() > MAX_TOKEN_BYTES => Vec::new(),
        Token::Special(bytes) => [&[MARKER], bytes].concat(),
    }
}

fn factory(tokens: &[Vec<u8>], end_ids: &[TokenId]) -> Result<ParserFactory, String> {
    let num_tokens = u32::try_from(tokens.len()).map_err(|_| "too many tokens".to_owned())?;
    let info = TokRxInfo::new(num_tokens, end_ids.first().copied().unwrap_or(NO_TOKEN));
    let mut trie = TokTrie::from(&info, tokens);
    if !end_ids.is_empty() {
        trie = trie.with_eos_tokens(end_ids);
    }
    let tokens: TokEnv = Arc::new(Tokens { trie });
    let slices = SlicedBiasComputer::json_slices();
    let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices)
        .map_err(|error| error.to_string())?;
    factory.quiet();
    *factory.limits_mut() = parser_limits();
    Ok(factory)
}

struct Tokens {
    trie: TokTrie,
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(text)
    }

    /// Masks allow every tokenisation of a text: none is forced.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
