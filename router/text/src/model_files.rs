//! What a folder and a GGUF file both give.

use plait_core::TokenId;
use plait_proto::Family;
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::template::SpecialTokens;

/// How the model's authors want it sampled; `None` leaves it to OpenAI's defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct GenerationDefaults {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// 1 keeps the whole vocabulary.
    pub top_p: Option<f32>,
    /// 0 keeps the whole vocabulary.
    pub top_k: Option<u32>,
    /// 0 keeps the whole vocabulary.
    pub min_p: Option<f32>,
}

/// Plain facts about a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelFacts {
    pub(crate) family: &'static Family,
    /// Positions.
    pub(crate) context_length: u32,
    /// Rows of the output head.
    pub(crate) vocab_size: u32,
    pub(crate) eos_token_ids: Vec<TokenId>,
    pub(crate) defaults: GenerationDefaults,
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
