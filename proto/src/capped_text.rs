//! Strings on the wire. The sender cuts them, the receiver rejects longer ones.

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::Serializer;

/// Bytes that a string may have.
pub const MAX_TEXT_BYTES: usize = 4096;

pub fn serialize<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(cut(text, MAX_TEXT_BYTES))
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.len() > MAX_TEXT_BYTES {
        let reason = format!(
            "a string of {} bytes; {MAX_TEXT_BYTES} are allowed",
            text.len()
        );
        return Err(D::Error::custom(reason));
    }
    Ok(text)
}

/// As many whole characters as `max_bytes` hold.
pub fn cut(text: &str, max_bytes: usize) -> &str {
    let mut end = text.len().min(max_bytes);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(cut("aé", 2), "a");
        assert_eq!(cut("aé", 3), "aé");
        assert_eq!(cut("é", 0), "");
    }
}
