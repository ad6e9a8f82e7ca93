//! GGUF files: what is taken from them, and what is said of broken ones.

use std::fs;

use plait_text::ModelText;
use proptest::prelude::*;
use serde_json::Value;
use tempfile::TempDir;

/// A value of the metadata.
#[derive(Clone)]
enum Meta {
    Text(&'static str),
    U32(u32),
    Bool(bool),
    Texts(Vec<String>),
    Kinds(Vec<i32>),
}

fn text(text: &str) -> Vec<u8> {
    let length = (text.len() as u64).to_le_bytes();
    [&length[..], text.as_bytes()].concat()
}

impl Meta {
    fn bytes(&self) -> Vec<u8> {
        let kind = |kind: u32| kind.to_le_bytes().to_vec();
        let list =
            |of: u32, num: usize| [kind(9), kind(of), (num as u64).to_le_bytes().to_vec()].concat();
        match self {
            Self::U32(number) => [kind(4), number.to_le_bytes().to_vec()].concat(),
            Self::Bool(flag) => [kind(7), vec![u8::from(*flag)]].concat(),
            Self::Text(value) => [kind(8), text(value)].concat(),
            Self::Kinds(kinds) => {
                let items = kinds.iter().flat_map(|kind| kind.to_le_bytes()).collect();
                [list(5, kinds.len()), items].concat()
            }
            Self::Texts(texts) => {
                let items = texts.iter().flat_map(|item| text(item)).collect();
                [list(8, texts.len()), items].concat()
            }
        }
    }
}

/// A file with one tensor of 32 bytes.
fn gguf(metadata: &[(&str, Meta)]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(1_u64.to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        bytes.extend(text(key));
        bytes.extend(value.bytes());
    }
    bytes.extend(text("token_embd.weight"));
    bytes.extend(2_u32.to_le_bytes());
    bytes.extend([4_u64, 9].iter().flat_map(|size| size.to_le_bytes()));
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(32) + 32, 0);
    bytes
}

/// Nine tokens: three control ones, a user's own, letters, and a merge of them.
fn metadata() -> Vec<(&'static str, Meta)> {
    let tokens = [
        "<s>", "</s>", "<|end|>", "<think>", "a", "b", "ab", "Ġ", "é",
    ];
    vec![
        ("general.architecture", Meta::Text("llama")),
        ("llama.context_length", Meta::U32(64)),
        ("tokenizer.ggml.model", Meta::Text("gpt2")),
        ("tokenizer.ggml.pre", Meta::Text("gpt-2")),
        (
            "tokenizer.ggml.tokens",
            Meta::Texts(tokens.map(str::to_owned).to_vec()),
        ),
        (
            "tokenizer.ggml.token_type",
            Meta::Kinds(vec![3, 3, 3, 4, 1, 1, 1, 1, 1]),
        ),
        ("tokenizer.ggml.merges", Meta::Texts(vec!["a b".to_owned()])),
        ("tokenizer.ggml.bos_token_id", Meta::U32(0)),
        ("tokenizer.ggml.eos_token_id", Meta::U32(1)),
        ("tokenizer.ggml.eot_token_id", Meta::U32(2)),
        ("tokenizer.ggml.add_bos_token", Meta::Bool(true)),
        (
            "tokenizer.chat_template",
            Meta::Text("{{ messages[0].content }}"),
        ),
    ]
}

fn load(bytes: &[u8]) -> Result<ModelText, String> {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("small.gguf");
    fs::write(&path, bytes).unwrap();
    ModelText::load(&path, None).map_err(|error| error.to_string())
}

fn load_with(key: &'static str, value: Meta) -> Result<ModelText, String> {
    let mut metadata = metadata();
    metadata.retain(|(name, _)| *name != key);
    metadata.push((key, value));
    load(&gguf(&metadata))
}

#[test]
fn a_gguf_describes_itself() {
    let model = load(&gguf(&metadata())).unwrap();
    let told: Value = serde_json::from_str(&model.describe(64)).unwrap();
    assert_eq!(told["model_id"], "small");
    assert_eq!(told["architecture"], "llama");
    assert_eq!(told["vocab_size"], 9);
    assert_eq!(told["eos_token_ids"], serde_json::json!([1, 2]));
    assert_eq!(model.context_length(), 64);
}

