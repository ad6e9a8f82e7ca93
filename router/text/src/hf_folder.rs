//! Text files of a Hugging Face folder.

use std::path::Path;

use plait_core::TokenId;
use plait_proto::Family;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::error::ModelFilesError;
use crate::model_files::{
    MAX_CONFIG_BYTES, ModelFacts, TemplateSources, TextFiles, read_capped, read_text,
};
use crate::post_processor::add_bos_and_eos;
use crate::sampling::{OutOfRange, SamplingFields};
use crate::template::SpecialTokens;

const GENERATION_CONFIG: &str = "generation_config.json";
/// For folders of DeepSeek-V4 without a template: none is published.
const DEEPSEEK_V4_TEMPLATE: &str = include_str!("deepseek_v4.jinja");
/// Largest tokenizer.json that is read, in bytes (Gemma's has 33 MB).
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// What we read of a config.json.
#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: u32,
    max_position_embeddings: u32,
    #[serde(default)]
    eos_token_id: TokenIds,
    /// The older name of `rope_parameters`.
    #[serde(default)]
    rope_scaling: Value,
    #[serde(default)]
    rope_parameters: Value,
}

/// What we read of a generation_config.json.
#[derive(Default, Deserialize)]
#[serde(default)]
struct GenerationConfig {
    eos_token_id: TokenIds,
    do_sample: Option<bool>,
    #[serde(flatten)]
    sampling: SamplingFields,
}

/// What we read of a tokenizer_config.json.
#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenizerConfig {
    bos_token: Option<AddedText>,
    eos_token: Option<AddedText>,
    pad_token: Option<AddedText>,
    unk_token: Option<AddedText>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    chat_template: Option<Templates>,
}

/// One id, several, or none.
#[derive(Clone, Default, Deserialize)]
#[serde(untagged)]
enum TokenIds {
    #[default]
    None,
    One(TokenId),
    Several(Vec<TokenId>),
}

/// A special token, alone or in the form that keeps its flags.
#[derive(Deserialize)]
#[serde(untagged)]
enum AddedText {
    Plain(String),
    Flagged { content: String },
}

/// A chat template, alone or several by name.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// Reads everything about text in the folder.
pub(crate) fn read(folder: &Path) -> Result<TextFiles, ModelFilesError> {
    let config: Config = read_json(folder, "config.json")?;
    let generation: GenerationConfig = read_optional_json(folder, GENERATION_CONFIG)?;
    let settings: TokenizerConfig = read_optional_json(folder, "tokenizer_config.json")?;
    let tokenizer = read_tokenizer(folder, &settings)?;
    let class = config.architectures.first().map_or("none", String::as_str);
    let family = Family::of_architecture(class)
        .map_err(|problem| ModelFilesError::new(folder.join("config.json"), problem))?;
    let facts = ModelFacts {
        family,
        context_length: config.context_length(),
        vocab_size: config.vocab_size,
        eos_token_ids: end_tokens(&config, &generation, &settings, &tokenizer),
        defaults: generation
            .defaults()
            .map_err(|problem| ModelFilesError::new(folder.join(GENERATION_CONFIG), problem))?,
    };
    let mut templates = read_templates(folder, settings.chat_template)?;
    if templates.default.is_none() && family.name == "deepseek_v4" {
        templates.default = Some(DEEPSEEK_V4_TEMPLATE.to_owned());
    }
    Ok(TextFiles {
        facts,
        tokenizer,
        special: SpecialTokens {
            bos: settings.bos_token.map(AddedText::content),
            eos: settings.eos_token.map(AddedText::content),
            pad: settings.pad_token.map(AddedText::content),
            unk: settings.unk_token.map(AddedText::content),
        },
        templates,
    })
}

/// The sampling defaults of the folder's generation_config.json, which must be there.
pub(crate) fn generation_defaults(folder: &Path) -> Result<SamplingFields, ModelFilesError> {
    let generation: GenerationConfig = read_json(folder, GENERATION_CONFIG)?;
    generation
        .defaults()
        .map_err(|problem| ModelFilesError::new(folder.join(GENERATION_CONFIG), problem))
}

/// The folder's files, and what the tokenizer's configuration has for those that are not there.
fn read_templates(
    folder: &Path,
    configured: Option<Templates>,
) -> Result<TemplateSources, ModelFilesError> {
    let default = read_text(&folder.join("chat_template.jinja"))?;
    let tool_use = read_text(&folder.join("additional_chat_templates/tool_use.jinja"))?;
    let mut configured = configured.map(Templates::sources).unwrap_or_default();
    if default.is_some() && tool_use.is_none() {
        configured.tool_use = None;
    }
    Ok(TemplateSources {
        default: default.or(configured.default),
        tool_use: tool_use.or(configured.tool_use),
    })
}

