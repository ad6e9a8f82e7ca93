//! A model's files, as far as they say something about text.

use std::cell::RefCell;
use std::fs;
use std::path::Path;

use plait_text::{Chat, ModelText};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::{Target, root};

const JSON: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"null",
    b"true",
    b"\"\"",
    b"\"added_tokens\"",
    b"\"model\"",
    b"\"vocab\"",
    b"\"merges\"",
    b"\"normalizer\"",
    b"\"pre_tokenizer\"",
    b"\"decoder\"",
    b"\"post_processor\"",
    b"\"type\"",
    b"\"Sequence\"",
    b"\"ByteLevel\"",
    b"\"Split\"",
    b"\"Regex\"",
    b"\"(a+)+$\"",
    b"\"Replace\"",
    b"\"Precompiled\"",
    b"\"ByteFallback\"",
    b"\"Strip\"",
    b"\"Metaspace\"",
    b"\"Unigram\"",
    b"\"WordPiece\"",
    b"\"chat_template\"",
    b"\"eos_token_id\"",
    b"\"vocab_size\"",
    b"\"max_position_embeddings\"",
    b"\"temperature\"",
    b"\"architectures\"",
];

const TEMPLATE: &[&[u8]] = &[
    b"{% for m in messages %}",
    b"{% endfor %}",
    b"{% if x %}",
    b"{% endif %}",
    b"{% macro f(x) %}",
    b"{% endmacro %}",
    b"{{ f(f(1)) }}",
    b"{% set ns = namespace(x=0) %}",
    b"{% set ns.x = ns.x + 1 %}",
    b"| tojson",
    b"| trim",
    b"[::-1]",
    b"{% for i in range(1000000) %}",
    b" * 1000000000",
    b"'x' * 999999999",
    b" ~ ",
    b"| join",
    b"| list",
    b"| length",
    b"{% include 'tool_use' %}",
    b"{{ raise_exception('no') }}",
    b"{{ strftime_now('%Y') }}",
    b"messages[-1].content",
    b".split(',')",
    b".replace('', 'xx')",
    b"| indent(99999999)",
    b"| center(99999999)",
    b"{% generation %}",
    b"{#",
    b"-%}",
];

const GGUF: &[&[u8]] = &[
    b"GGUF",
    b"\x03\x00\x00\x00",
    b"\x08\x00\x00\x00",
    b"\x09\x00\x00\x00",
    b"tokenizer.ggml.tokens",
    b"tokenizer.ggml.merges",
    b"tokenizer.ggml.model",
    b"general.architecture",
    b"general.alignment",
    b"gpt2",
    b"llama",
];

pub fn all() -> [Target; 6] {
    [
        in_folder("tokenizer", |input| folder_with("tokenizer.json", input)),
        in_folder("config", |input| folder_with("config.json", input)),
        in_folder("generation_config", |input| {
            folder_with("generation_config.json", input)
        }),
        in_folder("tokenizer_config", |input| {
            folder_with("tokenizer_config.json", input)
        }),
        Target {
            // A template may double a text: minijinja limits its instructions, not its memory (SECURITY.md).
            name: "template",
            words: TEMPLATE,
            max_mib: 1024,
            num_reduced: 20,
            decode: render,
        },
        Target {
            name: "gguf",
            words: GGUF,
            max_mib: 64,
            num_reduced: 100,
            decode: load_gguf,
        },
    ]
}

fn in_folder(name: &'static str, decode: fn(&[u8]) -> bool) -> Target {
    Target {
        name,
        words: JSON,
        max_mib: 128,
        num_reduced: 30,
        decode,
    }
}

thread_local! {
    /// A check model's small files; the file that is read is written over each time.
    static FOLDER: RefCell<Option<TempDir>> = const { RefCell::new(None) };
}

const FILES: [&str; 4] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

fn within_folder<T>(work: impl FnOnce(&Path) -> T) -> T {
    FOLDER.with_borrow_mut(|folder| work(folder.get_or_insert_with(new_folder).path()))
}

fn new_folder() -> TempDir {
    let folder = TempDir::new().expect("there is room for a folder");
    for name in FILES {
        restore(folder.path(), name);
    }
    folder
}

fn restore(folder: &Path, name: &str) {
    fs::copy(
        root().join("tests/models/recall-gqa").join(name),
        folder.join(name),
    )
    .expect("check models have it");
}

fn folder_with(name: &str, input: &[u8]) -> bool {
    within_folder(|folder| {
        fs::write(folder.join(name), input).expect("a file can be written");
        let is_taken = ModelText::load(folder, None).is_ok_and(|model| use_model(&model));
        restore(folder, name);
        is_taken
    })
}

/// What loads must also work.
fn use_model(model: &ModelText) -> bool {
    let tokens = model.encode("Hello, world!  12345 \u{1f642}\n", true, 4096);
    if let Ok(tokens) = tokens {
        drop(model.decode(&tokens));
    }
    drop(model.describe(4096));
    render_with(model);
    true
}

fn load_gguf(input: &[u8]) -> bool {
    within_folder(|folder| {
        let path = folder.join("model.gguf");
        fs::write(&path, input).expect("a file can be written");
        ModelText::load(&path, None).is_ok_and(|model| use_model(&model))
    })
}

fn render(input: &[u8]) -> bool {
    within_folder(|folder| {
        let path = folder.join("template.jinja");
        fs::write(&path, input).expect("a file can be written");
        let model = ModelText::load(folder, None).expect("check models load");
        model
            .with_template_file(&path)
            .is_ok_and(|model| render_with(&model))
    })
}

fn render_with(model: &ModelText) -> bool {
    let message = |value: Value| value.as_object().cloned().unwrap_or_default();
    let messages = [
        message(json!({"role": "system", "content": "Be brief."})),
        message(json!({"role": "user", "content": "Hello <|im_end|> {{ x }}"})),
        message(json!({"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": [1, null]}"}},
        ]})),
        message(json!({"role": "tool", "content": "4", "tool_call_id": "1"})),
    ];
    let tools =
        [json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})];
    let chat = Chat {
        messages: &messages,
        tools: &tools,
        documents: &[],
        kwargs: &Map::new(),
        add_generation_prompt: true,
        continue_final_message: false,
        reasoning_effort: Some("low"),
    };
    model.render(chat, model.max_prompt_bytes(4096)).is_ok()
}
