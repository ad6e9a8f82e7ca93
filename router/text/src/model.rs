//! What a model's files say about text.

use std::path::Path;
use std::sync::Arc;

use plait_core::TokenId;
use serde_json::{Map, Value, json};

use crate::catch_panic::catch_panic;
use crate::detokenise::{Detokeniser, TextStart, TextStyle};
use crate::error::ModelFilesError;
use crate::model_files::{ModelFacts, TemplateSources, read_template};
use crate::output_parser::{Parsing, ReasoningFormat, ToolFormat};
use crate::output_text::OutputText;
use crate::sampling::SamplingFields;
use crate::template::{Chat, ChatTemplate, RenderError, SpecialTokens};
use crate::text_encoder::{EncodeError, TextEncoder};
use crate::vocabulary::Vocabulary;
use crate::{gguf_model, hf_folder};

/// A normaliser may shorten a text before it becomes tokens, by less than this factor.
const NORMALISER_SHRINKS: usize = 4;

/// How a model writes thoughts and tool calls, if its template or a setting says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Formats {
    /// Thoughts.
    pub reasoning: Option<&'static ReasoningFormat>,
    /// Tool calls.
    pub tools: Option<&'static ToolFormat>,
}

/// Formats that go before the template's, perhaps none at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChosenFormats {
    /// `None`: the template's.
    pub reasoning: Option<Option<&'static ReasoningFormat>>,
    /// `None`: the template's.
    pub tools: Option<Option<&'static ToolFormat>>,
}

impl Formats {
    fn of_templates(sources: &TemplateSources) -> Self {
        let texts = [&sources.tool_use, &sources.default];
        let mut texts = texts.into_iter().flatten().map(String::as_str);
        Self {
            reasoning: texts.clone().find_map(ReasoningFormat::of_template),
            tools: texts.find_map(ToolFormat::of_template),
        }
    }
}

/// A model's text side: tokenizer, chat template, end tokens, defaults. Shared by all threads.
#[derive(Debug)]
pub struct ModelText {
    facts: ModelFacts,
    encoder: TextEncoder,
    vocabulary: Arc<Vocabulary>,
    eos_token_ids: Arc<[TokenId]>,
    template: Option<ChatTemplate>,
    formats: Formats,
    special: SpecialTokens,
    model_id: String,
}

impl ModelText {
    /// Reads a Hugging Face folder or a GGUF file.
    ///
    /// The name that clients use is `served_name`, else the folder's or file's name. Errors name
    /// the file and say what is wrong with it.
    pub fn load(path: &Path, served_name: Option<&str>) -> Result<Self, ModelFilesError> {
        catch_panic(|| Self::read(path, served_name)).unwrap_or_else(|| {
            let problem = "its tokenizer or template is broken, so that a library panicked; download it again";
            Err(ModelFilesError::new(path, problem))
        })
    }

    fn read(path: &Path, served_name: Option<&str>) -> Result<Self, ModelFilesError> {
        let files = if path.is_dir() {
            hf_folder::read(path)?
        } else {
            gguf_model::read(path)?
        };
        let problem = |problem| ModelFilesError::new(path, problem);
        let facts = files.facts;
        let vocabulary = Vocabulary::new(&files.tokenizer, facts.vocab_size).map_err(problem)?;
        let formats = Formats::of_templates(&files.templates);
        let template = chat_template(files.templates, &files.special).map_err(problem)?;
        Ok(Self {
            encoder: TextEncoder::new(files.tokenizer).map_err(problem)?,
            vocabulary: Arc::new(vocabulary),
            eos_token_ids: facts.eos_token_ids.clone().into(),
            template,
            formats,
            special: files.special,
            model_id: served_name.map_or_else(|| name_of(path), str::to_owned),
            facts,
        })
    }

    /// The model with the chat template in this file rather than its own.
    pub fn with_template_file(mut self, path: &Path) -> Result<Self, ModelFilesError> {
        let templates = TemplateSources {
            default: Some(read_template(path)?),
            tool_use: None,
        };
        self.formats = Formats::of_templates(&templates);
        self.template = chat_template(templates, &self.special)
            .map_err(|problem| ModelFilesError::new(path, problem))?;
        Ok(self)
    }

    /// The model with these formats of its answers rather than those that its template shows.
    #[must_use]
    pub fn with_formats(mut self, chosen: ChosenFormats) -> Self {
        self.formats = Formats {
            reasoning: chosen.reasoning.unwrap_or(self.formats.reasoning),
            tools: chosen.tools.unwrap_or(self.formats.tools),
        };
        self
    }

