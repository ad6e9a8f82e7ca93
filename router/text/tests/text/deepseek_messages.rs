//! DeepSeek-V4's own message format, against what DeepSeek's own code makes of the same chats.

use std::fs;

use plait_text::{Chat, ModelText, RenderError};
use serde_json::{Map, Value, json};

use crate::model_folder::{Folder, byte_level};

const GOLDEN: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/fixtures/deepseek_v4_messages.json"
);

fn folder() -> Folder {
    let folder = Folder::new(&byte_level());
    folder.write_config(&json!({"architectures": ["DeepseekV4ForCausalLM"]}));
    folder.write_tokenizer_config(&json!({}));
    folder
}

fn render(model: &ModelText, messages: &Value, rest: Chat<'_>) -> Result<String, RenderError> {
    let messages: Vec<Map<String, Value>> = serde_json::from_value(messages.clone()).unwrap();
    let chat = Chat {
        messages: &messages,
        ..rest
    };
    model.render(chat, usize::MAX)
}

fn chat<'a>(kwargs: &'a Map<String, Value>, tools: &'a [Value]) -> Chat<'a> {
    Chat {
        messages: &[],
        tools,
        documents: &[],
        kwargs,
        add_generation_prompt: true,
        continue_final_message: false,
        reasoning_effort: None,
    }
}

#[test]
fn chats_of_a_folder_without_a_template_read_as_deepseeks_code_writes_them() {
    let model = folder().load();
    let cases: Vec<Value> = serde_json::from_slice(&fs::read(GOLDEN).unwrap()).unwrap();
    assert_eq!(cases.len(), 200);
    for case in &cases {
        let kwargs = json!({"thinking": case["thinking"]});
        let text = render(
            &model,
            &case["messages"],
            chat(kwargs.as_object().unwrap(), &[]),
        );
        assert_eq!(json!(text.unwrap()), case["expected"], "{case}");
    }
}

#[test]
fn it_does_not_think_unless_asked_to() {
    let (model, kwargs) = (folder().load(), Map::new());
    let messages = json!([{"role": "user", "content": "u"}]);
    let plain = render(&model, &messages, chat(&kwargs, &[])).unwrap();
    assert!(
        plain.ends_with("<｜User｜>u<｜Assistant｜></think>"),
        "{plain}"
    );
    let hard = Chat {
        reasoning_effort: Some("high"),
        ..chat(&kwargs, &[])
    };
    let thinking = render(&model, &messages, hard).unwrap();
    assert!(thinking.ends_with("<｜Assistant｜><think>"), "{thinking}");
}

#[test]
fn a_continued_answer_stays_open() {
    let (model, kwargs) = (folder().load(), Map::new());
    let messages =
        json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "so "}]);
    let continued = Chat {
        add_generation_prompt: false,
        continue_final_message: true,
        ..chat(&kwargs, &[])
    };
    let text = render(&model, &messages, continued).unwrap();
    assert!(
        text.ends_with("<｜User｜>u<｜Assistant｜></think>so "),
        "{text}"
    );
}

#[test]
fn tools_and_their_results_are_refused_with_what_to_do() {
    let (model, kwargs) = (folder().load(), Map::new());
    let messages = json!([{"role": "user", "content": "u"}]);
    let tools = [json!({"type": "function", "function": {"name": "f"}})];
    let error = render(&model, &messages, chat(&kwargs, &tools)).unwrap_err();
    assert!(
        format!("{error:?}").contains("--chat-template"),
        "{error:?}"
    );
    let result = json!([{"role": "tool", "content": "sunny"}]);
    let error = render(&model, &result, chat(&kwargs, &[])).unwrap_err();
    assert!(
        format!("{error:?}").contains("leave out calls"),
        "{error:?}"
    );
}

#[test]
fn a_folders_own_template_goes_first() {
    let folder = folder();
    folder.write_tokenizer_config(&json!({"chat_template": "mine"}));
    assert_eq!(folder.load().template_source(), Some("mine"));
}

#[test]
fn other_families_have_none() {
    let folder = Folder::new(&byte_level());
    folder.write_tokenizer_config(&json!({}));
    assert!(!folder.load().has_template());
}
