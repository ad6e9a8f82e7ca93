//! Server-sent events: what a choice has to say since the last one.

use plait_core::TokenId;
use serde::Serialize;

use crate::answer_parts::CallPiece;
use crate::choice_state::{ChoiceState, FinishWord, ResponseContext, StopReason};
use crate::json::append;
use crate::logprobs::{ChatLogprobs, CompletionLogprobs};
use crate::response_head::{Api, ChunkFrame, Usage};

/// A chunk's choice in chat.
#[derive(Debug, Default, Serialize)]
struct ChatChunk<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<FinishWord>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [TokenId]>,
}

#[derive(Debug, Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    /// vLLM's newer name.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
    /// The older name of a message's only call.
    #[serde(skip_serializing_if = "Option::is_none")]
    function_call: Option<FunctionDelta<'a>>,
}

/// News of one call: its id, type and name first, then pieces of its arguments.
#[derive(Debug, Serialize)]
struct CallDelta<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Debug, Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

/// A chunk's choice in completions.
#[derive(Debug, Default, Serialize)]
struct CompletionChunk<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<CompletionLogprobs<'a>>,
    finish_reason: Option<FinishWord>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason<'a>>,
    /// In the choice's first chunk; in chat they are a field of the role's chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [TokenId]>,
}

/// Writes the chunks of one stream.
#[derive(Debug)]
pub(crate) struct ChunkWriter {
    pub(crate) api: Api,
    pub(crate) frame: ChunkFrame,
    /// Each chunk says what its choice has cost so far.
    pub(crate) tells_usage: bool,
}

impl ChunkWriter {
    /// Appends a chunk with the choice's news, if there are any; in chat the role comes first.
    pub(crate) fn write_delta(
        &self,
        context: &ResponseContext,
        index: usize,
        choice: &mut ChoiceState,
        out: &mut Vec<u8>,
    ) {
        if self.api == Api::Chat && !choice.has_first_chunk {
            self.write_role(context, index, choice, out);
            choice.has_first_chunk = true;
        }
        if let Some(echo) = choice.echo.take() {
            choice.unsent.text.insert_str(0, &echo);
        }
        if !choice.unsent.is_empty() {
            match self.api {
                Api::Chat => self.write_chat_parts(context, index, choice, out),
                Api::Completion => self.write_completion_text(context, index, choice, out),
            }
            choice.has_first_chunk = true;
            choice.unsent.clear();
        }
    }

    /// Appends the chunk that says why the choice ended.
    pub(crate) fn write_end(
        &self,
        context: &ResponseContext,
        index: usize,
        choice: &ChoiceState,
        out: &mut Vec<u8>,
    ) {
        let finish_reason = choice.finish_word(context);
        let stop_reason = Some(choice.stop_reason(context));
        let token_ids = choice.token_ids(context);
        let usage = self.usage_of(context, choice);
        match self.api {
            Api::Chat => {
                let chunk = ChatChunk {
                    index,
                    finish_reason,
                    stop_reason,
                    token_ids,
                    ..ChatChunk::default()
                };
                self.append(&chunk, usage, out);
            }
            Api::Completion => {
                let chunk = CompletionChunk {
                    index,
                    finish_reason,
                    stop_reason,
                    prompt_token_ids: first_prompt_token_ids(context, choice),
                    token_ids,
                    ..CompletionChunk::default()
                };
                self.append(&chunk, usage, out);
            }
        }
    }

    fn write_role(
        &self,
        context: &ResponseContext,
        index: usize,
        choice: &ChoiceState,
        out: &mut Vec<u8>,
    ) {
        let chunk = ChatChunk {
            index,
            delta: Delta {
                role: Some("assistant"),
                content: Some(""),
                ..Delta::default()
            },
            ..ChatChunk::default()
        };
        let write_fields = |out: &mut Vec<u8>| {
            if let Some(ids) = choice.prompt_token_ids(context) {
                out.extend_from_slice(b",\"prompt_token_ids\":");
                append(&ids, out);
            }
            write_usage(self.usage_of(context, choice), out);
        };
        self.frame.append_with(&chunk, write_fields, out);
    }

