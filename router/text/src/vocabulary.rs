//! Every token's bytes in one table: detokenising is a lookup.

use plait_core::TokenId;
use serde_json::Value;
use tokenizers::{Model, Tokenizer};

/// The most rows of an output head. More means a broken file.
const MAX_TOKENS: u32 = 1 << 22;

/// A decoder or a token table without a known inverse; the text says which.
pub(crate) type Unsupported = String;

/// What each token adds to a text, and how tokens join.
#[derive(Debug)]
pub struct Vocabulary {
    pub(crate) joining: Joining,
    kinds: Vec<PieceKind>,
    /// Piece i is `bytes[ends[i - 1]..ends[i]]`.
    ends: Vec<usize>,
    bytes: Vec<u8>,
    longest: usize,
}

/// How pieces become text, as the tokenizer's decoder says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Joining {
    /// All tokens are bytes of one UTF-8 stream (byte-level BPE).
    ByteLevel,
    /// Tokens are text. A run of byte tokens is UTF-8 as a whole or not at all (SentencePiece).
    ByteFallback { strip: LeadingStrip },
}

/// Characters that are dropped at the very beginning of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeadingStrip {
    pub(crate) content: char,
    pub(crate) num_left: usize,
}

/// What a token is to the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceKind {
    /// UTF-8 text, or bytes of it with [`Joining::ByteLevel`].
    Text,
    /// One byte that stands for itself.
    Byte,
    /// Not shown: a special token.
    Hidden,
}

/// What one token adds to a text.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Whether and how it is shown.
    pub kind: PieceKind,
    /// What it adds to a text.
    pub bytes: &'a [u8],
}

impl Vocabulary {
    /// Tabulates the tokens `0..num_tokens`; ids that the tokenizer does not know add nothing.
    pub(crate) fn new(tokenizer: &Tokenizer, num_tokens: u32) -> Result<Self, Unsupported> {
        if !(1..=MAX_TOKENS).contains(&num_tokens) {
            return Err(format!(
                "the vocabulary has {num_tokens} tokens, where 1 to {MAX_TOKENS} are allowed"
            ));
        }
        let decoder = Decoder::of(tokenizer)?;
        let mut table = Self {
            joining: decoder.joining(),
            kinds: Vec::with_capacity(num_tokens as usize),
            ends: Vec::with_capacity(num_tokens as usize),
            bytes: Vec::new(),
            longest: 1,
        };
        for id in 0..num_tokens {
            let (kind, piece) = decoder.piece(tokenizer, id);
            table.append(kind, &piece);
        }
        Ok(table)
    }

    fn append(&mut self, kind: PieceKind, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
        self.kinds.push(kind);
        self.ends.push(self.bytes.len());
        self.longest = self.longest.max(piece.len());
    }

    /// What a token adds; an unknown id is hidden and empty.
    pub fn piece(&self, id: TokenId) -> Piece<'_> {
        let index = id as usize;
        let Some(&kind) = self.kinds.get(index) else {
            return Piece {
                kind: PieceKind::Hidden,
                bytes: &[],
            };
        };
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Piece {
            kind,
            bytes: &self.bytes[start..self.ends[index]],
        }
    }

    /// Bytes of the longest token.
    pub(crate) fn longest_piece(&self) -> usize {
        self.longest
    }
}

/// The supported decoders: byte-level BPE, and SentencePiece's chain.
enum Decoder {
    ByteLevel { byte_of: Box<[Option<u8>; 0x144]> },
    Chain(Chain),
}

/// `Replace*`, `ByteFallback`?, `Fuse`?, `Strip`?, in this order.
#[derive(Default)]
struct Chain {
    replacements: Vec<(String, String)>,
    byte_fallback: bool,
    fuse: bool,
    strip: Option<LeadingStrip>,
}

impl Decoder {
    fn of(tokenizer: &Tokenizer) -> Result<Self, Unsupported> {
        let decoder = serde_json::to_value(tokenizer.get_decoder())
            .map_err(|error| format!("the tokenizer's decoder cannot be read: {error}"))?;
        match decoder["type"].as_str() {
            Some("ByteLevel") => Ok(Self::ByteLevel {
                byte_of: byte_of_letter(),
            }),
            Some("Sequence") => {
                let steps = decoder["decoders"]
                    .as_array()
                    .map_or(&[][..], Vec::as_slice);
                Chain::of(steps).map(Self::Chain)
            }
            _ => Err(unsupported(&decoder)),
        }
    }

    fn joining(&self) -> Joining {
        match self {
            Self::ByteLevel { .. } => Joining::ByteLevel,
            Self::Chain(chain) => Joining::ByteFallback {
                strip: chain.strip.unwrap_or(LeadingStrip {
                    content: ' ',
                    num_left: 0,
                }),
            },
        }
    }

