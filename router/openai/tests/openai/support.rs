//! Requests with defaults, and reading of what streams say.

use plait_core::{FinishReason, Request, TokenId};
use plait_openai::{
    ApiError, GenerateRequest, Grammars, Prepared, PreparedChoice, RequestError, ResponseState,
};
use plait_text::ModelText;
use serde_json::{Value, json};

use crate::model_folder::{CONTEXT, merge};

/// A request with everything at its default but these fields.
pub fn request(changes: &Value) -> GenerateRequest {
    let mut request = json!({
        "id": "cmpl-1", "created": 17, "model": "m", "stream": true, "include_usage": false,
    });
    merge(&mut request, changes);
    serde_json::from_value(request).unwrap()
}

pub fn chat(changes: &Value) -> GenerateRequest {
    let mut fields = json!({"kind": "chat", "messages": [{"role": "user", "content": "hi"}]});
    merge(&mut fields, changes);
    request(&fields)
}

pub fn completion(changes: &Value) -> GenerateRequest {
    let mut fields = json!({"kind": "completion", "prompts": ["hi"]});
    merge(&mut fields, changes);
    request(&fields)
}

/// None is compiled yet, and nobody counts them.
fn grammars() -> Grammars {
    Grammars::new(|_, _| {})
}

pub fn prepare(model: &ModelText, request: &GenerateRequest) -> Result<Prepared, RequestError> {
    plait_openai::prepare(model, request, CONTEXT, &mut || 7)
}

/// The same, with its constraint compiled.
pub fn constrained(model: &ModelText, request: &GenerateRequest) -> Result<Prepared, ApiError> {
    let mut prepared = prepare(model, request)?;
    let asked = prepared.constraint.clone().expect("it has a constraint");
    match grammars().compile(model, &asked.constraint, 0) {
        Ok(grammar) => prepared.constrain(&grammar),
        Err(error) => return Err(asked.refusal(&error)),
    }
    Ok(prepared)
}

/// The first prompt of a request, and its first choice.
pub fn prepared(model: &ModelText, request: &GenerateRequest) -> (Request, PreparedChoice) {
    let mut prompt = prepare(model, request).unwrap().prompts.remove(0);
    (prompt.request, prompt.choices.remove(0))
}

/// Everything that a request's first choice says to these tokens, one a push.
pub fn answer(model: &ModelText, request: &GenerateRequest, tokens: &[TokenId]) -> Vec<u8> {
    let mut response = prepare(model, request).unwrap().response;
    let mut out = Vec::new();
    for token in tokens {
        let _ = response.push(0, &[*token], false, None, &mut out);
    }
    let state = response.finish(0, FinishReason::Length, &mut out);
    assert_eq!(state, ResponseState::Ended);
    out
}

/// The JSON of each event but the last, which says that the stream is done.
pub fn events(bytes: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(bytes).unwrap();
    let text = text
        .strip_suffix("data: [DONE]\n\n")
        .expect("a stream says when it is done");
    let events = text.split_terminator("\n\n").map(|event| {
        let json = event
            .strip_prefix("data: ")
            .expect("an event is one line of data");
        serde_json::from_str(json).unwrap()
    });
    events.collect()
}

/// The data of each event of a stream whose events have names, which their data repeat as `type`.
pub fn named_events(bytes: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(bytes).unwrap();
    let events = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once("\ndata: ").expect("a name, then data");
        let data: Value = serde_json::from_str(data).unwrap();
        let kind = data["type"].as_str().unwrap();
        assert_eq!(name, format!("event: {kind}"));
        data
    });
    events.collect()
}

/// The text of a stream's first choice.
pub fn streamed_text(bytes: &[u8]) -> String {
    let pieces = events(bytes).into_iter().filter_map(|event| {
        let choice = &event["choices"][0];
        let piece = choice["text"]
            .as_str()
            .or(choice["delta"]["content"].as_str());
        piece.map(str::to_owned)
    });
    pieces.collect()
}
