//! The bytes that clients read.

use plait_core::FinishReason;
use plait_openai::{Pushed, ResponseState, TokenLogprobs};
use plait_text::ModelText;
use serde_json::{Value, json};

use crate::model_folder::{Folder, byte_fallback, byte_level};
use crate::support::{answer, chat, completion, events, prepare, streamed_text};

fn model() -> ModelText {
    Folder::new(&byte_level()).load()
}

fn ids(text: &str) -> Vec<u32> {
    model().encode(text, false, usize::MAX).unwrap()
}

fn body(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

fn scores(logprob: f32, best: &[(u32, f32)]) -> TokenLogprobs {
    TokenLogprobs {
        logprob,
        rank: 1,
        best: best.to_vec(),
    }
}

#[test]
fn a_streamed_chat_is_role_deltas_and_a_reason() {
    let told = events(&answer(&model(), &chat(&json!({})), &ids("the")));
    let chunk = |choice: Value| {
        json!({"id": "cmpl-1", "object": "chat.completion.chunk", "created": 17, "model": "m",
               "choices": [choice]})
    };
    let delta = |delta: Value| {
        chunk(json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}))
    };
    let expected = [
        delta(json!({"role": "assistant", "content": ""})),
        delta(json!({"content": "t"})),
        delta(json!({"content": "he"})),
        chunk(
            json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": "length",
                     "stop_reason": null}),
        ),
    ];
    assert_eq!(told, expected);
}

#[test]
fn a_streamed_completion_is_texts_and_a_reason() {
    let told = events(&answer(&model(), &completion(&json!({})), &ids("a\"")));
    let choice =
        |text: &str| json!({"index": 0, "text": text, "logprobs": null, "finish_reason": null});
    assert_eq!(told[0]["object"], "text_completion");
    assert_eq!(told[0]["choices"], json!([choice("a")]));
    assert_eq!(told[1]["choices"], json!([choice("\"")]));
    assert_eq!(told[2]["choices"][0]["finish_reason"], "length");
}

#[test]
fn usage_comes_last_and_only_if_it_was_asked_for() {
    let told = events(&answer(
        &model(),
        &chat(&json!({"include_usage": true})),
        &ids("the"),
    ));
    let (last, others) = told.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 2);
    assert_eq!(last["usage"]["prompt_tokens"], ids("user: hi\n").len());
    assert!(others.iter().all(|event| event["usage"].is_null()));
}

#[test]
fn usage_says_what_was_cached_only_to_those_who_may_know() {
    for ask in [chat, completion] {
        for is_told in [false, true] {
            let fields = json!({"include_usage": true, "prompt_tokens_details": is_told});
            let told = events(&answer(&model(), &ask(&fields), &ids("the")));
            let details = &told.last().unwrap()["usage"]["prompt_tokens_details"];
            let expected = is_told.then(|| json!({"cached_tokens": 0}));
            assert_eq!(*details, json!(expected));
        }
    }
}

#[test]
fn a_whole_chat_is_one_body() {
    let told = body(&answer(
        &model(),
        &chat(&json!({"stream": false})),
        &ids("the he"),
    ));
    assert_eq!(told["object"], "chat.completion");
    let message = json!({"role": "assistant", "content": "the he", "refusal": null});
    assert_eq!(told["choices"][0]["message"], message);
    assert_eq!(told["choices"][0]["finish_reason"], "length");
    assert_eq!(told["usage"]["total_tokens"], ids("user: hi\n").len() + 4);
}

#[test]
fn several_prompts_are_choices_of_one_body() {
    let request = completion(&json!({"stream": false, "prompts": ["a", [5, 6]]}));
    let prepared = prepare(&model(), &request).unwrap();
    let mut response = prepared.response;
    let mut out = Vec::new();
    assert_eq!(prepared.prompts.len(), 2);
    let _ = response.push(1, &ids("b"), false, None, &mut out);
    assert_eq!(
        response.finish(1, FinishReason::Stop, &mut out),
        ResponseState::Open
    );
    let _ = response.push(0, &ids("a"), false, None, &mut out);
    assert_eq!(
        response.finish(0, FinishReason::Length, &mut out),
        ResponseState::Ended
    );
    let told = body(&out);
    assert_eq!(told["choices"][0]["text"], "a");
    assert_eq!(told["choices"][1]["text"], "b");
    assert_eq!(told["choices"][1]["finish_reason"], "stop");
    assert_eq!(told["usage"]["prompt_tokens"], 3);
}

