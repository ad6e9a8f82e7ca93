//! Tool calls and thoughts: what requests may ask for, and what clients read.

use plait_core::FinishReason;
use plait_openai::{CallCounts, GenerateRequest, Pushed};
use plait_text::{ChosenFormats, ModelText, ReasoningFormat, ToolFormat};
use serde_json::{Value, json};

use crate::model_folder::{Folder, byte_level, merge};
use crate::support::{answer, chat, events, prepare};

pub const CALL: &str =
    "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>";

pub fn model() -> ModelText {
    let folder = Folder::new(&byte_level());
    folder.write(
        "chat_template.jinja",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length if tools }}",
    );
    folder.load().with_formats(ChosenFormats {
        reasoning: Some(ReasoningFormat::named("qwen3")),
        tools: Some(ToolFormat::named("hermes")),
    })
}

fn look() -> Value {
    json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}})
}

pub fn with_tools(changes: &Value) -> GenerateRequest {
    let mut fields = json!({"tools": [look()]});
    merge(&mut fields, changes);
    chat(&fields)
}

pub fn ids(text: &str) -> Vec<u32> {
    model().encode(text, false, usize::MAX).unwrap()
}

pub fn whole(request: &GenerateRequest, text: &str) -> Value {
    serde_json::from_slice(&answer(&model(), request, &ids(text))).unwrap()
}

/// A stream's message put together, as clients do it.
fn gathered(request: &GenerateRequest, text: &str) -> Value {
    let mut message = json!({"content": "", "reasoning_content": "", "tool_calls": []});
    let add = |into: &mut Value, piece: &Value| {
        if let Some(piece) = piece.as_str() {
            *into = json!(format!("{}{piece}", into.as_str().unwrap_or_default()));
        }
    };
    for event in events(&answer(&model(), request, &ids(text))) {
        let delta = &event["choices"][0]["delta"];
        add(&mut message["content"], &delta["content"]);
        add(
            &mut message["reasoning_content"],
            &delta["reasoning_content"],
        );
        assert_eq!(delta["reasoning_content"], delta["reasoning"]);
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            let calls = message["tool_calls"].as_array_mut().unwrap();
            if call["id"].is_string() {
                assert_eq!(
                    (index, &call["function"]["arguments"]),
                    (calls.len(), &json!(""))
                );
                calls.push(json!({"id": call["id"], "type": call["type"],
                                  "function": {"name": call["function"]["name"], "arguments": ""}}));
            } else {
                assert_eq!(call["function"]["name"], Value::Null);
            }
            add(
                &mut calls[index]["function"]["arguments"],
                &call["function"]["arguments"],
            );
        }
    }
    message
}

#[test]
fn streamed_and_whole_answers_say_the_same() {
    for text in [
        "Just text.".to_owned(),
        format!("<think>\nWell…\n</think>\n\nI look. {CALL}\n{CALL}"),
        CALL.to_owned(),
        CALL[..50].to_owned(),
        CALL.replace("look", "leap"),
        "<think>never ends".to_owned(),
    ] {
        let streamed = gathered(&with_tools(&json!({})), &text);
        let body = whole(&with_tools(&json!({"stream": false})), &text);
        let message = &body["choices"][0]["message"];
        for field in ["content", "reasoning_content"] {
            assert_eq!(
                streamed[field].as_str().unwrap(),
                message[field].as_str().unwrap_or_default(),
                "{text}"
            );
        }
        let calls = message["tool_calls"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        assert_eq!(streamed["tool_calls"], json!(calls), "{text}");
    }
}

#[test]
fn an_answer_of_a_call_says_so() {
    let request = with_tools(&json!({"stream": false}));
    let mut response = prepare(&model(), &request).unwrap().response;
    let mut out = Vec::new();
    let _ = response.push(0, &ids(CALL), false, None, &mut out);
    let _ = response.finish(0, FinishReason::Stop, &mut out);
    let body: Value = serde_json::from_slice(&out).unwrap();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["type"], "function");
    assert_eq!(
        call["function"],
        json!({"name": "look", "arguments": "{\"city\": \"Zürich\"}"})
    );
    assert_eq!(call["id"].as_str().unwrap().len(), "call_".len() + 24);
    let counts = CallCounts {
        complete: 1,
        cut_off: 0,
        as_text: 0,
    };
    assert_eq!(response.call_counts(0), counts);
}

#[test]
fn a_call_that_is_cut_off_keeps_its_arguments_and_the_reason() {
    let body = whole(&with_tools(&json!({"stream": false})), &CALL[..60]);
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        .as_str()
        .unwrap();
    assert!(
        "{\"city\": \"Zürich\"}".starts_with(arguments) && arguments.len() > 5,
        "{arguments}"
    );
}

#[test]
fn without_parallel_calls_the_answer_ends_after_one() {
    let request = with_tools(&json!({"stream": false, "single_call": true}));
    let mut response = prepare(&model(), &request).unwrap().response;
    let mut out = Vec::new();
    let pushed = response.push(0, &ids(&format!("{CALL}{CALL}")), false, None, &mut out);
    assert_eq!(pushed, Pushed::StopString);
    let _ = response.finish(0, FinishReason::Stop, &mut out);
    let body: Value = serde_json::from_slice(&out).unwrap();
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(
        (&choice["finish_reason"], &choice["stop_reason"]),
        (&json!("tool_calls"), &Value::Null)
    );
}

