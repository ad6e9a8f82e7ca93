//! What a model's files say about text.

use std::path::Path;
use std::sync::Arc;

use plait_core::TokenId;
use serde::Serialize;
use serde_json::json;
use tokenizers::Tokenizer;

use super::architecture::Architecture;
use super::catch_panic::catch_panic;
use super::error::ModelFilesError;
use super::template::{ChatTemplate, SpecialTokens};
use super::vocabulary::Vocabulary;
use super::{folder, gguf_model};

/// A model's text side: tokenizer, chat template, end tokens, defaults. Shared by all threads.
#[derive(Debug)]
pub struct ModelText {
    pub(super) facts: ModelFacts,
    pub(super) tokenizer: Tokenizer,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) eos_token_ids: Arc<[TokenId]>,
    pub(super) template: Option<ChatTemplate>,
    model_id: String,
}

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
pub(super) struct ModelFacts {
    pub(super) architecture: Architecture,
    /// Positions.
    pub(super) context_length: u32,
    /// Rows of the output head.
    pub(super) vocab_size: u32,
    pub(super) eos_token_ids: Vec<TokenId>,
    pub(super) defaults: GenerationDefaults,
}

/// What both kinds of model files give.
#[derive(Debug)]
pub(super) struct TextFiles {
    pub(super) facts: ModelFacts,
    pub(super) tokenizer: Tokenizer,
    pub(super) special: SpecialTokens,
    /// Jinja source.
    pub(super) template: Option<String>,
}

impl ModelText {
    /// Reads a Hugging Face folder or a GGUF file.
    ///
    /// The name that clients use is `served_name`, else the folder's or file's name. Errors name
    /// the file and say what is wrong with it.
    pub fn load(path: &Path, served_name: Option<&str>) -> Result<Self, ModelFilesError> {
        let files = if path.is_dir() {
            folder::read(path)?
        } else {
            gguf_model::read(path)?
        };
        let problem = |problem| ModelFilesError::new(path, problem);
        let facts = files.facts;
        let vocabulary = Vocabulary::new(&files.tokenizer, facts.vocab_size).map_err(problem)?;
        let template = files
            .template
            .map(|source| ChatTemplate::new(&source, files.special))
            .transpose()
            .map_err(problem)?;
        Ok(Self {
            tokenizer: files.tokenizer,
            vocabulary: Arc::new(vocabulary),
            eos_token_ids: facts.eos_token_ids.clone().into(),
            template,
            model_id: served_name.map_or_else(|| name_of(path), str::to_owned),
            facts,
        })
    }

    /// The name that clients use.
    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    /// The family: `llama`, `qwen3` or `qwen3_moe`.
    pub fn architecture(&self) -> &'static str {
        self.facts.architecture.name()
    }

    /// Positions that the model was made for; the upper bound of `max_model_len`.
    pub fn context_length(&self) -> u32 {
        self.facts.context_length
    }

    /// Rows of the model's output head; token ids are below it.
    pub fn vocab_size(&self) -> u32 {
        self.facts.vocab_size
    }

    /// Tokens that end an answer.
    pub fn eos_token_ids(&self) -> &[TokenId] {
        &self.eos_token_ids
    }

    /// How the model's authors want it sampled.
    pub fn generation_defaults(&self) -> GenerationDefaults {
        self.facts.defaults
    }

    /// Whether chats can be served.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// A text's tokens, with the tokenizer's own ones around them where asked; the error says why
    /// there are none.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<TokenId>, String> {
        match catch_panic(|| self.tokenizer.encode_fast(text, add_special_tokens)) {
            Some(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Some(Err(error)) => Err(format!("the text cannot be tokenised: {error}")),
            None => Err("the text cannot be tokenised".to_owned()),
        }
    }

    /// JSON: `{model_id, architecture, max_model_len, vocab_size, eos_token_ids,
    /// generation_defaults}`.
    pub fn describe(&self, max_model_len: u32) -> String {
        json!({
            "model_id": self.model_id,
            "architecture": self.architecture(),
            "max_model_len": max_model_len,
            "vocab_size": self.facts.vocab_size,
            "eos_token_ids": *self.eos_token_ids,
            "generation_defaults": self.facts.defaults,
        })
        .to_string()
    }
}

fn name_of(path: &Path) -> String {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = if absolute.is_dir() {
        absolute.file_name()
    } else {
        absolute.file_stem()
    };
    name.map_or_else(
        || "model".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}
