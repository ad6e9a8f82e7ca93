//! Calls that generate nothing.

use plait_openai::{RequestError, TextCall, answer_text_call};
use plait_text::ModelText;
use serde_json::{Value, json};

use crate::model_folder::{CONTEXT, Folder, byte_level};

fn model() -> ModelText {
    let folder = Folder::new(&byte_level());
    folder.write(
        "chat_template.jinja",
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length if tools }}",
    );
    folder.load()
}

fn called(call: Value) -> Result<Value, RequestError> {
    let call: TextCall = serde_json::from_value(call).unwrap();
    let answer = answer_text_call(&model(), &call, CONTEXT)?;
    Ok(serde_json::from_slice(&answer).unwrap())
}

fn chat(call: &str, content: &str, protocol: &str) -> Value {
    let messages = [json!({"role": "user", "content": content})];
    json!({"call": call, "kind": "chat", "messages": messages, "protocol": {"name": protocol}})
}

#[test]
fn texts_become_tokens_and_back() {
    let asked = json!({"call": "tokenize", "kind": "completion", "prompts": ["hé"], "return_token_strs": true});
    let answer = called(asked).unwrap();
    assert_eq!(
        (&answer["count"], &answer["max_model_len"]),
        (&json!(3), &json!(CONTEXT))
    );
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), 3);
    let back = called(json!({"call": "detokenize", "tokens": answer["tokens"]})).unwrap();
    assert_eq!(back, json!({"prompt": "hé"}));
}

#[test]
fn chats_are_counted_in_the_words_of_their_api() {
    assert_eq!(called(chat("tokenize", "abc", "chat")).unwrap()["count"], 3);
    assert_eq!(
        called(chat("count_tokens", "abc", "messages")).unwrap(),
        json!({"input_tokens": 3})
    );
    assert_eq!(
        called(chat("count_tokens", "abc", "responses")).unwrap(),
        json!({"object": "response.input_tokens", "input_tokens": 3})
    );
}

#[test]
fn a_prompt_over_the_context_is_counted_and_one_over_four_is_refused() {
    let context = CONTEXT as usize;
    let text = |num: usize| chat("count_tokens", &"a ".repeat(num / 2), "responses");
    assert_eq!(
        called(text(4 * context)).unwrap()["input_tokens"],
        4 * context
    );
    let error = called(text(4 * context + 2)).unwrap_err();
    assert_eq!(
        (&*error.param, error.code),
        ("input", "context_length_exceeded")
    );
}

#[test]
fn ids_that_the_model_does_not_have_are_refused() {
    for tokens in [
        json!([-1]),
        json!([4_000_000_000_i64]),
        json!(vec![1; 5 * CONTEXT as usize]),
    ] {
        let error = called(json!({"call": "detokenize", "tokens": tokens})).unwrap_err();
        assert_eq!(error.param, "tokens");
    }
}

#[test]
fn the_text_of_one_call_is_bounded_in_bytes() {
    let long = "x".repeat(64 << 10);
    let mut tokenizer = byte_level();
    let vocab = &mut tokenizer["model"]["vocab"];
    let id = vocab.as_object().unwrap().len();
    vocab[&long] = id.into();
    let model = Folder::new(&tokenizer).load();
    let answer = |num: usize| {
        let call = json!({"call": "detokenize", "tokens": vec![id; num]});
        answer_text_call(&model, &serde_json::from_value(call).unwrap(), CONTEXT)
    };
    let most = (8 << 20) / long.len();
    assert!(answer(most).unwrap().len() > 8 << 20);
    let error = answer(most + 1).unwrap_err();
    assert!(
        error
            .message
            .starts_with("`tokens` are 8454144 bytes of text, where 0 to 8388608 are allowed"),
        "{error}"
    );
}

#[test]
fn the_tokenizer_tells_what_evaluation_harnesses_ask_for() {
    let info = called(json!({"call": "tokenizer_info"})).unwrap();
    let names = [
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "chat_template",
        "vocab_size",
    ];
    assert!(names.iter().all(|name| info.get(name).is_some()), "{info}");
    assert!(
        info["chat_template"]
            .as_str()
            .unwrap()
            .starts_with("{% for m")
    );
    assert_eq!(info["model_max_length"], CONTEXT);
}
