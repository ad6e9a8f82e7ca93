//! `/v1/responses`: typed events in their order, or the response as one body.

use std::io::Write as _;

use plait_core::FinishReason;
use serde::Serialize;

use crate::answer_items::{ItemEnd, ItemEvents, NewItem, OpenItem};
use crate::choice_state::{ChoiceState, ResponseContext};
use crate::choices::Choices;
use crate::error::ApiError;
use crate::json::append;
use crate::renderer::Renderer;
use crate::request::GenerateRequest;
use crate::responses_json::{
    ErrorJson, IncompleteDetails, ItemJson, ItemKind, OutputItem, PartJson, ResponseJson, Status,
    UsageJson,
};

/// Writes one response. Its last event has the whole output, so that this is kept.
#[derive(Debug)]
pub(crate) struct ResponsesRenderer {
    open: OpenItem,
    has_begun: bool,
    is_stream: bool,
    response: Response,
}

/// A response as far as it has come, and the number of events about it.
#[derive(Debug)]
struct Response {
    id: String,
    created_at: u64,
    /// What it repeats of the request: the end of a JSON object, from a comma on.
    repeated: String,
    output: Vec<OutputItem>,
    num_events: u64,
}

/// The items of a stream's response.
struct Streamed<'a>(&'a mut Response);

/// Those of one that is sent whole.
struct Collected<'a>(&'a mut Response);

#[derive(Serialize)]
struct OfItem<'a> {
    output_index: usize,
    item: ItemJson<'a>,
}

/// Of the only part of an item's content.
#[derive(Serialize)]
struct OfPart<'a> {
    item_id: &'a str,
    output_index: usize,
    content_index: usize,
    part: PartJson<'a>,
}

/// Of an item's text or arguments: a piece, or all of it.
#[derive(Default, Serialize)]
struct OfText<'a> {
    item_id: &'a str,
    output_index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<[(); 0]>,
}

impl ResponsesRenderer {
    /// `repeated` is the JSON object of what the response repeats of the request.
    pub(crate) fn new(request: &GenerateRequest, repeated: &str) -> Self {
        let inner = repeated.trim_start_matches('{');
        let comma = match inner.trim_end_matches('}').is_empty() {
            true => "",
            false => ",",
        };
        Self {
            open: OpenItem::None,
            has_begun: false,
            is_stream: request.stream,
            response: Response {
                id: request.id.clone(),
                created_at: request.created,
                repeated: format!("{comma}{inner}"),
                output: Vec::new(),
                num_events: 0,
            },
        }
    }

    /// The events before the first item.
    fn begin(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.has_begun, true) {
            for kind in ["response.created", "response.in_progress"] {
                self.response
                    .write(kind, Status::InProgress, None, None, out);
            }
        }
    }
}

impl Renderer for ResponsesRenderer {
    fn is_stream(&self) -> bool {
        self.is_stream
    }

    fn write_news(
        &mut self,
        _: &ResponseContext,
        _: usize,
        choice: &mut ChoiceState,
        out: &mut Vec<u8>,
    ) {
        if self.is_stream {
            self.begin(out);
            let events = &mut Streamed(&mut self.response);
            self.open.take(&mut choice.unsent, events, out);
        } else {
            let events = &mut Collected(&mut self.response);
            self.open.take(&mut choice.unsent, events, out);
        }
    }

    fn write_choice_end(
        &mut self,
        _: &ResponseContext,
        _: usize,
        choice: &ChoiceState,
        out: &mut Vec<u8>,
    ) {
        let end = match choice.ended {
            Some(FinishReason::Stop) => ItemEnd::Complete,
            _ => ItemEnd::CutOff,
        };
        match self.is_stream {
            true => self.open.close(end, &mut Streamed(&mut self.response), out),
            false => self
                .open
                .close(end, &mut Collected(&mut self.response), out),
        }
    }

    fn write_end(&mut self, context: &ResponseContext, choices: &Choices, out: &mut Vec<u8>) {
        let usage = Some(choices.counts(context).into());
        let (status, kind) = match choices.get(0).ended {
            Some(FinishReason::Stop) => (Status::Completed, "response.completed"),
            _ => (Status::Incomplete, "response.incomplete"),
        };
        match self.is_stream {
            true => self.response.write(kind, status, usage, None, out),
            false => self.response.append(status, usage, None, out),
        }
    }

    fn write_failure(&mut self, error: &ApiError, out: &mut Vec<u8>) -> bool {
        if !self.is_stream || !self.has_begun {
            return false;
        }
        let events = &mut Streamed(&mut self.response);
        self.open.close(ItemEnd::CutOff, events, out);
        let error = Some(ErrorJson {
            code: "server_error",
            message: &error.message,
        });
        self.response
            .write("response.failed", Status::Failed, None, error, out);
        true
    }
}

impl Response {
    /// Appends the JSON of the whole response.
    fn append(
        &self,
        status: Status,
        usage: Option<UsageJson>,
        error: Option<ErrorJson<'_>>,
        out: &mut Vec<u8>,
    ) {
        let reason = "max_output_tokens";
        let json = ResponseJson {
            id: &self.id,
            object: "response",
            created_at: self.created_at,
            status,
            error,
            incomplete_details: (status == Status::Incomplete)
                .then_some(IncompleteDetails { reason }),
            output: self.output.iter().map(OutputItem::json).collect(),
            usage,
        };
        append(&json, out);
        out.pop();
        out.extend_from_slice(self.repeated.as_bytes());
    }

