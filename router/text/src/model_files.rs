//! What a folder and a GGUF file both give.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use plait_core::TokenId;
use plait_proto::Family;
use tokenizers::Tokenizer;

use crate::error::ModelFilesError;
use crate::sampling::SamplingFields;
use crate::template::SpecialTokens;

/// Largest file but tokenizer.json that is read, in bytes.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;

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
    pub(crate) templates: TemplateSources,
}

/// Jinja sources of chat templates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TemplateSources {
    pub(crate) default: Option<String>,
    /// For chats with tools, where a model has one of its own for them.
    pub(crate) tool_use: Option<String>,
}

/// A chat template from a file of its own.
pub(crate) fn read_template(path: &Path) -> Result<String, ModelFilesError> {
    let problem = "is missing; name a file with a Jinja template";
    read_text(path)?.ok_or_else(|| ModelFilesError::new(path, problem))
}

/// The file's text, or `None` if there is no such file.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, ModelFilesError> {
    let bytes = read_capped(path, MAX_CONFIG_BYTES)?;
    bytes
        .map(String::from_utf8)
        .transpose()
        .map_err(|error| ModelFilesError::new(path, format!("is not UTF-8: {error}")))
}

/// The file's bytes, or `None` if there is no such file.
pub(crate) fn read_capped(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>, ModelFilesError> {
    let problem = |error: std::io::Error| ModelFilesError::new(path, error.to_string());
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(problem(error)),
    };
    let mut bytes = Vec::new();
    let read = file
        .take(max_bytes + 1)
        .read_to_end(&mut bytes)
        .map_err(problem)?;
    if read as u64 > max_bytes {
        let problem = format!("has more than the {max_bytes} bytes that are allowed");
        return Err(ModelFilesError::new(path, problem));
    }
    Ok(Some(bytes))
}
