//! The APIs of `OpenAI` and Anthropic: requests on their way in, answers on their way out.
//!
//! [`prepare`] checks a [`GenerateRequest`] and turns it into what the scheduler takes and an
//! [`ResponseWriter`], which turns that request's tokens into the bytes that its client reads.

mod adjust;
mod answer_items;
mod answer_parts;
mod call_grammar;
mod chat_renderer;
mod choice_seed;
mod choice_state;
mod choices;
mod chunk_writer;
mod constraint;
mod embeddings_renderer;
mod error;
mod error_words;
mod json;
mod limits;
mod logprobs;
mod logprobs_budget;
mod messages_renderer;
mod prepare;
mod prompt_encoder;
mod renderer;
mod request;
mod response_body;
mod response_head;
mod response_writer;
mod responses_json;
mod responses_renderer;
mod text_argument;
mod text_calls;
mod tools;

pub use answer_parts::CallCounts;
pub use choice_state::Pushed;
pub use constraint::{AskedConstraint, ConstraintField, ConstraintValue, GrammarOutcome, Grammars};
pub use error::{ApiError, RequestError};
pub use logprobs::TokenLogprobs;
pub use logprobs_budget::LogprobsBudget;
pub use prepare::{Pooled, Prepared, PreparedChoice, PreparedPrompt, prepare};
pub use request::{
    ChoiceFields, ClientFields, EmbeddingFields, GenerateRequest, Input, LogitFields,
    MaxTokensField, OutputFields, Prompt, PromptFields, Protocol, StopFields, TruncationSide,
};
pub use response_writer::{ResponseState, ResponseWriter};
pub use text_calls::{TextCall, answer_text_call};
pub use tools::{ToolChoice, ToolFields, ToolMode};
