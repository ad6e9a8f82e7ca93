//! The parts of an answer's JSON that do not depend on its tokens.

use super::json::{write_str, write_u64};
use super::request::{GenerateRequest, Input};

/// Which of OpenAI's two APIs an answer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    Chat,
    Completion,
}

impl Api {
    fn object(self, stream: bool) -> &'static str {
        match (self, stream) {
            (Self::Chat, true) => "chat.completion.chunk",
            (Self::Chat, false) => "chat.completion",
            (Self::Completion, _) => "text_completion",
        }
    }
}

/// Tokens that an answer cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) num_prompt_tokens: u64,
    /// Those of them whose KV was in the prefix cache.
    pub(super) num_cached_tokens: u64,
    pub(super) num_completion_tokens: u64,
}

impl Usage {
    fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"prompt_tokens\":");
        write_u64(self.num_prompt_tokens, out);
        out.extend_from_slice(b",\"completion_tokens\":");
        write_u64(self.num_completion_tokens, out);
        out.extend_from_slice(b",\"total_tokens\":");
        write_u64(self.num_prompt_tokens + self.num_completion_tokens, out);
        out.extend_from_slice(b",\"prompt_tokens_details\":{\"cached_tokens\":");
        write_u64(self.num_cached_tokens, out);
        out.extend_from_slice(b"}}");
    }
}

/// What surrounds the choices of one answer, in each chunk or once.
#[derive(Debug)]
pub(super) struct Envelope {
    pub(super) api: Api,
    pub(super) stream: bool,
    include_usage: bool,
    /// Up to and with `"choices":[`.
    head: Vec<u8>,
}

impl Envelope {
    pub(super) fn new(request: &GenerateRequest) -> Self {
        let api = match request.input {
            Input::Chat { .. } => Api::Chat,
            Input::Completion { .. } => Api::Completion,
        };
        let mut head = b"{\"id\":".to_vec();
        write_str(&request.id, &mut head);
        head.extend_from_slice(b",\"object\":");
        write_str(api.object(request.stream), &mut head);
        head.extend_from_slice(b",\"created\":");
        write_u64(request.created, &mut head);
        head.extend_from_slice(b",\"model\":");
        write_str(&request.model, &mut head);
        head.extend_from_slice(b",\"choices\":[");
        Self {
            api,
            stream: request.stream,
            include_usage: request.include_usage,
            head,
        }
    }

    /// Begins a chunk with one choice; the caller goes on with the choice's fields.
    pub(super) fn begin_chunk(&self, choice: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(&self.head);
        self.begin_choice(choice, out);
    }

    /// Begins a choice.
    pub(super) fn begin_choice(&self, choice: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"index\":");
        write_u64(choice as u64, out);
        out.push(b',');
    }

    /// Ends a chunk; `extra` is a field of the chunk itself, with its comma.
    pub(super) fn end_chunk(&self, extra: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(b"}]");
        out.extend_from_slice(extra);
        if self.include_usage {
            out.extend_from_slice(b",\"usage\":null");
        }
        out.extend_from_slice(b"}\n\n");
    }

    /// Ends a stream, with the usage in a chunk of its own where it was asked for.
    pub(super) fn end_stream(&self, usage: Usage, out: &mut Vec<u8>) {
        if self.include_usage {
            out.extend_from_slice(b"data: ");
            out.extend_from_slice(&self.head);
            out.extend_from_slice(b"],\"usage\":");
            usage.write(out);
            out.extend_from_slice(b"}\n\n");
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// Begins a whole body; the caller goes on with the choices.
    pub(super) fn begin_body(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.head);
    }

    /// Ends a whole body.
    pub(super) fn end_body(&self, extra: &[u8], usage: Usage, out: &mut Vec<u8>) {
        out.extend_from_slice(b"],\"usage\":");
        usage.write(out);
        out.extend_from_slice(extra);
        out.push(b'}');
    }
}
