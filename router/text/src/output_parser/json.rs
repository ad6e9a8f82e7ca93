//! JSON that comes in pieces: where a value ends, and texts with and without escapes.

use serde::de::IgnoredAny;

use super::held::Held;

/// Finds the end of one JSON value. Brackets and strings count; what is between them is the model's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ValueEnd {
    depth: u32,
    place: Place,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Before,
    Within,
    Scalar,
    String,
    Escape,
}

impl ValueEnd {
    /// Bytes of `text` that belong to the value, and whether it ends with them.
    pub(super) fn read(&mut self, text: &str) -> (usize, bool) {
        for (index, byte) in text.bytes().enumerate() {
            match self.read_byte(byte) {
                None => {}
                Some(is_part) => return (index + usize::from(is_part), true),
            }
        }
        (text.len(), false)
    }

    /// `Some` ends the value: with this byte if true, else before it.
    fn read_byte(&mut self, byte: u8) -> Option<bool> {
        match (self.place, byte) {
            (Place::Escape, _) => self.place = Place::String,
            (Place::String, b'\\') => self.place = Place::Escape,
            (Place::String, b'"') => return self.leave(),
            (Place::String, _) => {}
            (Place::Scalar, b',' | b'}' | b']' | b' ' | b'\n' | b'\r' | b'\t') => {
                return Some(false);
            }
            (Place::Scalar, _) => {}
            (_, b'"') => self.place = Place::String,
            (_, b'{' | b'[') => {
                self.depth += 1;
                self.place = Place::Within;
            }
            (Place::Within, b'}' | b']') => {
                self.depth -= 1;
                return self.leave();
            }
            (Place::Within, _) => {}
            (Place::Before, _) => self.place = Place::Scalar,
        }
        None
    }

    fn leave(&mut self) -> Option<bool> {
        self.place = Place::Within;
        (self.depth == 0).then_some(true)
    }
}

/// Whether the text is one of JSON's numbers, however large.
pub(super) fn is_number(text: &str) -> bool {
    let begins = text.starts_with(|first: char| first == '-' || first.is_ascii_digit());
    begins && serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// What a text's next part is.
pub(super) enum Part {
    /// So many bytes stand for themselves.
    Plain(usize),
    /// So many bytes stand for this character.
    Escaped(usize, char),
    /// The text ends before the next byte, a quote.
    End,
    /// More text decides.
    Undecided,
}

/// The next part of a JSON text's inside.
pub(super) fn next_part(text: &str) -> Part {
    match text.find(['"', '\\']) {
        None if text.is_empty() => Part::Undecided,
        None => Part::Plain(text.len()),
        Some(0) if text.starts_with('"') => Part::End,
        Some(0) => escape(text),
        Some(length) => Part::Plain(length),
    }
}

/// The escape with which `text` begins.
fn escape(text: &str) -> Part {
    let simple = |letter| Part::Escaped(2, letter);
    match text.as_bytes().get(1) {
        None => Part::Undecided,
        Some(b'n') => simple('\n'),
        Some(b't') => simple('\t'),
        Some(b'r') => simple('\r'),
        Some(b'b') => simple('\u{8}'),
        Some(b'f') => simple('\u{c}'),
        Some(b'u') => unicode_escape(text),
        Some(_) => {
            let letter = text[1..].chars().next().unwrap_or('\\');
            Part::Escaped(1 + letter.len_utf8(), letter)
        }
    }
}

/// `\u0041`, or two of them for a character beyond U+FFFF; U+FFFD for what is none.
fn unicode_escape(text: &str) -> Part {
    const LENGTH: usize = "\\u0000".len();
    let unit = |from: usize| u32::from_str_radix(text.get(from + 2..from + LENGTH)?, 16).ok();
    if text.len() < LENGTH {
        return Part::Undecided;
    }
    let Some(first) = unit(0) else {
        return Part::Escaped(2, char::REPLACEMENT_CHARACTER);
    };
    if let Some(letter) = char::from_u32(first) {
        return Part::Escaped(LENGTH, letter);
    }
    let rest = &text[LENGTH..];
    if rest.len() < LENGTH && (rest.starts_with("\\u") || "\\u".starts_with(rest)) {
        return Part::Undecided;
    }
    let low = unit(LENGTH).filter(|low| rest.starts_with("\\u") && (0xdc00..0xe000).contains(low));
    match low.filter(|_| first < 0xdc00) {
        None => Part::Escaped(LENGTH, char::REPLACEMENT_CHARACTER),
        Some(low) => {
            let code = 0x10000 + ((first - 0xd800) << 10) + (low - 0xdc00);
            let letter = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
            Part::Escaped(2 * LENGTH, letter)
        }
    }
}

/// Reads a short JSON text, quotes and all, from where `held` is: `Ok(None)` if more decides, an error if there is
/// none or it is too long for a name.
pub(super) fn read_short_text(held: &mut Held) -> Result<Option<String>, NoText> {
    let rest = held.rest();
    if rest.is_empty() {
        return Ok(None);
    }
    let Some(inside) = rest.strip_prefix('"') else {
        return Err(NoText);
    };
    let mut text = String::new();
    let mut at = 0;
    while text.len() <= super::held::MAX_NAME_BYTES {
        match next_part(&inside[at..]) {
            Part::Plain(length) => {
                text.push_str(&inside[at..at + length]);
                at += length;
            }
            Part::Escaped(length, letter) => {
                text.push(letter);
                at += length;
            }
            Part::End => {
                held.advance(1 + at + 1);
                return Ok(Some(text));
            }
            Part::Undecided => return Ok(None),
        }
    }
    Err(NoText)
}

/// No text, or one that is too long.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoText;

/// Appends `text` as the inside of a JSON text.
pub(super) fn escape_into(text: &str, out: &mut String) {
    for letter in text.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            letter if letter < ' ' => {
                out.push_str("\\u00");
                out.extend([u32::from(letter) >> 4, u32::from(letter) & 15].map(hex_digit));
            }
            letter => out.push(letter),
        }
    }
}

fn hex_digit(value: u32) -> char {
    char::from_digit(value, 16).unwrap_or('0')
}
