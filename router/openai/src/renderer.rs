//! The seam between a choice's text, thoughts and calls, and the bytes of the API that its client speaks.

use std::fmt::Debug;

use crate::chat_renderer::ChatRenderer;
use crate::choice_state::{ChoiceState, ResponseContext};
use crate::choices::Choices;
use crate::embeddings_renderer::EmbeddingsRenderer;
use crate::error::ApiError;
use crate::messages_renderer::MessagesRenderer;
use crate::request::{GenerateRequest, Input, Protocol};
use crate::responses_renderer::ResponsesRenderer;

/// Writes one answer as its API has it: events of a stream, or one body.
pub(crate) trait Renderer: Debug + Send {
    /// Whether the answer is a stream.
    fn is_stream(&self) -> bool;

    /// Appends what a choice's client was not sent, and clears it. A body leaves it for its end.
    fn write_news(
        &mut self,
        context: &ResponseContext,
        index: usize,
        choice: &mut ChoiceState,
        out: &mut Vec<u8>,
    );

    /// Appends what a stream says when a choice has ended, after its last news.
    fn write_choice_end(
        &mut self,
        context: &ResponseContext,
        index: usize,
        choice: &ChoiceState,
        out: &mut Vec<u8>,
    );

    /// Appends the body, or a stream's last events; every choice has ended.
    fn write_end(&mut self, context: &ResponseContext, choices: &Choices, out: &mut Vec<u8>);

    /// Appends a stream's last event, which says that it failed. False: nothing is written, and the error is told by
    /// its status, or in OpenAI's form if the stream has begun.
    fn write_failure(&mut self, _error: &ApiError, _out: &mut Vec<u8>) -> bool {
        false
    }
}

/// The renderer of the API that a request came by.
pub(crate) fn renderer_of(request: &GenerateRequest) -> Box<dyn Renderer> {
    if let Some(fields) = request.report.embedding {
        return Box::new(EmbeddingsRenderer::new(request, fields));
    }
    match &request.input {
        Input::Chat {
            protocol: Protocol::Responses { fields },
            ..
        } => Box::new(ResponsesRenderer::new(request, fields)),
        Input::Chat {
            protocol: Protocol::Messages,
            ..
        } => Box::new(MessagesRenderer::new(request)),
        Input::Chat { .. } | Input::Completion { .. } => Box::new(ChatRenderer::new(request)),
    }
}