    /// The model with the sampling defaults of this folder's generation_config.json rather than its own.
    pub fn with_generation_folder(mut self, folder: &Path) -> Result<Self, ModelFilesError> {
        self.facts.defaults = hf_folder::generation_defaults(folder)?;
        Ok(self)
    }

    /// The model with these sampling defaults rather than its own.
    #[must_use]
    pub fn with_generation_defaults(mut self, defaults: SamplingFields) -> Self {
        self.facts.defaults = defaults;
        self
    }

    /// How the model writes thoughts and tool calls.
    pub fn formats(&self) -> Formats {
        self.formats
    }

    /// The model with these variables for its chat template, which a chat's own replace.
    #[must_use]
    pub fn with_template_kwargs(mut self, kwargs: Map<String, Value>) -> Self {
        if let Some(template) = &mut self.template {
            template.set_kwargs(kwargs);
        }
        self
    }

    /// The name that clients use.
    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    /// The family's name, such as `llama`.
    pub fn architecture(&self) -> &'static str {
        &self.facts.family.name
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
    pub fn eos_token_ids(&self) -> &Arc<[TokenId]> {
        &self.eos_token_ids
    }

    /// How the model's authors want it sampled.
    pub fn generation_defaults(&self) -> &SamplingFields {
        &self.facts.defaults
    }

    /// Whether chats can be served.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// The chat template's text, as it is used.
    pub fn template_source(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::source)
    }

    /// The texts of the tokens that the tokenizer's files call special, by the names that templates have for them.
    pub fn special_tokens(&self) -> [(&'static str, Option<&str>); 4] {
        self.special.named()
    }

    /// A token as its vocabulary writes it; empty for an id that only fills the model's tables.
    pub fn token_name(&self, id: TokenId) -> String {
        self.encoder.tokenizer().id_to_token(id).unwrap_or_default()
    }

    /// Every token's bytes.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// A chat's prompt, of at most `max_bytes`.
    pub fn render(&self, chat: Chat<'_>, max_bytes: usize) -> Result<String, RenderError> {
        let template = self.template.as_ref().ok_or(RenderError::NoTemplate)?;
        template.render(chat, max_bytes)
    }

    /// The most bytes of a text whose tokens may fit into the context.
    pub fn max_prompt_bytes(&self, max_model_len: u32) -> usize {
        let shrinks = match self.encoder.tokenizer().get_normalizer() {
            Some(_) => NORMALISER_SHRINKS,
            None => 1,
        };
        (max_model_len as usize)
            .saturating_mul(self.vocabulary.longest_piece())
            .saturating_mul(shrinks)
    }

    /// Turns one output's tokens into text, and finds thoughts and calls in it.
    pub fn output_text(&self, style: TextStyle, parsing: Parsing) -> OutputText {
        OutputText::new(&self.vocabulary, style, parsing)
    }

    /// The text of these tokens, special ones too.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let style = TextStyle {
            skips_special: false,
            ..TextStyle::plain(TextStart::Fresh)
        };
        let mut detokeniser = Detokeniser::new(&self.vocabulary, style);
        let mut text = String::new();
        for token in tokens {
            detokeniser.push(&self.vocabulary, *token, &mut text);
        }
        detokeniser.finish(&self.vocabulary, &mut text);
        text
    }

    /// The tokenizer's own tokens before and after a text.
    pub fn special_frame(&self) -> &[Vec<TokenId>; 2] {
        self.encoder.frame()
    }

    /// A text's tokens, if they are at most `max_tokens`. `add_special_tokens` puts the tokenizer's own tokens
    /// around them.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        max_tokens: usize,
    ) -> Result<Vec<TokenId>, EncodeError> {
        catch_panic(|| self.encoder.encode(text, add_special_tokens, max_tokens))
            .unwrap_or_else(|| Err(EncodeError::Failed("the tokenizer panicked".to_owned())))
    }

    /// JSON: `{model_id, architecture, max_model_len, vocab_size, eos_token_ids,
    /// generation_defaults}`.
    pub fn describe(&self, max_model_len: u32) -> String {
        json!({
            "model_id": self.model_id,
            "architecture": self.architecture(),
            "max_model_len": max_model_len,
            "vocab_size": self.facts.vocab_size,
            "eos_token_ids": self.eos_token_ids[..],
            "generation_defaults": self.facts.defaults,
        })
        .to_string()
    }
}

fn chat_template(
    sources: TemplateSources,
    special: &SpecialTokens,
) -> Result<Option<ChatTemplate>, String> {
    let Some(default) = sources.default else {
        return Ok(None);
    };
    let template = ChatTemplate::new(&default, special.clone())?;
    match sources.tool_use {
        None => Ok(Some(template)),
        Some(source) => template.with_tools_template(&source).map(Some),
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