#[test]
fn a_stop_string_across_tokens_is_cut_and_ends_the_choice() {
    let mut response = prepare(&model(), &chat(&json!({"stop": ["END"]})))
        .unwrap()
        .response;
    let mut out = Vec::new();
    assert_eq!(
        response.push(0, &ids("a EN"), false, None, &mut out),
        Pushed::Continue
    );
    assert_eq!(
        response.push(0, &ids("Db"), false, None, &mut out),
        Pushed::StopString
    );
    assert_eq!(
        response.push(0, &ids("c"), false, None, &mut out),
        Pushed::Continue
    );
    assert_eq!(
        response.finish(0, FinishReason::Length, &mut out),
        ResponseState::Ended
    );
    let last = events(&out).pop().unwrap();
    assert_eq!(streamed_text(&out), "a ");
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(last["choices"][0]["stop_reason"], "END");
}

#[test]
fn stop_strings_are_looked_for_after_the_least_tokens() {
    let request = chat(&json!({"stop": ["b"], "min_tokens": 3, "stream": false}));
    let mut response = prepare(&model(), &request).unwrap().response;
    let mut out = Vec::new();
    assert_eq!(
        response.push(0, &ids("abb"), false, None, &mut out),
        Pushed::Continue
    );
    assert_eq!(
        response.push(0, &ids("ab"), false, None, &mut out),
        Pushed::StopString
    );
    let _ = response.finish(0, FinishReason::Stop, &mut out);
    assert_eq!(body(&out)["choices"][0]["message"]["content"], "abba");
}

#[test]
fn tokens_after_the_one_that_completes_a_stop_string_are_not_counted() {
    let request = chat(&json!({"stop": ["b"], "stream": false}));
    let mut response = prepare(&model(), &request).unwrap().response;
    let mut out = Vec::new();
    let _ = response.push(0, &ids("abcd"), false, None, &mut out);
    let _ = response.finish(0, FinishReason::Stop, &mut out);
    assert_eq!(body(&out)["usage"]["completion_tokens"], 2);
}

#[test]
fn what_might_have_become_a_stop_string_is_shown_at_the_end() {
    let told = answer(&model(), &chat(&json!({"stop": ["END"]})), &ids("a EN"));
    assert_eq!(streamed_text(&told), "a EN");
}

