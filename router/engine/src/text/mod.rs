//! Text on its way in (template, tokens) and on its way out (detokenising, stop strings, JSON).
//!
//! [`ModelText`] holds what a model's files say about text and is shared by all threads.
//! [`ModelText::prepare`] turns a request into what the scheduler takes and a [`StreamText`],
//! which then turns that request's tokens into the bytes that its client reads.

mod architecture;
mod body;
mod catch_panic;
mod choice;
mod chunk;
mod detokenise;
mod envelope;
mod error;
mod fields;
mod folder;
mod gguf;
mod gguf_model;
mod gguf_tokenizer;
mod json;
mod logprobs;
mod model;
mod post_processor;
mod prepare;
mod python_json;
mod request;
mod stop;
mod stream;
mod template;
mod vocabulary;

pub use error::{ApiError, ModelFilesError, RequestError};
pub use logprobs::TokenLogprobs;
pub use model::{GenerationDefaults, ModelText};
pub use request::{
    EndFields, GenerateRequest, Input, Prepared, Prompt, ReportFields, SamplingFields,
};
pub use stream::{Pushed, StreamState, StreamText};
