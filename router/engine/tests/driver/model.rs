//! A model's text side in which each byte is one token.

use std::fs;
use std::path::Path;

use serde_json::{Map, json};

/// The end token, after the 256 bytes.
pub const END: u32 = 256;
/// Tokens of the model.
pub const VOCAB_SIZE: u32 = 257;
/// Positions of the model.
pub const CONTEXT: u32 = 512;

/// Writes tokenizer.json and config.json into `folder`.
pub fn write(folder: &Path) {
    let bytes = (0..=255).map(|byte| (byte_level_char(byte).to_string(), json!(byte)));
    let mut vocab: Map<_, _> = bytes.collect();
    vocab.insert("<end>".to_owned(), json!(END));
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [{
            "id": END, "content": "<end>", "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        }],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT, "eos_token_id": END,
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// GPT-2's printable stand-in for a byte.
fn byte_level_char(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_printable(byte) {
        return char::from(byte);
    }
    let num_before = (0..byte).filter(|byte| !is_printable(*byte)).count();
    char::from_u32(256 + u32::try_from(num_before).unwrap()).unwrap()
}
