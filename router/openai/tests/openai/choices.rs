//! Several answers to each prompt.

use std::collections::BTreeSet;

use plait_core::FinishReason;
use plait_openai::{GenerateRequest, ResponseState, TokenLogprobs};
use plait_text::ModelText;
use serde_json::{Value, json};

use crate::model_folder::{Folder, byte_level};
use crate::support::{chat, completion, events, prepare};

fn model() -> ModelText {
    Folder::new(&byte_level()).load()
}

fn ids(text: &str) -> Vec<u32> {
    model().encode(text, false, usize::MAX).unwrap()
}

/// The answer in which choice i is `texts[i]`; they end from the last to the first.
fn answer_of(request: &GenerateRequest, texts: &[&str]) -> Vec<u8> {
    let mut response = prepare(&model(), request).unwrap().response;
    let mut out = Vec::new();
    for (choice, text) in texts.iter().enumerate().rev() {
        let _ = response.push(choice, &ids(text), false, None, &mut out);
        let state = response.finish(choice, FinishReason::Length, &mut out);
        assert_eq!(state == ResponseState::Ended, choice == 0);
    }
    out
}

fn body_of(request: &GenerateRequest, texts: &[&str]) -> Value {
    serde_json::from_slice(&answer_of(request, texts)).unwrap()
}

fn refused(request: &GenerateRequest) -> String {
    let error = prepare(&model(), request).unwrap_err();
    assert_eq!(error.param, "n");
    error.message
}

#[test]
fn the_choices_of_a_prompt_are_one_request_of_the_scheduler() {
    let request = completion(&json!({"prompts": ["a", "the"], "n": 3}));
    let prepared = prepare(&model(), &request).unwrap();
    let of_each = prepared.prompts.iter();
    let of_each = of_each.map(|it| (it.request.num_choices.get(), it.choices.len()));
    assert_eq!(of_each.collect::<Vec<_>>(), [(3, 3), (3, 3)]);
}

#[test]
fn a_choice_has_the_index_prompt_times_n_plus_its_own() {
    let request = completion(&json!({"prompts": ["a", "the"], "n": 2, "stream": false}));
    let told = body_of(&request, &["a", "b", "c", "d"]);
    let choices = told["choices"].as_array().unwrap();
    let shown = choices.iter().map(|it| (&it["index"], &it["text"]));
    let expected = [(0, "a"), (1, "b"), (2, "c"), (3, "d")].map(|(i, t)| (json!(i), json!(t)));
    assert!(shown.eq(expected.iter().map(|(i, t)| (i, t))), "{told}");
}

#[test]
fn usage_counts_a_prompt_once_and_each_answer() {
    let request = completion(&json!({"prompts": ["a", "ab"], "n": 3, "stream": false}));
    let told = body_of(&request, &["a", "b", "ab", "d", "e", "f"]);
    let num_prompt = ids("a").len() + ids("ab").len();
    let num_output = 5 + ids("ab").len();
    assert_eq!(told["usage"]["prompt_tokens"], num_prompt);
    assert_eq!(told["usage"]["completion_tokens"], num_output);
    assert_eq!(told["usage"]["total_tokens"], num_prompt + num_output);
}

#[test]
fn what_the_cache_had_of_a_prompt_is_what_its_first_choice_found() {
    let fields =
        json!({"prompts": ["a", "ab"], "n": 2, "stream": false, "prompt_tokens_details": true});
    let mut response = prepare(&model(), &completion(&fields)).unwrap().response;
    let mut out = Vec::new();
    for (choice, num_cached) in [(0, 4), (1, 9), (2, 1), (3, 9)] {
        response.set_cached_tokens(choice, num_cached);
        let _ = response.finish(choice, FinishReason::Length, &mut out);
    }
    let told: Value = serde_json::from_slice(&out).unwrap();
    let details = &told["usage"]["prompt_tokens_details"];
    assert_eq!(details["cached_tokens"], 5);
}

#[test]
fn streamed_choices_have_a_role_and_an_end_each_and_one_end_of_the_stream() {
    let request = chat(&json!({"n": 2, "include_usage": true}));
    let told = events(&answer_of(&request, &["a", "b"]));
    let of_choice = |index: usize| -> Vec<Value> {
        let chunks = told.iter().map(|event| event["choices"][0].clone());
        chunks.filter(|it| it["index"] == index).collect()
    };
    for (index, text) in [(0, "a"), (1, "b")] {
        let chunks = of_choice(index);
        assert_eq!(chunks[0]["delta"]["role"], "assistant");
        assert_eq!(chunks[1]["delta"]["content"], text);
        assert_eq!(chunks[2]["finish_reason"], "length");
        assert_eq!(chunks.len(), 3);
    }
    assert_eq!(told.last().unwrap()["usage"]["completion_tokens"], 2);
}

#[test]
fn a_stop_string_ends_its_choice_alone() {
    let request = completion(&json!({"n": 2, "stop": ["b"], "stream": false}));
    let told = body_of(&request, &["ab", "aa"]);
    let reasons = [0, 1].map(|it| told["choices"][it]["finish_reason"].clone());
    assert_eq!(reasons, ["stop", "length"]);
    assert_eq!(told["choices"][1]["text"], "aa");
}

