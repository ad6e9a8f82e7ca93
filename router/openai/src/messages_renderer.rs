//! Anthropic's `/v1/messages`: content blocks, one after another.

use plait_core::FinishReason;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::answer_items::{ItemEnd, ItemEvents, NewItem, OpenItem};
use crate::choice_state::{ChoiceState, ResponseContext, StopReason};
use crate::choices::Choices;
use crate::error::ApiError;
use crate::json::append;
use crate::renderer::Renderer;
use crate::request::GenerateRequest;
use crate::response_head::TokenCounts;

/// Writes one message.
#[derive(Debug)]
pub(crate) struct MessagesRenderer {
    id: String,
    model: String,
    is_stream: bool,
    has_begun: bool,
    open: OpenItem,
    blocks: Blocks,
}

/// The content so far; a stream keeps nothing of the blocks that it has sent.
#[derive(Debug, Default)]
struct Blocks {
    num_begun: usize,
    content: Vec<Block>,
    kind: BlockKind,
}

/// What the open block is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BlockKind {
    #[default]
    Text,
    Thinking,
    ToolUse,
}

/// A content block.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Thinking {
        thinking: String,
        /// Nothing is signed: earlier thoughts are taken as they come.
        signature: &'static str,
    },
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        #[serde(serialize_with = "as_object")]
        input: String,
    },
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum Delta<'a> {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: &'a str },
    #[serde(rename = "signature_delta")]
    Signature { signature: &'static str },
    #[serde(rename = "text_delta")]
    Text { text: &'a str },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: &'a str },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
    MessageStart { message: MessageJson<'a> },
    ContentBlockStart { index: usize, content_block: Block },
    ContentBlockDelta { index: usize, delta: Delta<'a> },
    ContentBlockStop { index: usize },
    MessageDelta { delta: Ending<'a>, usage: UsageJson },
    MessageStop,
}

#[derive(Serialize)]
struct MessageJson<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: &'a [Block],
    #[serde(flatten)]
    ending: Ending<'a>,
    usage: UsageJson,
}

#[derive(Clone, Copy, Default, Serialize)]
struct Ending<'a> {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
}

#[derive(Clone, Copy, Serialize)]
struct UsageJson {
    /// Without those that were cached.
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_read_input_tokens: u64,
    output_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_tokens_details: Option<OutputTokensDetails>,
}

#[derive(Clone, Copy, Serialize)]
struct OutputTokensDetails {
    thinking_tokens: u64,
}

impl From<TokenCounts> for UsageJson {
    fn from(counts: TokenCounts) -> Self {
        let num_cached = counts.num_cached.unwrap_or(0);
        Self {
            input_tokens: counts.num_prompt.saturating_sub(num_cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: num_cached,
            output_tokens: counts.num_output,
            output_tokens_details: counts
                .num_thought
                .map(|thinking_tokens| OutputTokensDetails { thinking_tokens }),
        }
    }
}

impl MessagesRenderer {
    pub(crate) fn new(request: &GenerateRequest) -> Self {
        Self {
            id: request.id.clone(),
            model: request.model.clone(),
            is_stream: request.stream,
            has_begun: false,
            open: OpenItem::None,
            blocks: Blocks::default(),
        }
    }

    fn message<'a>(&'a self, ending: Ending<'a>, counts: TokenCounts) -> MessageJson<'a> {
        MessageJson {
            id: &self.id,
            kind: "message",
            role: "assistant",
            model: &self.model,
            content: &self.blocks.content,
            ending,
            usage: counts.into(),
        }
    }

    fn begin(&mut self, context: &ResponseContext, choice: &ChoiceState, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.has_begun, true) {
            let counts = TokenCounts {
                num_output: 0,
                ..choice.counts(context)
            };
            let message = self.message(Ending::default(), counts);
            write_event("message_start", &Event::MessageStart { message }, out);
        }
    }
}

impl Renderer for MessagesRenderer {
    fn is_stream(&self) -> bool {
        self.is_stream
    }

    fn write_news(
        &mut self,
        context: &ResponseContext,
        _: usize,
        choice: &mut ChoiceState,
        out: &mut Vec<u8>,
    ) {
        if self.is_stream {
            self.begin(context, choice, out);
            let events = &mut Streamed(&mut self.blocks);
            self.open.take(&mut choice.unsent, events, out);
        } else {
            let events = &mut Collected(&mut self.blocks);
            self.open.take(&mut choice.unsent, events, out);
        }
    }

    fn write_choice_end(
        &mut self,
        _: &ResponseContext,
        _: usize,
        _: &ChoiceState,
        out: &mut Vec<u8>,
    ) {
        if self.is_stream {
            let events = &mut Streamed(&mut self.blocks);
            self.open.close(ItemEnd::Complete, events, out);
        }
    }

    fn write_end(&mut self, context: &ResponseContext, choices: &Choices, out: &mut Vec<u8>) {
        let counts = choices.counts(context);
        let ending = ending(context, choices.get(0));
        if !self.is_stream {
            return append(&self.message(ending, counts), out);
        }
        let delta = Event::MessageDelta {
            delta: ending,
            usage: counts.into(),
        };
        write_event("message_delta", &delta, out);
        write_event("message_stop", &Event::MessageStop, out);
    }

    fn write_failure(&mut self, error: &ApiError, out: &mut Vec<u8>) -> bool {
        if !self.is_stream || !self.has_begun {
            return false;
        }
        let kind = match error.status {
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            _ => "api_error",
        };
        let error = json!({"type": kind, "message": error.message});
        write_event("error", &json!({"type": "error", "error": error}), out);
        true
    }
}

/// Why the message ended.
fn ending<'a>(context: &'a ResponseContext, choice: &ChoiceState) -> Ending<'a> {
    let stop_sequence = match choice.stop_reason(context) {
        StopReason::Text(text) => Some(text),
        StopReason::None | StopReason::Token(_) => None,
    };
    let stop_reason = match choice.ended {
        Some(FinishReason::Stop) if stop_sequence.is_some() => "stop_sequence",
        Some(FinishReason::Stop) if choice.calls.counts.complete > 0 => "tool_use",
        Some(FinishReason::Stop) => "end_turn",
        _ => "max_tokens",
    };
    Ending {
        stop_reason: Some(stop_reason),
        stop_sequence,
    }
}