#[test]
fn a_ggufs_tokens_are_merged_and_found_whole() {
    let model = load(&gguf(&metadata())).unwrap();
    assert_eq!(
        model.encode("ab ba<think>", true, usize::MAX).unwrap(),
        [0, 6, 7, 5, 4, 3]
    );
    assert_eq!(model.encode("<|end|>a", false, usize::MAX).unwrap(), [2, 4]);
}

#[test]
fn what_is_not_supported_is_named() {
    for (key, value, expected) in [
        (
            "general.architecture",
            Meta::Text("gemma3"),
            "`gemma3` is not served; these are: llama",
        ),
        (
            "tokenizer.ggml.model",
            Meta::Text("t5"),
            "tokenizer model `t5` is not supported",
        ),
        (
            "tokenizer.ggml.pre",
            Meta::Text("tekken"),
            "pre-tokenizer `tekken` is not supported",
        ),
        (
            "tokenizer.ggml.bos_token_id",
            Meta::U32(9),
            "is 9, and there are 9 tokens",
        ),
        (
            "llama.context_length",
            Meta::Bool(true),
            "`llama.context_length` is not a whole number",
        ),
        (
            "tokenizer.ggml.merges",
            Meta::Texts(vec!["ab".into()]),
            "merge `ab` is not a pair",
        ),
        (
            "tokenizer.ggml.merges",
            Meta::Texts(vec!["x y".into()]),
            "merges that do not fit",
        ),
        (
            "tokenizer.chat_template",
            Meta::Text("{% if %}"),
            "chat template that is broken",
        ),
    ] {
        let error = load_with(key, value).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_key_that_is_missing_is_named() {
    for missing in [
        "general.architecture",
        "llama.context_length",
        "tokenizer.ggml.tokens",
    ] {
        let mut metadata = metadata();
        metadata.retain(|(name, _)| *name != missing);
        let error = load(&gguf(&metadata)).unwrap_err();
        assert!(
            error.contains(&format!("has no key `{missing}`")),
            "{error}"
        );
    }
}

#[test]
fn a_gguf_that_is_cut_anywhere_is_told_apart() {
    let whole = gguf(&metadata());
    for length in 0..whole.len() - 32 {
        let error = load(&whole[..length]).unwrap_err();
        let expected = if length < 4 {
            "neither a folder nor a GGUF"
        } else {
            "is truncated"
        };
        assert!(error.contains(expected), "{length}: {error}");
    }
}

#[test]
fn counts_and_lengths_are_checked_before_they_are_believed() {
    let whole = gguf(&metadata());
    let with = |at: usize, number: u64| {
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        load(&bytes).unwrap_err()
    };
    assert!(with(8, u64::MAX).contains("tensors, where 65536 are allowed"));
    assert!(with(16, u64::MAX).contains("metadata keys, where 4096 are allowed"));
    assert!(with(24, u64::MAX).contains("where 1024 are allowed"));
    let tokens = whole
        .windows(21)
        .position(|at| at == b"tokenizer.ggml.tokens")
        .unwrap();
    assert!(with(tokens + 29, u64::MAX).contains("items of an array, where 4194304 are allowed"));
    assert!(with(tokens + 29, 4 << 20).contains("is truncated"));
    assert!(with(tokens + 37, 1 << 30).contains("where 4194304 are allowed"));
}

#[test]
fn other_files_are_not_taken_for_ggufs() {
    assert!(
        load(b"PK\x03\x04 and so on, a zip")
            .unwrap_err()
            .contains("neither a folder nor")
    );
    let mut old = gguf(&metadata());
    old[4] = 1;
    assert!(
        load(&old)
            .unwrap_err()
            .contains("version 1; 2 and 3 are read")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_spoilt_gguf_is_an_error_or_a_model_but_never_a_crash(
        spoilt in prop::collection::vec((0..600_usize, any::<u8>()), 1..6),
    ) {
        let mut bytes = gguf(&metadata());
        for (at, byte) in spoilt {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        let _ = load(&bytes);
    }
}
