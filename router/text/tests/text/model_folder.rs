//! Small models' folders. `plait-openai`'s tests use this file too.

use std::fs;
use std::path::Path;

use plait_text::ModelText;
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
