//! Errors in the words of the API that a request came by: chats' names of fields become its own.

use std::borrow::Cow;

use crate::error::RequestError;
use crate::request::{Input, Protocol};

/// A chat's name of a field, and the API's.
type Names = &'static [(&'static str, &'static str)];

const RESPONSES: Names = &[
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
];
const EMBEDDINGS: Names = &[("prompt", "input")];
const MESSAGES: Names = &[
    ("stop", "stop_sequences"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("reasoning_effort", "output_config.effort"),
];
/// Only a template refuses to continue a message here: a last message that is not the assistant's is never continued.
const NOT_CONTINUED: &str = "the last of `messages` is the assistant's, which the answer continues, and this model's \
     chat template does not show it as it was sent; end with a message of the user";
/// What these APIs write without `function` in between.
const RESPONSES_TOOLS: Names = &[(".function", "")];
const MESSAGES_TOOLS: Names = &[(".function.parameters", ".input_schema"), (".function", "")];

/// The same error in a call for embeddings.
pub(crate) fn in_words_of_embeddings(error: &RequestError) -> RequestError {
    RequestError {
        param: Cow::Owned(renamed(&error.param, EMBEDDINGS, &[])),
        message: renamed_in_text(&error.message, EMBEDDINGS, &[]),
        code: error.code,
    }
}

/// The same error about the field that the client has sent.
pub(crate) fn in_words_of(input: &Input, error: RequestError) -> RequestError {
    let (names, tools) = match input {
        Input::Chat {
            protocol: Protocol::Responses { .. },
            ..
        } => (RESPONSES, RESPONSES_TOOLS),
        Input::Chat {
            protocol: Protocol::Messages,
            ..
        } => match &*error.param {
            "continue_final_message" => {
                return RequestError::invalid("messages", NOT_CONTINUED);
            }
            _ => (MESSAGES, MESSAGES_TOOLS),
        },
        Input::Chat { .. } | Input::Completion { .. } => return error,
    };
    RequestError {
        param: Cow::Owned(renamed(&error.param, names, tools)),
        message: renamed_in_text(&error.message, names, tools),
        code: error.code,
    }
}

/// What stands between backticks is a field.
fn renamed_in_text(message: &str, names: Names, tools: Names) -> String {
    let pieces = message.split('`').enumerate();
    let pieces = pieces.map(|(index, piece)| match index % 2 {
        0 => piece.to_owned(),
        _ => renamed(piece, names, tools),
    });
    pieces.collect::<Vec<_>>().join("`")
}

fn renamed(field: &str, names: Names, tools: Names) -> String {
    if field.starts_with("tools[") {
        let found = tools.iter().find(|(from, _)| field.contains(from));
        return found.map_or_else(
            || field.to_owned(),
            |(from, to)| field.replacen(from, to, 1),
        );
    }
    let (name, rest) = field.split_at(field.find(['.', '[']).unwrap_or(field.len()));
    let found = names.iter().find(|(from, _)| *from == name);
    found.map_or_else(|| field.to_owned(), |(_, to)| format!("{to}{rest}"))
}
