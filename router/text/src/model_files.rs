//! What a folder and a GGUF file both give.

use plait_core::TokenId;
use plait_proto::Family;
use tokenizers::Tokenizer;

use crate::sampling::SamplingFields;
use crate::template::SpecialTokens;

/// Plain facts about a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelFacts {
    pub(crate) family: &'static Family,
    /// Positions.
    pub(crate) context_length: u32,
    /// Rows of the output head.
    pub(crate) vocab_size: u32,
    pub(crate) eos_token_ids: Vec<TokenId>,
    /// How the model's authors want it sampled.
    pub(crate) defaults: SamplingFields,
}

/// The text side of a model's files.
#[derive(Debug)]
pub(crate) struct TextFiles {
    pub(crate) facts: ModelFacts,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) special: SpecialTokens,
    /// Jinja source.
    pub(crate) template: Option<String>,
}