    fn piece(&self, tokenizer: &Tokenizer, id: TokenId) -> (PieceKind, Vec<u8>) {
        let added = tokenizer.get_added_vocabulary();
        let spelling = added
            .simple_id_to_token(id)
            .or_else(|| tokenizer.get_model().id_to_token(id));
        let Some(spelling) = spelling else {
            return (PieceKind::Hidden, Vec::new());
        };
        let (kind, bytes) = match self {
            Self::ByteLevel { byte_of } => {
                (PieceKind::Text, spelled_bytes(&byte_of[..], &spelling))
            }
            Self::Chain(chain) => chain.piece(&spelling),
        };
        if added.is_special_token(&spelling) {
            return (PieceKind::Hidden, bytes);
        }
        (kind, bytes)
    }
}

impl Chain {
    fn of(steps: &[Value]) -> Result<Self, Unsupported> {
        let mut chain = Self::default();
        for step in steps {
            chain.add(step).ok_or_else(|| unsupported(step))?;
        }
        Ok(chain)
    }

    /// Takes the next step; `None` if it is unknown or out of order.
    fn add(&mut self, step: &Value) -> Option<()> {
        match step["type"].as_str()? {
            "Replace" if !self.byte_fallback && !self.fuse => {
                let from = step["pattern"]["String"].as_str()?;
                let to = step["content"].as_str()?;
                self.replacements.push((from.to_owned(), to.to_owned()));
            }
            "ByteFallback" if !self.fuse => self.byte_fallback = true,
            "Fuse" => self.fuse = true,
            "Strip" if self.fuse && self.strip.is_none() && step["stop"] == 0 => {
                self.strip = Some(LeadingStrip {
                    content: step["content"].as_str()?.chars().next()?,
                    num_left: usize::try_from(step["start"].as_u64()?).ok()?,
                });
            }
            _ => return None,
        }
        Some(())
    }

    fn piece(&self, spelling: &str) -> (PieceKind, Vec<u8>) {
        let mut text = spelling.to_owned();
        for (from, to) in &self.replacements {
            text = text.replace(from, to);
        }
        match fallback_byte(&text).filter(|_| self.byte_fallback) {
            Some(byte) => (PieceKind::Byte, vec![byte]),
            None => (PieceKind::Text, text.into_bytes()),
        }
    }
}

/// The byte that a token such as `<0x0A>` stands for.
fn fallback_byte(spelling: &str) -> Option<u8> {
    let digits = spelling.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The bytes that a byte-level spelling stands for; one with a foreign letter stands for itself.
fn spelled_bytes(byte_of: &[Option<u8>], spelling: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = spelling
        .chars()
        .map(|letter| byte_of.get(letter as usize).copied().flatten())
        .collect();
    bytes.unwrap_or_else(|| spelling.as_bytes().to_vec())
}

/// The letter that GPT-2's alphabet writes for each byte: printable bytes stand for themselves, the
/// other 68 are written as the letters from U+0100 on.
pub(crate) fn letter_of_byte() -> [char; 256] {
    let mut next_foreign = 0x100;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let letter = if printable {
            byte as u32
        } else {
            next_foreign += 1;
            next_foreign - 1
        };
        char::from_u32(letter).expect("letters lie below U+0144")
    })
}

fn byte_of_letter() -> Box<[Option<u8>; 0x144]> {
    let mut byte_of = Box::new([None; 0x144]);
    for (byte, letter) in (0..=u8::MAX).zip(letter_of_byte()) {
        byte_of[letter as usize] = Some(byte);
    }
    byte_of
}

fn unsupported(decoder: &Value) -> Unsupported {
    format!(
        "the tokenizer's decoder `{}` is not supported; ByteLevel is, and the sequence Replace, \
         ByteFallback, Fuse, Strip (of leading characters)",
        decoder["type"].as_str().unwrap_or("none")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2s_alphabet_has_a_letter_for_each_byte() {
        let letters = letter_of_byte();
        assert_eq!(letters[usize::from(b' ')], 'Ġ');
        assert_eq!(letters[usize::from(b'\n')], 'Ċ');
        assert_eq!(letters[0xad], 'Ń');
        let byte_of = byte_of_letter();
        for (byte, letter) in (0..=u8::MAX).zip(letters) {
            assert_eq!(byte_of[letter as usize], Some(byte));
        }
    }

    #[test]
    fn only_whole_byte_tokens_are_bytes() {
        assert_eq!(fallback_byte("<0x0A>"), Some(10));
        assert_eq!(fallback_byte("<0x0>"), None);
        assert_eq!(fallback_byte("<0x0AB>"), None);
        assert_eq!(fallback_byte("0x0A"), None);
    }
}