#[test]
fn calls_leave_under_their_older_name_if_tools_came_so() {
    let fields = json!({"stream": false, "are_functions": true});
    let request = with_tools(&fields);
    let mut response = prepare(&model(), &request).unwrap().response;
    let mut out = Vec::new();
    assert_eq!(
        response.push(0, &ids(CALL), false, None, &mut out),
        Pushed::StopString
    );
    let _ = response.finish(0, FinishReason::Stop, &mut out);
    let body: Value = serde_json::from_slice(&out).unwrap();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "function_call");
    assert_eq!(choice["message"]["function_call"]["name"], "look");
    assert_eq!(choice["message"].get("tool_calls"), None);
}

#[test]
fn without_tools_to_call_markers_are_text() {
    for fields in [
        json!({"tools": []}),
        json!({"tool_choice": {"mode": "none"}}),
        json!({"tools": [look(), {"function": {"name": "leap"}}], "tool_choice": {"names": ["leap"]}}),
    ] {
        let mut fields = fields;
        merge(&mut fields, &json!({"stream": false}));
        assert_eq!(
            whole(&with_tools(&fields), CALL)["choices"][0]["message"]["content"],
            CALL
        );
    }
}

#[test]
fn tools_are_shown_to_the_template_unless_none_may_be_called() {
    let prompt = |fields: &Value| {
        let prepared = prepare(&model(), &with_tools(fields)).unwrap();
        model().decode(&prepared.prompts[0].request.prompt)
    };
    assert_eq!(prompt(&json!({})), "hi1");
    assert_eq!(prompt(&json!({"tool_choice": {"mode": "none"}})), "hi");
}

#[test]
fn thoughts_are_counted_and_left_out_if_asked() {
    let text = "<think>ab</think>c";
    let body = whole(&chat(&json!({"stream": false})), text);
    let message = &body["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning"], &message["content"]),
        (&json!("ab"), &json!("c"))
    );
    let num_marked = ids("<think>ab</think>").len() as u64;
    let counted = &body["usage"]["completion_tokens_details"]["reasoning_tokens"];
    assert!((2..num_marked).contains(&counted.as_u64().unwrap()));
    let body = whole(
        &chat(&json!({"stream": false, "include_reasoning": false})),
        text,
    );
    let message = &body["choices"][0]["message"];
    assert_eq!(
        (message.get("reasoning"), &message["content"]),
        (None, &json!("c"))
    );
}

#[test]
fn a_thought_that_the_template_opened_is_found() {
    let folder = Folder::new(&byte_level());
    folder.write("chat_template.jinja", "{{ messages[0].content }}<think>\n");
    let model = folder.load();
    let body = answer(
        &model,
        &chat(&json!({"stream": false})),
        &ids("ab\n</think>\n\nc"),
    );
    let body: Value = serde_json::from_slice(&body).unwrap();
    let message = &body["choices"][0]["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("ab"), &json!("c"))
    );
}

#[test]
fn broken_tools_and_calls_are_refused_by_name() {
    let call = |arguments: &Value| json!({"id": "a", "function": {"name": "look", "arguments": arguments}});
    let result = json!({"role": "tool", "content": "sunny", "tool_call_id": "b"});
    for (fields, param) in [
        (json!({"tools": [look(), look()]}), "tools"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (
            json!({"tools": [{"type": "function"}]}),
            "tools[0].function",
        ),
        (
            json!({"tools": [{"function": {"name": "no spaces"}}]}),
            "tools[0].function.name",
        ),
        (
            json!({"tools": [{"function": {"name": "f", "parameters": []}}]}),
            "tools[0].function.parameters",
        ),
        (json!({"tool_choice": {"names": ["leap"]}}), "tool_choice"),
        (
            json!({"are_functions": true, "tool_choice": {"names": ["leap"]}}),
            "function_call",
        ),
        (json!({"messages": [result]}), "messages[0]"),
        (
            json!({"messages": [{"role": "assistant", "content": "", "tool_calls": [call(&json!("{}"))]}, result]}),
            "messages[1].tool_call_id",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": "", "tool_calls": [call(&json!("{1}"))]}]}),
            "messages[0].tool_calls[0].function.arguments",
        ),
    ] {
        let error = prepare(&model(), &with_tools(&fields)).unwrap_err();
        assert_eq!(error.param, param, "{}", error.message);
    }
}

#[test]
fn tools_for_a_model_of_unknown_calls_are_refused() {
    let model = Folder::new(&byte_level()).load();
    let error = prepare(&model, &with_tools(&json!({}))).unwrap_err();
    assert_eq!(
        (error.param.as_ref(), error.code),
        ("tools", "unsupported_value")
    );
    assert!(
        prepare(
            &model,
            &with_tools(&json!({"tool_choice": {"mode": "none"}}))
        )
        .is_ok()
    );
}
