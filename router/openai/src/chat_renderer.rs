//! `/v1/chat/completions` and `/v1/completions`.

use crate::choice_state::{ChoiceState, ResponseContext};
use crate::choices::Choices;
use crate::chunk_writer::ChunkWriter;
use crate::renderer::Renderer;
use crate::request::GenerateRequest;
use crate::response_body;
use crate::response_head::{Api, ChunkFrame, Head};

/// Chunks, or a body with all choices.
#[derive(Debug)]
pub(crate) struct ChatRenderer {
    api: Api,
    head: Head,
    /// `None` for one body.
    chunks: Option<ChunkWriter>,
    include_usage: bool,
}

impl ChatRenderer {
    pub(crate) fn new(request: &GenerateRequest) -> Self {
        let (api, head) = (Api::of(request), Head::new(request));
        let tells_usage = request.continuous_usage_stats;
        let null_usage = request.include_usage && !tells_usage;
        let chunks = request.stream.then(|| ChunkWriter {
            api,
            frame: ChunkFrame::new(&head, null_usage),
            tells_usage,
        });
        Self {
            api,
            head,
            chunks,
            include_usage: request.include_usage,
        }
    }
}

impl Renderer for ChatRenderer {
    fn is_stream(&self) -> bool {
        self.chunks.is_some()
    }

    fn write_news(
        &mut self,
        context: &ResponseContext,
        index: usize,
        choice: &mut ChoiceState,
        out: &mut Vec<u8>,
    ) {
        if let Some(chunks) = &self.chunks {
            chunks.write_delta(context, index, choice, out);
        }
    }

    fn write_choice_end(
        &mut self,
        context: &ResponseContext,
        index: usize,
        choice: &ChoiceState,
        out: &mut Vec<u8>,
    ) {
        if let Some(chunks) = &self.chunks {
            chunks.write_end(context, index, choice, out);
        }
    }

    fn write_end(&mut self, context: &ResponseContext, choices: &Choices, out: &mut Vec<u8>) {
        let usage = choices.counts(context).into();
        if self.chunks.is_none() {
            return response_body::write(context, self.api, &self.head, choices, usage, out);
        }
        if self.include_usage {
            out.extend_from_slice(b"data: ");
            response_body::write_usage(&self.head, usage, out);
            out.extend_from_slice(b"\n\n");
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}
