//! What `/v1/responses` answers: items of the output, usage, and the response around them.

use serde::Serialize;

use crate::answer_items::{ItemEnd, NewItem};
use crate::response_head::TokenCounts;

/// `status` of a response and of its items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

impl From<ItemEnd> for Status {
    fn from(end: ItemEnd) -> Self {
        match end {
            ItemEnd::Complete => Self::Completed,
            ItemEnd::CutOff => Self::Incomplete,
        }
    }
}

/// An item of the output as far as it has come.
#[derive(Clone, Debug)]
pub(crate) struct OutputItem {
    pub(crate) id: String,
    pub(crate) kind: ItemKind,
    /// A thought, a text, or a call's arguments.
    pub(crate) text: String,
    pub(crate) status: Status,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ItemKind {
    Reasoning,
    Message,
    FunctionCall { call_id: String, name: String },
}

impl OutputItem {
    /// The item of this index in the response with these letters in its id.
    pub(crate) fn new(item: NewItem<'_>, index: usize, letters: &str) -> Self {
        let (prefix, kind) = match item {
            NewItem::Thought => ("rs", ItemKind::Reasoning),
            NewItem::Text => ("msg", ItemKind::Message),
            NewItem::Call(head) => (
                "fc",
                ItemKind::FunctionCall {
                    call_id: head.id.clone(),
                    name: head.name.clone(),
                },
            ),
        };
        Self {
            id: format!("{prefix}_{letters}{index:04x}"),
            kind,
            text: String::new(),
            status: Status::InProgress,
        }
    }

    /// Whether its text is a part of its content; arguments are not.
    pub(crate) fn has_parts(&self) -> bool {
        matches!(self.kind, ItemKind::Reasoning | ItemKind::Message)
    }

    /// Without its content while it is in progress.
    pub(crate) fn json(&self) -> ItemJson<'_> {
        let (id, status) = (self.id.as_str(), self.status);
        let has_begun = status != Status::InProgress;
        match &self.kind {
            ItemKind::Reasoning => ItemJson::Reasoning {
                id,
                summary: [],
                content: has_begun.then(|| self.part()).into_iter().collect(),
                encrypted_content: (),
                status,
            },
            ItemKind::Message => ItemJson::Message {
                id,
                status,
                role: "assistant",
                content: has_begun.then(|| self.part()).into_iter().collect(),
            },
            ItemKind::FunctionCall { call_id, name } => ItemJson::FunctionCall {
                id,
                call_id,
                name,
                arguments: &self.text,
                status,
            },
        }
    }

    /// The only part of a thought's or a message's content.
    pub(crate) fn part(&self) -> PartJson<'_> {
        match self.kind {
            ItemKind::Reasoning => PartJson::ReasoningText { text: &self.text },
            _ => PartJson::OutputText {
                text: &self.text,
                annotations: [],
                logprobs: [],
            },
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ItemJson<'a> {
    Reasoning {
        id: &'a str,
        summary: [(); 0],
        content: Vec<PartJson<'a>>,
        encrypted_content: (),
        status: Status,
    },
    Message {
        id: &'a str,
        status: Status,
        role: &'static str,
        content: Vec<PartJson<'a>>,
    },
    FunctionCall {
        id: &'a str,
        call_id: &'a str,
        name: &'a str,
        arguments: &'a str,
        status: Status,
    },
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum PartJson<'a> {
    ReasoningText {
        text: &'a str,
    },
    OutputText {
        text: &'a str,
        annotations: [(); 0],
        logprobs: [(); 0],
    },
}

/// Everything of a response but what it repeats of the request.
#[derive(Debug, Serialize)]
pub(crate) struct ResponseJson<'a> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created_at: u64,
    pub(crate) status: Status,
    pub(crate) error: Option<ErrorJson<'a>>,
    pub(crate) incomplete_details: Option<IncompleteDetails>,
    pub(crate) output: Vec<ItemJson<'a>>,
    pub(crate) usage: Option<UsageJson>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ErrorJson<'a> {
    pub(crate) code: &'static str,
    pub(crate) message: &'a str,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct IncompleteDetails {
    pub(crate) reason: &'static str,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct UsageJson {
    input_tokens: u64,
    input_tokens_details: InputTokensDetails,
    output_tokens: u64,
    output_tokens_details: OutputTokensDetails,
    total_tokens: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct InputTokensDetails {
    cached_tokens: u64,
    /// Required by OpenAI's form. Always 0: what the prefix cache takes in is not counted, and costs nothing.
    cache_write_tokens: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct OutputTokensDetails {
    reasoning_tokens: u64,
}

impl From<TokenCounts> for UsageJson {
    fn from(counts: TokenCounts) -> Self {
        Self {
            input_tokens: counts.num_prompt,
            input_tokens_details: InputTokensDetails {
                cached_tokens: counts.num_cached.unwrap_or(0),
                cache_write_tokens: 0,
            },
            output_tokens: counts.num_output,
            output_tokens_details: OutputTokensDetails {
                reasoning_tokens: counts.num_thought.unwrap_or(0),
            },
            total_tokens: counts.num_prompt + counts.num_output,
        }
    }
}
