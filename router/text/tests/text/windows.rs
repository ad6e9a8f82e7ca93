//! Long texts are tokenised window by window: the tokens are those of the whole text.

use plait_text::{EncodeError, ModelText};
use serde_json::{Value, json};

use crate::model_folder::{Folder, byte_level};

/// Pieces of which the texts below are made: what pre-tokenizers look at.
const PIECES: [&str; 24] = [
    " ", "  ", "\n", "\n\n", "\r\n", "\t", "a", "the", "The", "HTTP", "1", "12345", "3.14", "'s",
    "'LL", "...", "!?", "é", "e\u{301}", "東京", "は", "。", "🙂", "<|end|>",
];

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn split(pattern: &str, behavior: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": false})
}

fn bytes(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

fn sequence(parts: &[Value]) -> Value {
    json!({"type": "Sequence", "pretokenizers": parts})
}

fn load(pre_tokenizer: Value, normalizer: Value) -> ModelText {
    let mut tokenizer = byte_level();
    tokenizer["pre_tokenizer"] = pre_tokenizer;
    tokenizer["normalizer"] = normalizer;
    // Each pair of these letters is a token, so that the tokens show where the splits are.
    let letters = [
        "Ġ", "Ċ", "č", "ĉ", "a", "e", "h", "t", "x", "1", "2", ".", "!", "?", "Ã", "å",
    ];
    for pair in letters.iter().flat_map(|a| letters.map(|b| [*a, b])) {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let id = vocab.len();
        if vocab.insert(pair.concat(), json!(id)).is_none() {
            tokenizer["model"]["merges"]
                .as_array_mut()
                .unwrap()
                .push(json!(pair.join(" ")));
        }
    }
    let folder = Folder::new(&tokenizer);
    folder.write_config(&json!({"vocab_size": 1024}));
    folder.load()
}

/// A text of so many pieces, the same for each seed.
fn text(seed: u64, num_pieces: usize) -> String {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let pieces = (0..num_pieces).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        PIECES[(state >> 33) as usize % PIECES.len()]
    });
    pieces.collect()
}

#[test]
fn a_long_text_has_the_tokens_of_its_parts_cut_at_lines() {
    let families = [
        (bytes(true), Value::Null),
        (
            sequence(&[split(LLAMA_3, "Isolated"), bytes(false)]),
            Value::Null,
        ),
        (
            sequence(&[split(QWEN, "Isolated"), bytes(false)]),
            json!({"type": "NFC"}),
        ),
        (
            sequence(&[
                json!({"type": "Digits", "individual_digits": true}),
                bytes(true),
            ]),
            Value::Null,
        ),
        (
            sequence(&[
                split(r"\p{N}{1,3}", "Isolated"),
                split("[一-龥぀-ゟ゠-ヿ]+", "Isolated"),
                bytes(true),
            ]),
            Value::Null,
        ),
    ];
    for (pre_tokenizer, normalizer) in families {
        let model = load(pre_tokenizer, normalizer);
        let encode = |text: &str| model.encode(text, false, usize::MAX).unwrap();
        // No pattern joins a line's last letter, its end and the next line's first letter.
        let lines: Vec<String> = (0..40)
            .map(|seed| format!("x{}x\n", text(seed, 3000)))
            .collect();
        let whole = lines.concat();
        assert!(whole.len() > 4 * (64 << 10), "several windows");
        let parts: Vec<u32> = lines.iter().flat_map(|line| encode(line)).collect();
        assert_eq!(encode(&whole), parts);
    }
}

#[test]
fn a_window_ends_at_no_part_of_a_character() {
    let model = load(bytes(true), json!({"type": "NFKC"}));
    let encode = |text: &str| model.encode(text, false, usize::MAX).unwrap();
    let line = format!("{}\n", "½x".repeat(99));
    let parts = encode(&line).repeat(500);
    assert_eq!(encode(&line.repeat(500)), parts);
}

#[test]
fn tokenising_stops_past_what_is_asked_for() {
    let model = load(bytes(true), Value::Null);
    let text = "a ".repeat(1 << 20);
    assert_eq!(model.encode(&text, false, 100), Err(EncodeError::TooMany));
    let num = model.encode("a b", false, usize::MAX).unwrap().len();
    assert!(model.encode("a b", false, num).is_ok());
    assert_eq!(
        model.encode("a b", false, num - 1),
        Err(EncodeError::TooMany)
    );
}

#[test]
fn a_run_without_a_break_is_bounded() {
    let model = load(bytes(true), Value::Null);
    let max_bytes = 256 << 10;
    assert!(
        model
            .encode(&"a".repeat(max_bytes), false, usize::MAX)
            .is_ok()
    );
    for too_long in [max_bytes + 1, 4 << 20] {
        let run = format!("b {} b", "a".repeat(too_long));
        assert_eq!(
            model.encode(&run, false, usize::MAX),
            Err(EncodeError::Run { max_bytes })
        );
    }
}
