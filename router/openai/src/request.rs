//! What the HTTP server hands over.
//!
//! Numbers have 64 bits, wider than any field: `limits.rs` then names the field's own range.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use plait_proto::Pooling;
use plait_text::SamplingFields;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::constraint::ConstraintField;
use crate::tools::ToolFields;

/// One call of the API: the mirror of `plait.http.api.GenerateRequest`.
///
/// `None` means "not given": the model's generation defaults decide, then OpenAI's.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct GenerateRequest {
    /// Repeated in every chunk.
    pub id: String,
    /// Seconds since the epoch.
    pub created: u64,
    /// The name to repeat in the answer.
    pub model: String,
    /// Server-sent events rather than one body.
    pub stream: bool,
    /// A last chunk with the usage (streams); whole answers always have it.
    pub include_usage: bool,
    /// Each chunk says what its choice has cost so far.
    #[serde(default)]
    pub continuous_usage_stats: bool,
    /// The usage says how many prompt tokens the prefix cache had.
    #[serde(default)]
    pub prompt_tokens_details: bool,
    /// What to answer.
    #[serde(flatten)]
    pub input: Input,
    /// How many answers each prompt gets.
    #[serde(flatten)]
    pub choices: ChoiceFields,
    /// How it becomes tokens.
    #[serde(flatten)]
    pub prompt: PromptFields,
    /// How tokens are sampled.
    #[serde(default)]
    pub sampling: SamplingFields,
    /// What it changes about the logits.
    #[serde(flatten)]
    pub logits: LogitFields,
    /// When the answer ends.
    #[serde(flatten)]
    pub end: StopFields,
    /// What the answer has besides text.
    #[serde(flatten)]
    pub report: OutputFields,
    /// Who asks.
    #[serde(flatten)]
    pub client: ClientFields,
}

/// What is to be answered or continued.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[expect(
    clippy::large_enum_variant,
    reason = "a request has one, and most are chats"
)]
pub enum Input {
    /// `/v1/chat/completions`.
    Chat {
        /// At least one, as the template wants them.
        messages: Vec<Map<String, Value>>,
        /// More variables for the template.
        #[serde(default)]
        chat_template_kwargs: Map<String, Value>,
        /// End the prompt where the assistant's turn begins.
        #[serde(default = "default_true")]
        add_generation_prompt: bool,
        /// Leave the last message open, so that the answer continues it.
        #[serde(default)]
        continue_final_message: bool,
        /// How much the model should think.
        #[serde(default)]
        reasoning_effort: Option<String>,
        /// Texts for templates that know them.
        #[serde(default)]
        documents: Vec<Value>,
        /// What the model may call.
        #[serde(flatten)]
        tools: ToolFields,
        /// How the answer is written.
        #[serde(default)]
        protocol: Protocol,
    },
    /// `/v1/completions`.
    Completion {
        /// At least one. The choices of the first come first, then those of the others.
        prompts: Vec<Prompt>,
        /// The answer begins with the prompt, its log-probabilities with the prompt's.
        #[serde(default)]
        echo: bool,
    },
}

impl Input {
    /// Whether the answer begins with the prompt.
    pub(crate) fn is_echoed(&self) -> bool {
        matches!(self, Self::Completion { echo: true, .. })
    }
}

/// The API that a chat came by.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Protocol {
    /// `/v1/chat/completions`.
    #[default]
    Chat,
    /// `/v1/responses`.
    Responses {
        /// A JSON object: what the answer repeats of the request.
        #[serde(default)]
        fields: String,
    },
    /// Anthropic's `/v1/messages`.
    Messages,
}

/// The answers to a prompt.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct ChoiceFields {
    /// How many; 1 if it is not given.
    pub n: Option<i64>,
    /// What they draw from: the bits of a 64-bit integer, random if it is not given.
    pub seed: Option<i64>,
}

/// How a prompt becomes tokens.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct PromptFields {
    /// Put the tokenizer's own tokens around a text. By default completions have them; a chat's template writes them.
    pub add_special_tokens: Option<bool>,
    /// Keep so many tokens at most; -1: as many as the context has room for.
    pub truncate_prompt_tokens: Option<i64>,
    /// Which ones go.
    pub truncation_side: TruncationSide,
}

