//! What an answer's chunks and bodies have alike: ids, name, time and usage.

use serde::Serialize;

use crate::json::append;
use crate::request::{GenerateRequest, Input};

/// Which of OpenAI's two APIs an answer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completion,
}

impl Api {
    pub(crate) fn of(request: &GenerateRequest) -> Self {
        match request.input {
            Input::Chat { .. } => Self::Chat,
            Input::Completion { .. } => Self::Completion,
        }
    }

    fn object(self, stream: bool) -> &'static str {
        match (self, stream) {
            (Self::Chat, true) => "chat.completion.chunk",
            (Self::Chat, false) => "chat.completion",
            (Self::Completion, _) => "text_completion",
        }
    }
}

/// The fields before `choices`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Head {
    pub(crate) fn new(request: &GenerateRequest) -> Self {
        Self {
            id: request.id.clone(),
            object: Api::of(request).object(request.stream),
            created: request.created,
            model: request.model.clone(),
        }
    }
}

/// Tokens that an answer cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    pub(crate) num_prompt: u64,
    /// Tokens of the prompt that the prefix cache had. None for a client that may not know: it tells what others have
    /// asked.
    pub(crate) num_cached: Option<u64>,
    pub(crate) num_output: u64,
    /// Tokens within thoughts, without their markers, where thoughts are told apart.
    pub(crate) num_thought: Option<u64>,
}

/// The same as chats and completions have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<PromptTokensDetails>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionTokensDetails>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct CompletionTokensDetails {
    reasoning_tokens: u64,
}

impl From<TokenCounts> for Usage {
    fn from(counts: TokenCounts) -> Self {
        let cached = |cached_tokens| PromptTokensDetails { cached_tokens };
        let thought = |reasoning_tokens| CompletionTokensDetails { reasoning_tokens };
        Self {
            prompt_tokens: counts.num_prompt,
            completion_tokens: counts.num_output,
            total_tokens: counts.num_prompt + counts.num_output,
            prompt_tokens_details: counts.num_cached.map(cached),
            completion_tokens_details: counts.num_thought.map(thought),
        }
    }
}

/// The bytes around the choice of each chunk, rendered once a stream.
#[derive(Debug)]
pub(crate) struct ChunkFrame {
    /// `data: {...,"choices":[`
    start: Vec<u8>,
    /// Closes the chunk; a chunk's own fields come before it.
    end: &'static [u8],
}

impl ChunkFrame {
    /// `null_usage`: each chunk has a usage of null, as a stream has whose last chunk says it.
    pub(crate) fn new(head: &Head, null_usage: bool) -> Self {
        let mut start = b"data: ".to_vec();
        append(head, &mut start);
        start.pop();
        start.extend_from_slice(b",\"choices\":[");
        let end: &[u8] = match null_usage {
            true => b",\"usage\":null}\n\n",
            false => b"}\n\n",
        };
        Self { start, end }
    }

    /// Appends a chunk of one choice; `write_field` may append a field of the chunk itself, with its comma.
    pub(crate) fn append_with(
        &self,
        choice: &impl Serialize,
        write_field: impl FnOnce(&mut Vec<u8>),
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(&self.start);
        append(choice, out);
        out.push(b']');
        write_field(out);
        out.extend_from_slice(self.end);
    }
}
