//! Anthropic's `/v1/messages`: content blocks, streamed and whole.

use plait_core::FinishReason;
use plait_openai::{ApiError, GenerateRequest, ResponseState};
use serde_json::{Value, json};

use crate::model_folder::{Folder, byte_level, merge};
use crate::support::{named_events, prepare};
use crate::tool_calls::{CALL, ids, model, with_tools};

fn asked(changes: &Value) -> GenerateRequest {
    let mut fields =
        json!({"id": "msg_1f", "protocol": {"name": "messages"}, "prompt_tokens_details": true});
    merge(&mut fields, changes);
    with_tools(&fields)
}

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

fn whole(changes: &Value, text: &str, reason: FinishReason) -> Value {
    let mut fields = json!({"stream": false});
    merge(&mut fields, changes);
    serde_json::from_slice(&written(&asked(&fields), text, 1, reason)).unwrap()
}

/// The message that a client makes of the events.
fn gathered(text: &str, num: usize, reason: FinishReason) -> Value {
    let events = named_events(&written(&asked(&json!({})), text, num, reason));
    let mut message = events[0]["message"].clone();
    let (mut blocks, mut piece) = (Vec::<Value>::new(), String::new());
    for event in &events[1..] {
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(event["index"], blocks.len());
                piece.clear();
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let delta = &event["delta"];
                let part =
                    ["text", "thinking", "partial_json", "signature"].map(|it| delta[it].as_str());
                piece += part.into_iter().flatten().next().unwrap();
            }
            "content_block_stop" => {
                let block = blocks.last_mut().unwrap();
                match block["type"].as_str().unwrap() {
                    "tool_use" => block["input"] = serde_json::from_str(&piece).unwrap(),
                    kind => {
                        let kind = kind.to_owned();
                        block[kind] = json!(piece);
                    }
                }
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            other => assert_eq!(other, "message_stop"),
        }
    }
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    message["content"] = json!(blocks);
    message
}

#[test]
fn events_put_together_are_the_whole_message() {
    let texts = [
        "Just text.".to_owned(),
        format!("<think>\nWell…\n</think>\n\nI look. {CALL}\n{CALL}"),
        "<think>never ends".to_owned(),
        String::new(),
    ];
    for text in texts {
        for reason in [FinishReason::Stop, FinishReason::Length] {
            let whole = whole(&json!({}), &text, reason);
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
fn a_message_has_thinking_text_and_tool_use_and_what_they_cost() {
    let text = format!("<think>Well…</think>I look. {CALL}");
    let message = whole(&json!({}), &text, FinishReason::Stop);
    let blocks = message["content"].as_array().unwrap();
    assert_eq!(
        blocks[0],
        json!({"type": "thinking", "thinking": "Well…", "signature": ""})
    );
    assert_eq!(blocks[1], json!({"type": "text", "text": "I look."}));
    assert_eq!(
        (&blocks[2]["name"], &blocks[2]["input"]),
        (&json!("look"), &json!({"city": "Zürich"}))
    );
    assert_eq!(message["stop_reason"], "tool_use");
    let usage = &message["usage"];
    assert_eq!(
        (&usage["input_tokens"], &usage["cache_read_input_tokens"]),
        (&json!(2), &json!(1))
    );
    assert_eq!(usage["output_tokens"], ids(&text).len());
}

#[test]
fn a_message_says_why_it_ended() {
    let ended = |changes: Value, text: &str, reason| {
        let message = whole(&changes, text, reason);
        (
            message["stop_reason"].clone(),
            message["stop_sequence"].clone(),
        )
    };
    assert_eq!(
        ended(json!({}), "a", FinishReason::Stop),
        (json!("end_turn"), Value::Null)
    );
    assert_eq!(
        ended(json!({}), "a", FinishReason::Length),
        (json!("max_tokens"), Value::Null)
    );
    let stop = json!({"stop": ["b"]});
    assert_eq!(
        ended(stop, "ab", FinishReason::Stop),
        (json!("stop_sequence"), json!("b"))
    );
    let named = json!({"tool_choice": {"mode": "named", "names": ["look"]}});
    assert_eq!(
        ended(named, CALL, FinishReason::Stop),
        (json!("tool_use"), Value::Null)
    );
}

#[test]
fn arguments_that_are_no_object_are_kept_as_they_are() {
    let cut_off = &CALL[..CALL.len() - 20];
    let message = whole(&json!({}), cut_off, FinishReason::Length);
    let input = message["content"][0]["input"].as_object().unwrap();
    assert_eq!(input.keys().collect::<Vec<_>>(), ["arguments"]);
    assert!(
        input["arguments"]
            .as_str()
            .unwrap()
            .starts_with("{\"city\""),
        "{input:?}"
    );
}

#[test]
fn a_stream_that_fails_ends_with_an_error_event() {
    let mut response = prepare(&model(), &asked(&json!({}))).unwrap().response;
    let mut out = Vec::new();
    let _ = response.push(0, &ids("Just"), false, None, &mut out);
    assert!(response.fail(&ApiError::internal("the rank was lost"), &mut out));
    let error = json!({"type": "api_error", "message": "the rank was lost"});
    assert_eq!(
        named_events(&out).last(),
        Some(&json!({"type": "error", "error": error}))
    );
}

#[test]
fn a_budget_of_thoughts_is_no_error_for_a_model_without_thoughts() {
    let folder = Folder::new(&byte_level());
    folder.write(
        "chat_template.jinja",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    );
    let mut fields = json!({"thinking_token_budget": 1024, "tools": []});
    assert!(
        prepare(&folder.load(), &asked(&fields))
            .unwrap()
            .constraint
            .is_none()
    );
    merge(&mut fields, &json!({"protocol": {"name": "chat"}}));
    prepare(&folder.load(), &asked(&fields)).unwrap_err();
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
    assert_eq!(refused(json!({"stop": [""]})), "stop_sequences");
    assert_eq!(
        refused(json!({"thinking_token_budget": -1})),
        "thinking.budget_tokens"
    );
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": 1}});
    assert_eq!(refused(json!({"tools": [tool]})), "tools[0].input_schema");
}

#[test]
fn a_message_that_a_template_does_not_continue_is_named_as_this_api_names_it() {
    let folder = Folder::new(&byte_level());
    folder.write("chat_template.jinja", "{{ messages | length }}");
    let changes = json!({
        "messages": [{"role": "assistant", "content": "not shown"}],
        "continue_final_message": true, "add_generation_prompt": false, "tools": []
    });
    let error = prepare(&folder.load(), &asked(&changes)).unwrap_err();
    assert_eq!(error.param, "messages");
    assert!(!error.message.contains("continue_final_message"), "{error}");
    assert!(error.message.ends_with("end with a message of the user"));
}
