//! What a model's files say about text.

use std::path::Path;

use plait_core::TokenId;
use serde::Serialize;

use super::error::{ModelFilesError, RequestError};
use super::request::{GenerateRequest, Prepared};

/// A model's text side: tokenizer, chat template, end tokens, defaults. Shared by all threads.
#[derive(Debug)]
pub struct ModelText {}

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

impl ModelText {
    /// Reads a Hugging Face folder or a GGUF file.
    pub fn load(path: &Path, served_name: Option<&str>) -> Result<Self, ModelFilesError> {
        let _ = (path, served_name);
        todo!()
    }

    /// The name that clients use.
    pub fn model_id(&self) -> &str {
        todo!()
    }

    /// The family, as a GGUF or `model_type` names it: `llama`, `qwen3`, `qwen3_moe`.
    pub fn architecture(&self) -> &str {
        todo!()
    }

    /// Positions that the model was made for; the upper bound of `max_model_len`.
    pub fn context_length(&self) -> u32 {
        todo!()
    }

    /// Rows of the model's output head; token ids are below it.
    pub fn vocab_size(&self) -> u32 {
        todo!()
    }

    /// Tokens that end an answer.
    pub fn eos_token_ids(&self) -> &[TokenId] {
        todo!()
    }

    /// JSON: `{model_id, architecture, max_model_len, vocab_size, eos_token_ids, generation_defaults}`.
    pub fn describe(&self, max_model_len: u32) -> String {
        let _ = max_model_len;
        todo!()
    }

    /// Renders, tokenises and checks a request; `draw_seed` gives one to each choice that has none.
    pub fn prepare(
        &self,
        request: &GenerateRequest,
        max_model_len: u32,
        draw_seed: &mut impl FnMut() -> u64,
    ) -> Result<Prepared, RequestError> {
        let _ = (request, max_model_len, draw_seed);
        todo!()
    }
}