    /// What the choice has cost so far, if chunks say it.
    fn usage_of(&self, context: &ResponseContext, choice: &ChoiceState) -> Option<Usage> {
        self.tells_usage.then(|| choice.counts(context).into())
    }

    fn append(&self, chunk: &impl Serialize, usage: Option<Usage>, out: &mut Vec<u8>) {
        let write_fields = |out: &mut Vec<u8>| write_usage(usage, out);
        self.frame.append_with(chunk, write_fields, out);
    }

    fn write_chat_parts(
        &self,
        context: &ResponseContext,
        index: usize,
        choice: &ChoiceState,
        out: &mut Vec<u8>,
    ) {
        if !choice.unsent.has_no_text() {
            self.write_chat_text(context, index, choice, out);
        }
        for call in &choice.unsent.calls {
            self.write_call(context, (index, choice), call, out);
        }
    }

    /// The call's head in a chunk of its own, then what is new of its arguments.
    fn write_call(
        &self,
        context: &ResponseContext,
        (index, choice): (usize, &ChoiceState),
        call: &CallPiece,
        out: &mut Vec<u8>,
    ) {
        let arguments = Some(call.arguments.as_str()).filter(|piece| !piece.is_empty());
        let head = call.head.as_ref().map(|head| (Some(head), ""));
        for (head, arguments) in head.into_iter().chain(arguments.map(|piece| (None, piece))) {
            let function = FunctionDelta {
                name: head.map(|head| head.name.as_str()),
                arguments,
            };
            let delta = match context.calls.are_functions {
                true => Delta {
                    function_call: Some(function),
                    ..Delta::default()
                },
                false => Delta {
                    tool_calls: Some([CallDelta {
                        index: call.index,
                        id: head.map(|head| head.id.as_str()),
                        kind: head.map(|_| "function"),
                        function,
                    }]),
                    ..Delta::default()
                },
            };
            let chunk = ChatChunk {
                index,
                delta,
                ..ChatChunk::default()
            };
            self.append(&chunk, self.usage_of(context, choice), out);
        }
    }

    fn write_chat_text(
        &self,
        context: &ResponseContext,
        index: usize,
        choice: &ChoiceState,
        out: &mut Vec<u8>,
    ) {
        let parts = &choice.unsent;
        let thought = Some(parts.thought.as_str()).filter(|thought| !thought.is_empty());
        let is_silent = parts.text.is_empty() && (thought.is_some() || !parts.calls.is_empty());
        let chunk = ChatChunk {
            index,
            delta: Delta {
                content: Some(parts.text.as_str()).filter(|_| !is_silent),
                reasoning_content: thought,
                reasoning: thought,
                ..Delta::default()
            },
            logprobs: ChatLogprobs::of(context.names(), &choice.unsent.scored),
            token_ids: choice.token_ids(context),
            ..ChatChunk::default()
        };
        self.append(&chunk, self.usage_of(context, choice), out);
    }

    fn write_completion_text(
        &self,
        context: &ResponseContext,
        index: usize,
        choice: &mut ChoiceState,
        out: &mut Vec<u8>,
    ) {
        let usage = self.usage_of(context, choice);
        let scored = &choice.unsent.scored;
        let num_chars = &mut choice.num_scored_chars;
        let logprobs = CompletionLogprobs::of(context.names(), scored, num_chars);
        let chunk = CompletionChunk {
            index,
            text: &choice.unsent.text,
            logprobs,
            prompt_token_ids: first_prompt_token_ids(context, choice),
            token_ids: choice.token_ids(context),
            ..CompletionChunk::default()
        };
        self.append(&chunk, usage, out);
    }
}

fn write_usage(usage: Option<Usage>, out: &mut Vec<u8>) {
    if let Some(usage) = usage {
        out.extend_from_slice(b",\"usage\":");
        append(&usage, out);
    }
}

fn first_prompt_token_ids<'a>(
    context: &ResponseContext,
    choice: &'a ChoiceState,
) -> Option<&'a [TokenId]> {
    let is_first = !choice.has_first_chunk;
    choice.prompt_token_ids(context).filter(|_| is_first)
}
