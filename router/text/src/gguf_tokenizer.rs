//! A tokenizer from a GGUF's tokens, merges, pre-tokenizer and token types.
//!
//! The ids are those that transformers gives for the same file (`gguf_file=`).

use std::collections::HashSet;

use plait_core::TokenId;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

use crate::post_processor::add_bos_and_eos;
use crate::vocabulary::letter_of_byte;

/// Token types of a GGUF that matter here.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Llama 3's split.
const LLAMA3_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
/// Qwen 2's and 3's split: Llama 3's with digits one by one.
const QWEN2_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// How a pre-tokenizer splits text before the merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// GPT-2's expression. For `smollm`, llama.cpp also splits between digits and transformers does not.
    /// The two differ only in runs of spaces before a digit.
    Gpt2,
    Llama3,
    Qwen2,
}

const CUTS: [(&str, Cut); 10] = [
    ("default", Cut::Gpt2),
    ("gpt-2", Cut::Gpt2),
    ("smollm", Cut::Gpt2),
    ("llama-bpe", Cut::Llama3),
    ("llama3", Cut::Llama3),
    ("llama-v3", Cut::Llama3),
    ("smaug-bpe", Cut::Llama3),
    ("qwen2", Cut::Qwen2),
    ("deepseek-r1-qwen", Cut::Qwen2),
    ("megrez", Cut::Qwen2),
];

/// What a token is in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Made by the merges.
    Ordinary,
    /// Found whole, never shown.
    Special,
    /// Found whole, shown.
    UserDefined,
}

/// A GGUF's `tokenizer.ggml.*`.
#[derive(Debug)]
pub(crate) struct TokenTable {
    /// `gpt2` for byte-level BPE.
    pub(crate) model: String,
    pub(crate) pre_tokenizer: String,
    pub(crate) tokens: Vec<String>,
    /// Pairs, separated by a space, in the order of their rank.
    pub(crate) merges: Vec<String>,
    /// One type for each token, or none at all.
    pub(crate) kinds: Vec<i64>,
    /// Tokens with a role, such as end of text. They are special whatever their type.
    pub(crate) special_ids: Vec<TokenId>,
    /// Put before a text.
    pub(crate) bos: Option<TokenId>,
    /// Put after a text.
    pub(crate) eos: Option<TokenId>,
}

impl TokenTable {
    pub(crate) fn text(&self, id: TokenId) -> String {
        self.tokens[id as usize].clone()
    }

    /// Whether a text begins with the beginning-of-text token if the file does not say. Llama 3's files
    /// have no such flag, and its models never saw a text without the token.
    pub(crate) fn begins_with_bos(&self) -> bool {
        matches!(self.cut(), Ok(Cut::Llama3))
    }

    fn cut(&self) -> Result<Cut, String> {
        let found = CUTS.iter().find(|(name, _)| *name == self.pre_tokenizer);
        found.map(|(_, cut)| *cut).ok_or_else(|| {
            let known = CUTS.map(|(name, _)| name).join(", ");
            let name = &self.pre_tokenizer;
            format!("the pre-tokenizer `{name}` is not supported; these are: {known}")
        })
    }

    fn role(&self, id: TokenId) -> Role {
        let kind = self.kinds.get(id as usize);
        if kind == Some(&CONTROL) || self.special_ids.contains(&id) {
            Role::Special
        } else if kind == Some(&USER_DEFINED) {
            Role::UserDefined
        } else {
            Role::Ordinary
        }
    }
}

/// The tokenizer that the table describes.
pub(crate) fn build(table: &TokenTable) -> Result<Tokenizer, String> {
    if table.model != "gpt2" {
        return Err(format!(
            "the tokenizer model `{}` is not supported in a GGUF, gpt2 (byte-level BPE) is; use \
             the model's Hugging Face folder",
            table.model
        ));
    }
    let cut = table.cut()?;
    let mut tokenizer = Tokenizer::new(merges_model(table, cut)?);
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer(cut)?));
    tokenizer.with_decoder(Some(ByteLevel::default().add_prefix_space(false)));
    tokenizer
        .add_tokens(added_tokens(table))
        .map_err(|error| error.to_string())?;
    let named = |id: Option<TokenId>| id.map(|id| (table.text(id), id));
    add_bos_and_eos(&mut tokenizer, named(table.bos), named(table.eos))?;
    Ok(tokenizer)
}

fn merges_model(table: &TokenTable, cut: Cut) -> Result<BPE, String> {
    let letters = letter_of_byte();
    let alphabet = HashSet::from(letters);
    let spelled = |id: TokenId, token: &String| {
        if table.role(id) != Role::Ordinary
            || token.chars().all(|letter| alphabet.contains(&letter))
        {
            token.clone()
        } else {
            token
                .bytes()
                .map(|byte| letters[usize::from(byte)])
                .collect()
        }
    };
    let ids = 0..;
    let vocabulary: Vocab = ids
        .zip(&table.tokens)
        .map(|(id, token)| (spelled(id, token), id))
        .collect();
    let merges: Result<Vec<_>, String> = table
        .merges
        .iter()
        .map(|merge| parse_merge(merge))
        .collect();
    BPE::builder()
        .vocab_and_merges(vocabulary, merges?)
        .ignore_merges(cut == Cut::Llama3)
        .build()
        .map_err(|error| format!("has merges that do not fit its tokens: {error}"))
}

fn parse_merge(merge: &str) -> Result<(String, String), String> {
    merge
        .split_once(' ')
        .map(|(left, right)| (left.to_owned(), right.to_owned()))
        .ok_or_else(|| format!("is broken: the merge `{merge}` is not a pair"))
}

fn pre_tokenizer(cut: Cut) -> Result<PreTokenizerWrapper, String> {
    let expression = match cut {
        Cut::Gpt2 => return Ok(ByteLevel::default().add_prefix_space(false).into()),
        Cut::Llama3 => LLAMA3_SPLIT,
        Cut::Qwen2 => QWEN2_SPLIT,
    };
    let pattern = SplitPattern::Regex(expression.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        .map_err(|error| error.to_string())?;
    let letters = ByteLevel::default()
        .add_prefix_space(false)
        .use_regex(false);
    Ok(Sequence::new(vec![split.into(), letters.into()]).into())
}

/// The tokens that are found whole in a text, spelled as they are.
fn added_tokens(table: &TokenTable) -> Vec<AddedToken> {
    let ids = 0..;
    let added = ids.zip(&table.tokens).filter_map(|(id, token)| {
        let special = match table.role(id) {
            Role::Ordinary => return None,
            Role::Special => true,
            Role::UserDefined => false,
        };
        Some(AddedToken::from(token.clone(), special).normalized(false))
    });
    added.collect()
}
