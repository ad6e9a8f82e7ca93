//! Each limit of a request, at its bound and one past it.

use plait_openai::{GenerateRequest, LogprobsBudget};
use plait_text::ModelText;
use serde_json::{Map, Value, json};

use crate::model_folder::{Folder, byte_level};
use crate::support::{chat, completion, prepare};

fn model() -> ModelText {
    Folder::new(&byte_level()).load()
}

fn rejection(request: &GenerateRequest) -> (String, String) {
    let error = prepare(&model(), request).unwrap_err();
    (error.param.into_owned(), error.message)
}

/// Fields at a limit, the same one past it, and the parameter that the error names.
type Limit = (Value, Value, &'static str);

fn check(request: fn(&Value) -> GenerateRequest, limits: &[Limit]) {
    for (bound, past, param) in limits {
        assert!(prepare(&model(), &request(bound)).is_ok(), "{bound}");
        let (rejected, message) = rejection(&request(past));
        assert_eq!(rejected, *param);
        assert!(message.starts_with(&format!("`{param}`")), "{message}");
        assert!(message.contains("; "), "it says what to do: {message}");
    }
}

fn messages(num: usize) -> Value {
    json!({"messages": vec![json!({"role": "user", "content": ""}); num]})
}

fn template_arguments(num: usize) -> Value {
    let names = (0..num).map(|index| (format!("name{index}"), json!(1)));
    json!({"chat_template_kwargs": names.collect::<Map<_, _>>()})
}

#[test]
fn lists_are_bounded() {
    let prompts = |num: usize| json!({"prompts": vec!["a"; num]});
    let stops = |num: usize| json!({"stop": vec!["a"; num]});
    let stop = |text: &str, num: usize| json!({"stop": [text.repeat(num)]});
    let ids = |num: usize| json!({"stop_token_ids": vec![1; num]});
    let names = "chat_template_kwargs";
    check(
        chat,
        &[
            (messages(1), messages(0), "messages"),
            (template_arguments(32), template_arguments(33), names),
            (stops(16), stops(17), "stop"),
            (stop("a", 1), stop("a", 0), "stop"),
            (stop("é", 128), stop("é", 129), "stop"),
            (ids(64), ids(65), "stop_token_ids"),
        ],
    );
    check(
        completion,
        &[
            (prompts(1), prompts(0), "prompt"),
            (prompts(128), prompts(129), "prompt"),
        ],
    );
}

#[test]
fn numbers_are_bounded() {
    let sampling = |field: &str, value: f64| json!({"sampling": {field: value}});
    let top_k = |num: i64| json!({"sampling": {"top_k": num}});
    let max_tokens = |num: i64| json!({"max_tokens": num});
    let priority = |num: i64| json!({"priority": num});
    check(
        chat,
        &[
            (
                sampling("temperature", 100.0),
                sampling("temperature", 100.1),
                "temperature",
            ),
            (
                sampling("temperature", 0.0),
                sampling("temperature", -0.01),
                "temperature",
            ),
            (sampling("top_p", 1.0), sampling("top_p", 1.01), "top_p"),
            (sampling("top_p", 0.01), sampling("top_p", 0.0), "top_p"),
            (sampling("min_p", 1.0), sampling("min_p", 1.01), "min_p"),
            (sampling("min_p", 0.0), sampling("min_p", -0.01), "min_p"),
            (top_k(-1), top_k(-2), "top_k"),
            (top_k(2_147_483_647), top_k(2_147_483_648), "top_k"),
            (top_k(-1), top_k(i64::MAX), "top_k"),
            (max_tokens(1), max_tokens(0), "max_tokens"),
            (max_tokens(1), max_tokens(-1), "max_tokens"),
            (priority(i64::from(i32::MAX)), priority(1 << 31), "priority"),
            (
                priority(i64::from(i32::MIN)),
                priority(i64::MIN),
                "priority",
            ),
        ],
    );
    for past in [1 << 31, 1 << 32, -1] {
        let (_, message) = rejection(&chat(&max_tokens(past)));
        let problem = format!("is {past}, where 1 to 2147483647 is allowed");
        assert!(message.contains(&problem), "{message}");
    }
}

#[test]
fn log_probabilities_are_bounded() {
    let best = |num: i64| json!({"logprobs": num});
    let of_prompt = |num: i64| json!({"prompt_logprobs": num, "stream": false});
    for past in [21, -1, 1 << 32] {
        check(chat, &[(best(20), best(past), "top_logprobs")]);
        check(
            completion,
            &[
                (best(20), best(past), "logprobs"),
                (of_prompt(20), of_prompt(past), "prompt_logprobs"),
            ],
        );
    }
}

#[test]
fn token_ids_are_those_of_the_vocabulary() {
    let last = model().vocab_size() - 1;
    for past in [i64::from(last) + 1, 1 << 32, -1] {
        let stops = |id: i64| json!({"stop_token_ids": [id]});
        let prompts = |id: i64| json!({"prompts": [[id]]});
        check(chat, &[(stops(last.into()), stops(past), "stop_token_ids")]);
        check(
            completion,
            &[(prompts(last.into()), prompts(past), "prompt")],
        );
        let (_, message) = rejection(&chat(&stops(past)));
        let problem = format!("the token id {past}, where 0 to {last} are allowed");
        assert!(message.contains(&problem), "{message}");
    }
}

#[test]
fn one_of_several_prompts_is_named_by_its_index() {
    for (prompts, param) in [
        (json!(["a", ""]), "prompt[1]"),
        (json!([[1], []]), "prompt[1]"),
        (json!(["a", [1, -1]]), "prompt[1]"),
        (json!([[]]), "prompt"),
    ] {
        let (rejected, message) = rejection(&completion(&json!({"prompts": prompts})));
        assert_eq!(rejected, param);
        assert!(message.starts_with(&format!("`{param}` has ")), "{message}");
        assert!(message.contains("; send "), "{message}");
    }
}

#[test]
fn each_end_of_a_range_has_its_own_advice() {
    for (fields, advice) in [
        (messages(0), "; send at least one"),
        (messages(4097), "; send the latest ones"),
        (json!({"stop": [""]}), "; leave the empty one out"),
        (json!({"stop": ["a".repeat(257)]}), "; send a shorter one"),
    ] {
        let (_, message) = rejection(&chat(&fields));
        assert!(message.ends_with(advice), "{message}");
    }
}

#[test]
fn messages_are_bounded() {
    let (param, message) = rejection(&chat(&messages(4097)));
    assert_eq!(param, "messages");
    assert!(
        message.contains("4097 messages, where 1 to 4096"),
        "{message}"
    );
    // At the bound their text is what does not fit.
    let (_, message) = rejection(&chat(&messages(4096)));
    assert!(message.contains("shorten"), "{message}");
}

#[test]
fn prompt_log_probabilities_of_all_answers_under_way_are_bounded() {
    let budget = LogprobsBudget::default();
    let prompts =
        json!({"prompts": vec![vec![1; 500]; 128], "prompt_logprobs": 7, "stream": false});
    let asked = || prepare(&model(), &completion(&prompts)).unwrap();
    let mut under_way = Vec::new();
    let error = loop {
        let mut prepared = asked();
        match prepared.reserve(&budget) {
            Ok(()) => under_way.push(prepared),
            Err(error) => break error,
        }
    };
    assert_eq!(under_way.len(), (1 << 21) / (128 * 500 * 8));
    assert_eq!(error.status, 429);
    assert!(
        error.message.contains("asks for 512000 "),
        "{}",
        error.message
    );
    under_way.pop();
    assert!(asked().reserve(&budget).is_ok(), "its share is given back");
    let too_many =
        json!({"prompts": vec![vec![1; 500]; 128], "prompt_logprobs": 8, "stream": false});
    let (param, message) = rejection(&completion(&too_many));
    assert_eq!(param, "prompt_logprobs");
    assert!(message.contains("524288 are allowed"), "{message}");
}
