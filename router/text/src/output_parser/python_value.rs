//! One Python literal that comes in pieces and leaves as JSON.

use super::call::Reading;
use super::json::{escape_into, is_number};

#[derive(Debug, Default)]
pub(super) struct PythonValue {
    /// The brackets that are open, the innermost last.
    open: Vec<Bracket>,
    place: Place,
    /// A number or a name so far.
    word: String,
    /// A comma came, and perhaps no item follows it.
    has_comma: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bracket {
    List,
    /// What is next is a key, or a value.
    Dict {
        is_key: bool,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Between,
    Word,
    /// Within a text that began with this quote.
    Text(char),
}

/// How much was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    Bytes(usize),
    /// The value ends after so many.
    End(usize),
    /// More text decides.
    Undecided,
}

impl PythonValue {
    /// Reads on; whether the value is complete.
    pub(super) fn read(&mut self, reading: &mut Reading<'_, '_>) -> bool {
        let mut json = String::new();
        let is_over = loop {
            let rest = reading.held.rest();
            let Some(next) = rest.chars().next() else {
                break false;
            };
            let read = match self.place {
                Place::Between => self.read_between(next, &mut json),
                Place::Word => self.read_word(rest, &mut json),
                Place::Text(quote) => self.read_text(quote, rest, &mut json),
            };
            match read {
                Read::Bytes(num_bytes) => reading.held.advance(num_bytes),
                Read::End(num_bytes) => {
                    reading.held.advance(num_bytes);
                    break true;
                }
                Read::Undecided => break false,
            }
        };
        reading.arguments(&json);
        is_over
    }

    /// No text follows.
    pub(super) fn flush(&mut self, reading: &mut Reading<'_, '_>) {
        let word = std::mem::take(&mut self.word);
        reading.arguments(&word);
    }

    fn read_between(&mut self, next: char, json: &mut String) -> Read {
        match next {
            ' ' | '\n' | '\r' | '\t' => {}
            '[' | '(' => self.open(Bracket::List, '[', json),
            '{' => self.open(Bracket::Dict { is_key: true }, '{', json),
            ']' | ')' | '}' => return self.close(json),
            ',' if self.open.is_empty() => return Read::End(0),
            ',' => {
                self.has_comma = true;
                self.expect_key(true);
            }
            ':' => {
                json.push_str(": ");
                self.expect_key(false);
            }
            '"' | '\'' => {
                self.begin_item(json);
                json.push('"');
                self.place = Place::Text(next);
            }
            _ => {
                self.begin_item(json);
                self.place = Place::Word;
                return Read::Bytes(0);
            }
        }
        Read::Bytes(next.len_utf8())
    }

    fn begin_item(&mut self, json: &mut String) {
        if std::mem::take(&mut self.has_comma) {
            json.push_str(", ");
        }
    }

    fn expect_key(&mut self, is_next: bool) {
        if let Some(Bracket::Dict { is_key }) = self.open.last_mut() {
            *is_key = is_next;
        }
    }

    fn open(&mut self, bracket: Bracket, sign: char, json: &mut String) {
        self.begin_item(json);
        json.push(sign);
        self.open.push(bracket);
    }

    fn close(&mut self, json: &mut String) -> Read {
        self.has_comma = false;
        match self.open.pop() {
            None => {
                json.push_str("null");
                return Read::End(0);
            }
            Some(Bracket::List) => json.push(']'),
            Some(Bracket::Dict { .. }) => json.push('}'),
        }
        self.item(1)
    }

    /// So many bytes, which end the value unless it is within brackets.
    fn item(&self, num_bytes: usize) -> Read {
        match self.open.is_empty() {
            true => Read::End(num_bytes),
            false => Read::Bytes(num_bytes),
        }
    }

    fn read_word(&mut self, rest: &str, json: &mut String) -> Read {
        let end = rest.find([',', ':', ']', ')', '}', ' ', '\n', '\r', '\t']);
        self.word.push_str(&rest[..end.unwrap_or(rest.len())]);
        let Some(end) = end else {
            return Read::Bytes(rest.len());
        };
        let word = std::mem::take(&mut self.word);
        let is_key = matches!(self.open.last(), Some(Bracket::Dict { is_key: true }));
        match json_word(&word).filter(|_| !is_key) {
            Some(value) => json.push_str(value),
            None => {
                json.push('"');
                escape_into(&word, json);
                json.push('"');
            }
        }
        self.place = Place::Between;
        self.item(end)
    }

    fn read_text(&mut self, quote: char, rest: &str, json: &mut String) -> Read {
        match rest.find([quote, '\\']) {
            None => {
                escape_into(rest, json);
                Read::Bytes(rest.len())
            }
            Some(0) if rest.starts_with(quote) => {
                json.push('"');
                self.place = Place::Between;
                self.item(1)
            }
            Some(0) => read_escape(rest, json),
            Some(end) => {
                escape_into(&rest[..end], json);
                Read::Bytes(end)
            }
        }
    }
}

/// The word as JSON, if it stands for something else than its text.
fn json_word(word: &str) -> Option<&str> {
    match word {
        "True" | "true" => Some("true"),
        "False" | "false" => Some("false"),
        "None" | "null" => Some("null"),
        _ => is_number(word).then_some(word),
    }
}

/// The escape with which `rest` begins.
fn read_escape(rest: &str, json: &mut String) -> Read {
    let Some(kind) = rest[1..].chars().next() else {
        return Read::Undecided;
    };
    let num_digits = match kind {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => 0,
    };
    if num_digits > 0 {
        return read_code(rest, num_digits, json);
    }
    let stands_for = match kind {
        'n' => "\n",
        't' => "\t",
        'r' => "\r",
        'b' => "\u{8}",
        'f' => "\u{c}",
        'a' => "\u{7}",
        'v' => "\u{b}",
        '0' => "\0",
        '\n' => "",
        '\\' | '\'' | '"' => &rest[1..2],
        // Python keeps the backslash of what is no escape.
        kind => &rest[..1 + kind.len_utf8()],
    };
    escape_into(stands_for, json);
    Read::Bytes(1 + kind.len_utf8())
}

/// `\x41`, `\u0041` or `\U00000041`. Halves of a surrogate pair stay halves, which JSON writes so too.
fn read_code(rest: &str, num_digits: usize, json: &mut String) -> Read {
    let num_bytes = 2 + num_digits;
    if rest.len() < num_bytes {
        return Read::Undecided;
    }
    let digits = rest.get(2..num_bytes);
    let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
    match code.map(|code| (code, char::from_u32(code))) {
        Some((_, Some(letter))) => escape_into(letter.encode_utf8(&mut [0; 4]), json),
        Some((code @ 0xd800..0xe000, None)) => json.push_str(&format!("\\u{code:04x}")),
        _ => {
            escape_into(&rest[..2], json);
            return Read::Bytes(2);
        }
    }
    Read::Bytes(num_bytes)
}