#[test]
fn choices_draw_from_the_seed_and_their_number() {
    let seeds = |fields: Value| -> Vec<u64> {
        let prepared = prepare(&model(), &completion(&fields)).unwrap();
        let choices = prepared.prompts.iter().flat_map(|it| &it.choices);
        choices.map(|it| it.sampling.seed).collect()
    };
    let four = seeds(json!({"n": 4, "seed": 17}));
    assert_eq!(four[0], 17);
    assert_eq!(four.iter().collect::<BTreeSet<_>>().len(), 4);
    assert_eq!(four[..2], seeds(json!({"n": 2, "seed": 17})));
    assert_ne!(four[1], seeds(json!({"n": 2, "seed": 18}))[1]);
    let of_two = seeds(json!({"n": 2, "seed": 17, "prompts": ["a", "b"]}));
    assert_eq!(of_two[..2], of_two[2..]);
}

#[test]
fn without_a_seed_each_choice_is_given_its_own() {
    let mut next = 0;
    let request = completion(&json!({"n": 3, "prompts": ["a", "b"]}));
    let prepared = plait_openai::prepare(&model(), &request, 512, &mut || {
        next += 1;
        next
    });
    let prompts = prepared.unwrap().prompts;
    let choices = prompts.iter().flat_map(|it| &it.choices);
    let seeds: Vec<u64> = choices.map(|it| it.sampling.seed).collect();
    assert_eq!(seeds, [1, 2, 3, 4, 5, 6]);
}

#[test]
fn each_choice_shows_what_the_first_one_measured_of_the_prompt() {
    let fields = json!({"n": 2, "stream": false, "echo": true, "logprobs": 0, "max_tokens": 0, "prompts": ["the"],
                        "prompt_logprobs": 0});
    let prepared = prepare(&model(), &completion(&fields)).unwrap();
    let choices = &prepared.prompts[0].choices;
    let asked = choices.iter().map(|it| it.sampling.prompt_logprobs);
    assert_eq!(asked.collect::<Vec<_>>(), [Some(0), None]);
    let mut response = prepared.response;
    let record = TokenLogprobs {
        logprob: -0.5,
        rank: 1,
        best: Vec::new(),
    };
    response.push_prompt_logprobs(0, 1, &[record]);
    let mut out = Vec::new();
    for choice in [0, 1] {
        let _ = response.finish(choice, FinishReason::Length, &mut out);
    }
    response.write_body(&mut out);
    let told: Value = serde_json::from_slice(&out).unwrap();
    for choice in told["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], "the");
        assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -0.5]));
        let second = &choice["prompt_logprobs"][1];
        let (_, second) = second.as_object().unwrap().iter().next().unwrap();
        assert_eq!(second["logprob"], -0.5);
    }
}

#[test]
fn choices_are_bounded_for_each_prompt_and_for_the_call() {
    for n in [0, -1, 129, 1_000_000_000, i64::MAX] {
        let message = refused(&chat(&json!({ "n": n })));
        assert!(message.contains("1 to 128"), "{message}");
    }
    let prompts = |num: usize, n: i64| completion(&json!({"prompts": vec!["a"; num], "n": n}));
    let message = refused(&prompts(3, 86));
    assert!(message.contains("258 choices, where 256"), "{message}");
    for (num, n) in [(1, 128), (2, 128), (128, 2), (85, 3)] {
        assert!(prepare(&model(), &prompts(num, n)).is_ok(), "{num} x {n}");
    }
}

#[test]
fn log_probabilities_of_prompts_count_as_often_as_they_are_shown() {
    let ids = vec![5; 400];
    let asked = |n: i64| {
        let fields =
            json!({"prompts": vec![&ids; 32], "n": n, "stream": false, "prompt_logprobs": 4});
        prepare(&model(), &completion(&fields))
    };
    assert!(asked(8).is_ok());
    let error = asked(8 + 1).map(|_| ()).unwrap_err();
    assert_eq!(error.param, "n", "32 x 9 choices");
    let fields =
        json!({"prompts": vec![&ids; 16], "n": 16, "stream": false, "prompt_logprobs": 20});
    let error = prepare(&model(), &completion(&fields)).unwrap_err();
    assert_eq!(error.param, "prompt_logprobs");
    assert!(
        error.message.contains("in each of 16 choices"),
        "{}",
        error.message
    );
}

/// At most 16 MiB, so that no answer holds up the thread that writes all of them.
#[test]
fn what_each_choice_repeats_of_its_prompt_is_bounded() {
    let prepare = |request| {
        let prepared = plait_openai::prepare(&model(), &request, 1 << 18, &mut || 7);
        prepared.map(|_| ()).map_err(|error| error.message)
    };
    let asked = |num_tokens: usize, mut fields: Value| {
        fields["prompts"] = json!([vec![ids("a")[0]; num_tokens]]);
        prepare(completion(&fields))
    };
    let echo = json!({"n": 128, "echo": true});
    let token_ids = json!({"n": 128, "return_token_ids": true});
    for (most, fields) in [(1 << 17, echo), (1 << 14, token_ids)] {
        assert_eq!(asked(most, fields.clone()), Ok(()));
        let message = asked(most + 1, fields.clone()).unwrap_err();
        assert!(message.contains("where 16777216 are allowed"), "{message}");
        let alone = {
            let mut fields = fields;
            fields["n"] = json!(1);
            fields
        };
        assert_eq!(asked(most + 1, alone), Ok(()));
    }
    let messages = json!([{"role": "user", "content": "a ".repeat(1 << 14)}]);
    let chat = |stream: bool| {
        let fields =
            json!({"messages": messages, "n": 128, "return_token_ids": true, "stream": stream});
        prepare(chat(&fields))
    };
    assert_eq!(chat(false), Ok(()), "told once");
    assert!(chat(true).is_err());
}