    /// Writes an event with the whole response.
    fn write(
        &mut self,
        kind: &str,
        status: Status,
        usage: Option<UsageJson>,
        error: Option<ErrorJson<'_>>,
        out: &mut Vec<u8>,
    ) {
        self.begin_event(kind, out);
        out.extend_from_slice(b",\"response\":");
        self.append(status, usage, error, out);
        out.extend_from_slice(b"}\n\n");
    }

    /// Up to the fields that all events have.
    fn begin_event(&mut self, kind: &str, out: &mut Vec<u8>) {
        let number = self.num_events;
        self.num_events += 1;
        write!(
            out,
            "event: {kind}\ndata: {{\"type\":\"{kind}\",\"sequence_number\":{number}"
        )
        .expect("a Vec takes every write");
    }

    /// Writes an event about the last item.
    fn write_event(
        &mut self,
        kind: &str,
        body: impl FnOnce(usize, &OutputItem, &mut Vec<u8>),
        out: &mut Vec<u8>,
    ) {
        self.begin_event(kind, out);
        let body_at = out.len();
        if let Some((index, item)) = self.output.iter().enumerate().next_back() {
            body(index, item, out);
            // The body goes on with the event's object.
            out[body_at] = b',';
        }
        out.extend_from_slice(b"\n\n");
    }

    fn add(&mut self, item: NewItem<'_>) {
        let letters = self.id.rsplit('_').next().unwrap_or_default();
        let item = OutputItem::new(item, self.output.len(), letters);
        self.output.push(item);
    }
}

impl ItemEvents for Collected<'_> {
    fn begin(&mut self, item: NewItem<'_>, _: &mut Vec<u8>) {
        self.0.add(item);
    }

    fn add(&mut self, piece: &str, _: &mut Vec<u8>) {
        if let Some(item) = self.0.output.last_mut() {
            item.text.push_str(piece);
        }
    }

    fn end(&mut self, end: ItemEnd, _: &mut Vec<u8>) {
        if let Some(item) = self.0.output.last_mut() {
            item.status = end.into();
        }
    }
}

impl ItemEvents for Streamed<'_> {
    fn begin(&mut self, item: NewItem<'_>, out: &mut Vec<u8>) {
        self.0.add(item);
        self.0
            .write_event("response.output_item.added", append_item, out);
        if self.0.output.last().is_some_and(OutputItem::has_parts) {
            self.0
                .write_event("response.content_part.added", append_part, out);
        }
    }

    fn add(&mut self, piece: &str, out: &mut Vec<u8>) {
        let Some(last) = self.0.output.last_mut() else {
            return;
        };
        last.text.push_str(piece);
        let kind = match last.kind {
            ItemKind::Reasoning => "response.reasoning_text.delta",
            ItemKind::Message => "response.output_text.delta",
            ItemKind::FunctionCall { .. } => "response.function_call_arguments.delta",
        };
        let body = |index, item: &OutputItem, out: &mut Vec<u8>| {
            let json = OfText {
                delta: Some(piece),
                ..of_text(index, item)
            };
            append(&json, out);
        };
        self.0.write_event(kind, body, out);
    }

    fn end(&mut self, end: ItemEnd, out: &mut Vec<u8>) {
        let Some(last) = self.0.output.last_mut() else {
            return;
        };
        last.status = end.into();
        let kind = match last.kind {
            ItemKind::Reasoning => "response.reasoning_text.done",
            ItemKind::Message => "response.output_text.done",
            ItemKind::FunctionCall { .. } => "response.function_call_arguments.done",
        };
        let has_parts = last.has_parts();
        self.0.write_event(kind, append_all, out);
        if has_parts {
            self.0
                .write_event("response.content_part.done", append_part, out);
        }
        self.0
            .write_event("response.output_item.done", append_item, out);
    }
}

fn append_item(output_index: usize, item: &OutputItem, out: &mut Vec<u8>) {
    let item = item.json();
    append(&OfItem { output_index, item }, out);
}

fn append_part(output_index: usize, item: &OutputItem, out: &mut Vec<u8>) {
    let json = OfPart {
        item_id: &item.id,
        output_index,
        content_index: 0,
        part: item.part(),
    };
    append(&json, out);
}

/// The whole text, or all arguments.
fn append_all(index: usize, item: &OutputItem, out: &mut Vec<u8>) {
    let json = match &item.kind {
        ItemKind::FunctionCall { name, .. } => OfText {
            name: Some(name),
            arguments: Some(&item.text),
            ..of_text(index, item)
        },
        _ => OfText {
            text: Some(&item.text),
            ..of_text(index, item)
        },
    };
    append(&json, out);
}

fn of_text(output_index: usize, item: &OutputItem) -> OfText<'_> {
    OfText {
        item_id: &item.id,
        output_index,
        content_index: item.has_parts().then_some(0),
        logprobs: (item.kind == ItemKind::Message).then_some([]),
        ..OfText::default()
    }
}
