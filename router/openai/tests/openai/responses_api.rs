//! `/v1/responses`: typed events and whole responses.

use plait_core::FinishReason;
use plait_openai::{ApiError, GenerateRequest, ResponseState};
use serde_json::{Value, json};

use crate::model_folder::merge;
use crate::support::{named_events, prepare};
use crate::tool_calls::{CALL, ids, model, with_tools};

const REPEATED: &str = r#"{"model":"m","store":false}"#;

fn asked(changes: &Value) -> GenerateRequest {
    let mut fields = json!({
        "id": "resp_1f", "protocol": {"name": "responses", "fields": REPEATED},
    });
    merge(&mut fields, changes);
    with_tools(&fields)
}

/// All that is written for this text, so many tokens at a time.
fn written(request: &GenerateRequest, text: &str, num: usize, reason: FinishReason) -> Vec<u8> {
    let mut response = prepare(&model(), request).unwrap().response;
    response.set_cached_tokens(0, 1);
    let mut out = Vec::new();
    for tokens in ids(text).chunks(num) {
        let _ = response.push(0, tokens, false, None, &mut out);
    }
    assert_eq!(response.finish(0, reason, &mut out), ResponseState::Ended);
    out
}

fn whole(text: &str, reason: FinishReason) -> Value {
    let request = asked(&json!({"stream": false}));
    serde_json::from_slice(&written(&request, text, 1, reason)).unwrap()
}

/// The response that a client makes of the events, which come in the order that the API promises.
fn gathered(text: &str, num: usize, reason: FinishReason) -> Value {
    let events = named_events(&written(&asked(&json!({})), text, num, reason));
    let numbers = (0..)
        .zip(&events)
        .all(|(at, it)| it["sequence_number"] == at);
    assert!(numbers, "{events:?}");
    let names = |at: usize| events[at]["type"].as_str().unwrap();
    assert_eq!(
        [names(0), names(1)],
        ["response.created", "response.in_progress"]
    );
    let mut text_so_far = String::new();
    let mut items: Vec<Value> = Vec::new();
    for event in &events[2..events.len() - 1] {
        match event["type"].as_str().unwrap() {
            "response.output_item.added" => {
                assert_eq!(event["output_index"], items.len());
                assert_eq!(event["item"]["status"], "in_progress");
                text_so_far.clear();
            }
            "response.output_item.done" => items.push(event["item"].clone()),
            name if name.ends_with(".delta") => text_so_far += event["delta"].as_str().unwrap(),
            "response.content_part.added" => assert_eq!(event["part"]["text"], ""),
            "response.content_part.done" => assert_eq!(event["part"]["text"], text_so_far),
            "response.function_call_arguments.done" => {
                assert_eq!(event["arguments"], text_so_far);
                assert_eq!(event["name"], "look");
            }
            _ => assert_eq!(event["text"], text_so_far),
        }
    }
    let last = events.last().unwrap();
    assert_eq!(last["response"]["output"], json!(items));
    assert_eq!(
        last["type"],
        format!("response.{}", last["response"]["status"].as_str().unwrap())
    );
    last["response"].clone()
}

#[test]
fn events_put_together_are_the_whole_response() {
    let texts = [
        "Just text.".to_owned(),
        format!("<think>\nWell…\n</think>\n\nI look. {CALL}\n{CALL}"),
        CALL[..50].to_owned(),
        "<think>never ends".to_owned(),
        String::new(),
    ];
    for text in texts {
        for reason in [FinishReason::Stop, FinishReason::Length] {
            let whole = whole(&text, reason);
            for num in [1, 7, 1000] {
                assert_eq!(
                    gathered(&text, num, reason),
                    whole,
                    "{text:?}, {num} at a time"
                );
            }
        }
    }
}

#[test]
fn an_output_has_thought_text_and_calls_in_the_models_order() {
    let text = format!("<think>Well…</think>I look. {CALL}");
    let response = whole(&text, FinishReason::Stop);
    let output = response["output"].as_array().unwrap();
    let kinds: Vec<_> = output
        .iter()
        .map(|it| it["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(
        output[0]["content"],
        json!([{"type": "reasoning_text", "text": "Well…"}])
    );
    assert_eq!(output[1]["content"][0]["text"], "I look.");
    assert_eq!(output[2]["name"], "look");
    let call_id = output[2]["call_id"].as_str().unwrap();
    assert!(call_id.starts_with("call_"), "{call_id}");
    assert_eq!(response["status"], "completed");
    assert_eq!(
        (&response["model"], &response["store"]),
        (&json!("m"), &json!(false))
    );
    let usage = &response["usage"];
    assert_eq!(usage["output_tokens"], ids(&text).len());
    assert!(
        usage["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(0),
        "{usage}"
    );
}

#[test]
fn a_usage_has_every_name_that_openais_form_requires() {
    for (is_told, cached) in [(false, 0), (true, 1)] {
        let request = asked(&json!({"stream": false, "prompt_tokens_details": is_told}));
        let bytes = written(&request, "Just", 1, FinishReason::Stop);
        let response: Value = serde_json::from_slice(&bytes).unwrap();
        let (num_input, num_output) = (
            response["usage"]["input_tokens"].as_u64().unwrap(),
            ids("Just").len() as u64,
        );
        let expected = json!({
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        });
        assert_eq!(response["usage"], expected);
    }
}

#[test]
fn an_answer_at_its_most_tokens_is_incomplete() {
    let response = whole("Just", FinishReason::Length);
    assert_eq!(
        response["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    assert_eq!(
        (&response["status"], &response["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
}

#[test]
fn a_stream_that_fails_ends_with_its_own_event() {
    let mut response = prepare(&model(), &asked(&json!({}))).unwrap().response;
    let (mut out, error) = (Vec::new(), ApiError::internal("the rank was lost"));
    assert!(
        !response.fail(&error, &mut out) && out.is_empty(),
        "its status can still say so"
    );
    let _ = response.push(0, &ids("Just"), false, None, &mut out);
    assert!(response.fail(&error, &mut out));
    let events = named_events(&out);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(
        last["response"]["error"],
        json!({"code": "server_error", "message": "the rank was lost"})
    );
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], "Just");
}

#[test]
fn errors_name_the_fields_of_this_api() {
    let refused = |changes: Value| {
        let error = prepare(&model(), &asked(&changes)).unwrap_err();
        assert!(
            error.message.contains(&format!("`{}", error.param)),
            "{error:?}"
        );
        error.param.into_owned()
    };
    assert_eq!(refused(json!({"max_tokens": 0})), "max_output_tokens");
    assert_eq!(refused(json!({"messages": []})), "input");
    let tool = json!({"type": "function", "function": {"name": "a b"}});
    assert_eq!(refused(json!({"tools": [tool]})), "tools[0].name");
}