#[test]
fn an_echo_without_output_is_the_prompt_and_its_scores() {
    let fields =
        json!({"stream": false, "echo": true, "logprobs": 1, "max_tokens": 0, "prompts": ["the"]});
    let prepared = prepare(&model(), &completion(&fields)).unwrap();
    let request = &prepared.prompts[0].request;
    assert_eq!((request.max_tokens, request.prompt_logprobs), (0, true));
    assert_eq!(
        prepared.prompts[0].choices[0].sampling.prompt_logprobs,
        Some(1)
    );
    let mut response = prepared.response;
    let mut out = Vec::new();
    response.push_prompt_logprobs(0, 1, &[scores(-0.5, &[(7, -0.25), (8, -4.0)])]);
    let _ = response.finish(0, FinishReason::Length, &mut out);
    response.write_body(&mut out);
    let told = body(&out);
    assert_eq!(told["choices"][0]["text"], "the");
    assert_eq!(told["usage"]["completion_tokens"], 0);
    let logprobs = &told["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["t", "he"]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.5]));
    let best = logprobs["top_logprobs"][1].as_object().unwrap();
    assert_eq!(best.len(), 2, "its own and the best one, not the second");
}

#[test]
fn each_chunk_says_what_its_choice_has_cost_if_asked() {
    let fields = json!({"continuous_usage_stats": true, "prompts": ["a", "the"]});
    let mut response = prepare(&model(), &completion(&fields)).unwrap().response;
    let mut out = Vec::new();
    let _ = response.push(1, &ids("b"), false, None, &mut out);
    let _ = response.finish(1, FinishReason::Length, &mut out);
    let _ = response.finish(0, FinishReason::Length, &mut out);
    let told = events(&out);
    let cost = |event: &Value| {
        let usage = &event["usage"];
        (
            usage["prompt_tokens"].as_u64(),
            usage["total_tokens"].as_u64(),
        )
    };
    let costs: Vec<_> = told.iter().map(cost).collect();
    assert_eq!(
        costs,
        [(2, 3), (2, 3), (1, 1)].map(|(prompt, all)| (Some(prompt), Some(all)))
    );
}

#[test]
fn a_stop_token_is_counted_but_not_shown() {
    for (stop_id, reason) in [(1, Value::Null), (2, json!(2))] {
        let request = chat(&json!({"stop_token_ids": [2], "stream": false}));
        let mut response = prepare(&model(), &request).unwrap().response;
        let mut out = Vec::new();
        let _ = response.push(0, &ids("a"), false, None, &mut out);
        let _ = response.push(0, &[stop_id], true, None, &mut out);
        let _ = response.finish(0, FinishReason::Stop, &mut out);
        let told = body(&out);
        assert_eq!(told["choices"][0]["message"]["content"], "a");
        assert_eq!(told["choices"][0]["stop_reason"], reason);
        assert_eq!(told["usage"]["completion_tokens"], 2);
    }
}

#[test]
fn a_visible_stop_token_is_not_shown_either() {
    let x = ids("x")[0];
    let mut response = prepare(&model(), &chat(&json!({"stop_token_ids": [x]})))
        .unwrap()
        .response;
    let mut out = Vec::new();
    let _ = response.push(0, &[ids("a")[0], x], true, None, &mut out);
    let _ = response.finish(0, FinishReason::Stop, &mut out);
    assert_eq!(streamed_text(&out), "a");
}

#[test]
fn chat_logprobs_list_tokens_bytes_and_the_best() {
    let (a, e) = (ids("a")[0], ids("é")[0]);
    let mut response = prepare(&model(), &chat(&json!({"logprobs": 2})))
        .unwrap()
        .response;
    let mut out = Vec::new();
    let records = [scores(-0.5, &[(a, -0.5), (e, f32::NEG_INFINITY)])];
    let _ = response.push(0, &[a], false, Some(&records), &mut out);
    let _ = response.finish(0, FinishReason::Length, &mut out);
    let expected = json!({"content": [{
        "token": "a", "logprob": -0.5, "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "\u{fffd}", "logprob": -9999.0, "bytes": [0xc3]}],
    }], "refusal": null});
    assert_eq!(events(&out)[1]["choices"][0]["logprobs"], expected);
}

#[test]
fn completion_logprobs_are_lists_side_by_side() {
    let he = ids("he")[0];
    let a = ids("a")[0];
    let request = completion(&json!({"logprobs": 1, "stream": false}));
    let mut response = prepare(&model(), &request).unwrap().response;
    let mut out = Vec::new();
    let records = [scores(-0.5, &[(he, -0.5)]), scores(-2.0, &[(he, -1.0)])];
    let _ = response.push(0, &[he, a], false, Some(&records), &mut out);
    let _ = response.finish(0, FinishReason::Length, &mut out);
    assert!(
        response.defers_body() && out.is_empty(),
        "written apart from the output thread"
    );
    response.write_body(&mut out);
    let expected = json!({
        "tokens": ["he", "a"], "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"he": -0.5}, {"he": -1.0, "a": -2.0}], "text_offset": [0, 2],
    });
    assert_eq!(body(&out)["choices"][0]["logprobs"], expected);
}

#[test]
fn text_offsets_go_on_from_chunk_to_chunk() {
    let mut response = prepare(&model(), &completion(&json!({"logprobs": 0})))
        .unwrap()
        .response;
    let mut out = Vec::new();
    for token in ids("he a") {
        let _ = response.push(0, &[token], false, Some(&[scores(-1.0, &[])]), &mut out);
    }
    let _ = response.finish(0, FinishReason::Length, &mut out);
    let told = events(&out);
    let offset = |event: &Value| event["choices"][0]["logprobs"]["text_offset"][0].clone();
    let offsets: Vec<Value> = told.iter().take(3).map(offset).collect();
    assert_eq!(offsets, [json!(0), json!(2), json!(3)]);
}

#[test]
fn logprobs_of_hidden_tokens_are_sent_at_once() {
    let mut response = prepare(&model(), &chat(&json!({"logprobs": 0})))
        .unwrap()
        .response;
    let mut out = Vec::new();
    let _ = response.push(0, &[1], true, Some(&[scores(-0.1, &[])]), &mut out);
    assert!(!out.is_empty());
    let _ = response.finish(0, FinishReason::Stop, &mut out);
    let token = &events(&out)[1]["choices"][0]["logprobs"]["content"][0]["token"];
    assert_eq!(token, "</s>");
}

#[test]
fn prompt_logprobs_have_vllms_form_whatever_their_order_and_repetition() {
    let request =
        completion(&json!({"prompt_logprobs": 1, "stream": false, "prompts": [[5, 6, 7]]}));
    let mut response = prepare(&model(), &request).unwrap().response;
    let mut out = Vec::new();
    let record = |best| TokenLogprobs {
        logprob: -3.0,
        rank: 4,
        best: vec![(best, -0.25)],
    };
    response.push_prompt_logprobs(0, 2, &[record(7), record(9)]);
    response.push_prompt_logprobs(0, 1, &[record(8)]);
    response.push_prompt_logprobs(0, 1, &[record(8)]);
    let _ = response.finish(0, FinishReason::Length, &mut out);
    response.write_body(&mut out);
    let told = body(&out)["choices"][0]["prompt_logprobs"].clone();
    let expected = json!([
        null,
        {"6": {"logprob": -3.0, "rank": 4, "decoded_token": "$"},
         "8": {"logprob": -0.25, "rank": 1, "decoded_token": "&"}},
        {"7": {"logprob": -3.0, "rank": 4, "decoded_token": "%"}},
    ]);
    assert_eq!(told, expected);
}

#[test]
fn token_ids_of_prompt_and_answer_are_sent_if_asked() {
    let asked = json!({"return_token_ids": true, "prompts": [[5, 6]]});
    let told = events(&answer(&model(), &completion(&asked), &[70, 71]));
    assert_eq!(told[0]["choices"][0]["prompt_token_ids"], json!([5, 6]));
    assert_eq!(told[0]["choices"][0]["token_ids"], json!([70]));
    assert_eq!(told[1]["choices"][0]["token_ids"], json!([71]));
    assert!(told[1]["choices"][0]["prompt_token_ids"].is_null());

    let told = events(&answer(
        &model(),
        &chat(&json!({"return_token_ids": true})),
        &[70],
    ));
    assert_eq!(told[0]["prompt_token_ids"], json!(ids("user: hi\n")));
    assert_eq!(told[1]["choices"][0]["token_ids"], json!([70]));
}

#[test]
fn a_completion_keeps_the_space_between_itself_and_its_prompt() {
    let tokenizer = byte_fallback();
    let model = Folder::new(&tokenizer).load();
    let id = |token: &str| tokenizer["model"]["vocab"][token].as_u64().unwrap() as u32;
    let ids = [id("▁the"), id("▁cat")];
    let told = |request| streamed_text(&answer(&model, &request, &ids));
    assert_eq!(told(completion(&json!({"prompts": ["a"]}))), " the cat");
    assert_eq!(told(completion(&json!({"prompts": [[0]]}))), "the cat");
    assert_eq!(told(chat(&json!({}))), "the cat");
}