/// The generation config's end tokens, else the config's; always the tokenizer's own too.
fn end_tokens(
    config: &Config,
    generation: &GenerationConfig,
    settings: &TokenizerConfig,
    tokenizer: &Tokenizer,
) -> Vec<TokenId> {
    let mut ids = generation.eos_token_id.to_vec();
    if ids.is_empty() {
        ids = config.eos_token_id.to_vec();
    }
    let text = settings.eos_token.as_ref().map(AddedText::as_str);
    let own = text.and_then(|text| tokenizer.token_to_id(text));
    ids.extend(own.filter(|id| !ids.contains(id)));
    ids
}

fn read_tokenizer(folder: &Path, settings: &TokenizerConfig) -> Result<Tokenizer, ModelFilesError> {
    let path = folder.join("tokenizer.json");
    let problem = |problem: String| ModelFilesError::new(&path, problem);
    let bytes = read_capped(&path, MAX_TOKENIZER_BYTES)?
        .ok_or_else(|| problem("is missing; the folder needs one".to_owned()))?;
    let mut tokenizer = Tokenizer::from_bytes(bytes)
        .map_err(|error| problem(format!("is not a tokenizer: {error}")))?;
    // Prompts are neither truncated nor padded: their length is checked as a whole.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .map_err(|error| problem(error.to_string()))?;
    let token = |text: &Option<AddedText>, add: Option<bool>| {
        let text = text.as_ref().filter(|_| add == Some(true))?.as_str();
        Some((text.to_owned(), tokenizer.token_to_id(text)?))
    };
    if settings.add_bos_token.is_some() || settings.add_eos_token.is_some() {
        let bos = token(&settings.bos_token, settings.add_bos_token);
        let eos = token(&settings.eos_token, settings.add_eos_token);
        add_bos_and_eos(&mut tokenizer, bos, eos).map_err(problem)?;
    }
    Ok(tokenizer)
}

impl Config {
    /// Positions that the model was made for; `YaRN` stretches them if the configuration says so.
    fn context_length(&self) -> u32 {
        let stretched = [&self.rope_parameters, &self.rope_scaling]
            .into_iter()
            .find_map(yarn_context_length);
        self.max_position_embeddings.max(stretched.unwrap_or(0))
    }
}

/// Original length times factor, if these parameters are `YaRN`'s.
fn yarn_context_length(rope: &Value) -> Option<u32> {
    let kind = rope["rope_type"].as_str().or(rope["type"].as_str())?;
    let original = rope["original_max_position_embeddings"].as_f64()?;
    let length = original * rope["factor"].as_f64()?;
    let is_length = kind == "yarn" && (1.0..=f64::from(u32::MAX)).contains(&length);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "in range"
    )]
    is_length.then_some(length as u32)
}

impl GenerationConfig {
    /// The defaults. The API's ranges hold for them too; the error names the field.
    fn defaults(&self) -> Result<SamplingFields, String> {
        let mut sampling = self.sampling;
        if self.do_sample == Some(false) {
            sampling.temperature = Some(0.0);
        }
        sampling.check().map_err(|error| {
            let OutOfRange {
                field,
                given,
                allowed,
            } = error;
            format!("{field} is {given}, where {allowed} is allowed; correct it or leave it out")
        })?;
        Ok(sampling)
    }
}

impl TokenIds {
    fn to_vec(&self) -> Vec<TokenId> {
        match self {
            Self::None => Vec::new(),
            Self::One(id) => vec![*id],
            Self::Several(ids) => ids.clone(),
        }
    }
}

impl AddedText {
    fn as_str(&self) -> &str {
        match self {
            Self::Plain(content) | Self::Flagged { content } => content,
        }
    }

    fn content(self) -> String {
        match self {
            Self::Plain(content) | Self::Flagged { content } => content,
        }
    }
}

impl Templates {
    fn sources(self) -> TemplateSources {
        match self {
            Self::One(template) => TemplateSources {
                default: Some(template),
                tool_use: None,
            },
            Self::Named(named) => {
                let mut sources = TemplateSources::default();
                for one in named {
                    match one.name.as_str() {
                        "default" => sources.default = Some(one.template),
                        "tool_use" => sources.tool_use = Some(one.template),
                        _ => {}
                    }
                }
                sources
            }
        }
    }
}

fn read_json<T: DeserializeOwned>(folder: &Path, name: &str) -> Result<T, ModelFilesError> {
    let path = folder.join(name);
    let bytes = read_capped(&path, MAX_CONFIG_BYTES)?
        .ok_or_else(|| ModelFilesError::new(&path, "is missing; the folder needs one"))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        let problem = format!(
            "cannot be read: {error}; the file is cut short or not the model's own: download it again"
        );
        ModelFilesError::new(&path, problem)
    })
}

fn read_optional_json<T: DeserializeOwned + Default>(
    folder: &Path,
    name: &str,
) -> Result<T, ModelFilesError> {
    if folder.join(name).exists() {
        read_json(folder, name)
    } else {
        Ok(T::default())
    }
}