fn write_event(name: &str, event: &impl Serialize, out: &mut Vec<u8>) {
    for piece in ["event: ", name, "\ndata: "] {
        out.extend_from_slice(piece.as_bytes());
    }
    append(event, out);
    out.extend_from_slice(b"\n\n");
}

/// The blocks of a message that is sent whole.
struct Collected<'a>(&'a mut Blocks);

/// Those of a stream's.
struct Streamed<'a>(&'a mut Blocks);

impl ItemEvents for Collected<'_> {
    fn begin(&mut self, item: NewItem<'_>, _: &mut Vec<u8>) {
        self.0.content.push(Block::new(item));
    }

    fn add(&mut self, piece: &str, _: &mut Vec<u8>) {
        match self.0.content.last_mut() {
            None => {}
            Some(
                Block::Thinking { thinking: text, .. }
                | Block::Text { text }
                | Block::ToolUse { input: text, .. },
            ) => text.push_str(piece),
        }
    }

    fn end(&mut self, _: ItemEnd, _: &mut Vec<u8>) {}
}

impl ItemEvents for Streamed<'_> {
    fn begin(&mut self, item: NewItem<'_>, out: &mut Vec<u8>) {
        let blocks = &mut *self.0;
        blocks.kind = match item {
            NewItem::Thought => BlockKind::Thinking,
            NewItem::Text => BlockKind::Text,
            NewItem::Call(_) => BlockKind::ToolUse,
        };
        let event = Event::ContentBlockStart {
            index: blocks.num_begun,
            content_block: Block::new(item),
        };
        blocks.num_begun += 1;
        write_event("content_block_start", &event, out);
    }

    fn add(&mut self, piece: &str, out: &mut Vec<u8>) {
        let delta = match self.0.kind {
            BlockKind::Thinking => Delta::Thinking { thinking: piece },
            BlockKind::Text => Delta::Text { text: piece },
            BlockKind::ToolUse => Delta::InputJson {
                partial_json: piece,
            },
        };
        self.0.write_delta(delta, out);
    }

    fn end(&mut self, _: ItemEnd, out: &mut Vec<u8>) {
        if self.0.kind == BlockKind::Thinking {
            self.0.write_delta(Delta::Signature { signature: "" }, out);
        }
        let index = self.0.index();
        write_event(
            "content_block_stop",
            &Event::ContentBlockStop { index },
            out,
        );
    }
}

impl Blocks {
    /// Of the open block.
    fn index(&self) -> usize {
        self.num_begun.saturating_sub(1)
    }

    fn write_delta(&self, delta: Delta<'_>, out: &mut Vec<u8>) {
        let index = self.index();
        let event = Event::ContentBlockDelta { index, delta };
        write_event("content_block_delta", &event, out);
    }
}

impl Block {
    fn new(item: NewItem<'_>) -> Self {
        match item {
            NewItem::Thought => Self::Thinking {
                thinking: String::new(),
                signature: "",
            },
            NewItem::Text => Self::Text {
                text: String::new(),
            },
            NewItem::Call(head) => Self::ToolUse {
                id: head.id.clone(),
                name: head.name.clone(),
                input: String::new(),
            },
        }
    }
}

/// Arguments as an object. Those that are none, cut off or broken, are its `arguments`, so that no tool runs without
/// what the model meant.
fn as_object<S: serde::Serializer>(arguments: &str, serializer: S) -> Result<S::Ok, S::Error> {
    let object = match serde_json::from_str(arguments) {
        Ok(object) => object,
        Err(_) if arguments.trim().is_empty() => Map::new(),
        Err(_) => Map::from_iter([("arguments".to_owned(), Value::from(arguments))]),
    };
    object.serialize(serializer)
}