/// Where a prompt is cut.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum TruncationSide {
    /// The first tokens go.
    #[default]
    Left,
    /// The last tokens go.
    Right,
}

/// One prompt of `/v1/completions`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(untagged)]
pub enum Prompt {
    /// Text, to be tokenised with the tokenizer's own special tokens around it.
    Text(String),
    /// Token ids, as the client wrote them.
    Tokens(Vec<i64>),
}

/// What a request changes about its logits, penalties apart.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct LogitFields {
    /// Added to tokens, by their ids in decimal.
    pub logit_bias: BTreeMap<String, f64>,
    /// The only tokens that may be sampled.
    pub allowed_token_ids: Option<Vec<i64>>,
    /// Texts that the answer may not have.
    pub bad_words: Vec<String>,
    /// Tokens whose log-probabilities come with each output token, if any do.
    pub logprob_token_ids: Vec<i64>,
    /// What the answer must be.
    pub constraint: Option<ConstraintField>,
    /// So many tokens may a chat's thought have.
    pub thinking_token_budget: Option<i64>,
}

/// When the answer ends.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct StopFields {
    /// Chat fills the context by default, a completion has 16. With 0 a completion's prompt is computed and nothing
    /// else.
    pub max_tokens: Option<i64>,
    /// The name under which the client gave it.
    pub max_tokens_field: MaxTokensField,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<i64>,
    /// The model's own end tokens do not end the answer.
    pub ignore_eos: bool,
    /// Tokens before which nothing ends the answer.
    pub min_tokens: Option<i64>,
}

/// The API's two names for the most tokens of an answer.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum MaxTokensField {
    /// Both routes'.
    #[default]
    MaxTokens,
    /// `OpenAI`'s newer one, of chats only.
    MaxCompletionTokens,
}

impl MaxTokensField {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::MaxTokens => "max_tokens",
            Self::MaxCompletionTokens => "max_completion_tokens",
        }
    }
}

/// What the answer has besides text, and what of the tokens its text shows.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct OutputFields {
    /// Best tokens to list with each output token. 0: the token's own log-probability only.
    pub logprobs: Option<i64>,
    /// The same for each prompt token but the first.
    pub prompt_logprobs: Option<i64>,
    /// The ids of the prompt's and the answer's tokens.
    pub return_token_ids: bool,
    /// In log-probabilities tokens are named by their ids.
    pub return_tokens_as_token_ids: bool,
    /// The text leaves special tokens out.
    pub skip_special_tokens: bool,
    /// The text ends with the stop string or stop token that ended it.
    pub include_stop_str_in_output: bool,
    /// The answer has the model's thoughts.
    pub include_reasoning: bool,
    /// The answer is a vector for each prompt.
    pub embedding: Option<EmbeddingFields>,
}

/// How a prompt's vector is made and told.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct EmbeddingFields {
    /// From the hidden states of its tokens.
    pub pooling: Pooling,
    /// Leading elements that are kept, before its length becomes 1.
    pub dimensions: Option<i64>,
    /// In base64, as little-endian f32.
    pub is_base64: bool,
}

impl Default for OutputFields {
    fn default() -> Self {
        Self {
            logprobs: None,
            prompt_logprobs: None,
            return_token_ids: false,
            return_tokens_as_token_ids: false,
            skip_special_tokens: true,
            include_stop_str_in_output: false,
            include_reasoning: true,
            embedding: None,
        }
    }
}

/// Who asks, in numbers that the front door draws.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
pub struct ClientFields {
    /// Smaller goes first; needs a policy that looks at it.
    pub priority: i64,
    /// Whose share its tokens count against.
    pub tenant: u64,
    /// The tenant's share against others'; None is 1.
    pub weight: Option<NonZeroU32>,
    /// Requests of different salts share no cached pages.
    pub salt: u64,
}

fn default_true() -> bool {
    true
}
