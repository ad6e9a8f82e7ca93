//! OpenAI's API: requests on their way in, answers on their way out.
//!
//! [`prepare`] checks a [`GenerateRequest`] and turns it into what the scheduler takes and an
//! [`AnswerStream`], which turns that request's tokens into the bytes that its client reads.

mod body;
mod choice_state;
mod chunk;
mod error;
mod head;
mod json;
mod limits;
mod logprobs;
mod prepare;
mod request;
mod stream;

pub use choice_state::Pushed;
pub use error::{ApiError, RequestError};
pub use logprobs::TokenLogprobs;
pub use prepare::{Prepared, PreparedChoice, prepare};
pub use request::{
    ClientFields, EndFields, GenerateRequest, Input, MaxTokensField, Prompt, ReportFields,
};
pub use stream::{AnswerStream, StreamState};
