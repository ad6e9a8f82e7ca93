//! A text's tokens, computed window by window, so that neither time nor memory follows from what a client sends.

use plait_core::TokenId;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{
    Encoding, Model as _, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer as _, Token, Tokenizer,
};

/// Bytes of a text that the tokenizer sees at a time. It takes 130 bytes of memory for each.
const WINDOW_BYTES: usize = 64 << 10;
/// Longest run without a break of the pre-tokenizer: BPE takes 0.1 s for it.
const MAX_RUN_BYTES: usize = 256 << 10;
/// Splits that begin so near to a window's end are left to the next window, which sees what follows.
const MARGIN_BYTES: usize = 64;
/// Stands for a text where special tokens are put around it.
const MARKER: TokenId = TokenId::MAX;
/// Windows must not change the tokens of this text.
const SAMPLE: &str = "It's 12345 words,  and   more: don't!\n\n  def f(x):\n\treturn x[1:]+\"é\"  # 3.14159\r\n \
    Größe ÅNGSTRÖM naïve cafe\u{301} 東京は今日も晴れです。人口は13960000人 مرحبا بالعالم नमस्ते दुनिया 🙂🙃👩‍👩‍👧 \
    HTTPServerError camelCase_snake ....!!!???    \n   \n\n x1y2z3 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa \
    WE'LL they're I'M  \t\t tab  1 22 333 4444 55555  end\n";

/// Why a text has no tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// It has more than were asked for.
    #[error("the text has too many tokens")]
    TooMany,
    /// So many bytes come without a break of the pre-tokenizer.
    #[error("the text has a run of more than {max_bytes} bytes without a break")]
    Run {
        /// What is allowed.
        max_bytes: usize,
    },
    /// A sentence.
    #[error("the text cannot be tokenised: {0}")]
    Failed(String),
}

/// A tokenizer with what is known of it.
#[derive(Debug)]
pub(crate) struct TextEncoder {
    tokenizer: Tokenizer,
    /// Special tokens before and after a text.
    frame: [Vec<TokenId>; 2],
    /// Whether windows give the tokens of the whole text.
    has_windows: bool,
}

impl TextEncoder {
    /// The error is a sentence.
    pub(crate) fn new(tokenizer: Tokenizer) -> Result<Self, String> {
        let frame = read_frame(&tokenizer).map_err(|error| error.to_string())?;
        let mut encoder = Self {
            tokenizer,
            frame,
            has_windows: true,
        };
        encoder.has_windows = can_be_cut(&encoder.tokenizer) && encoder.keeps_the_sample();
        Ok(encoder)
    }

    /// Special tokens before and after a text.
    pub(crate) fn frame(&self) -> &[Vec<TokenId>; 2] {
        &self.frame
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// At most `max_tokens` tokens; `add_special_tokens` puts the tokenizer's own around the text's.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        max_tokens: usize,
    ) -> Result<Vec<TokenId>, EncodeError> {
        let window = if self.has_windows {
            WINDOW_BYTES
        } else {
            text.len()
        };
        let ids = self.encode_windows(text, window, max_tokens)?;
        match add_special_tokens {
            true => {
                let [before, after] = &self.frame;
                Ok([before.as_slice(), &ids, after].concat())
            }
            false => Ok(ids),
        }
    }

    fn encode_windows(
        &self,
        text: &str,
        window: usize,
        max_tokens: usize,
    ) -> Result<Vec<TokenId>, EncodeError> {
        let (mut ids, mut rest, mut size) = (Vec::new(), text, window);
        while !rest.is_empty() {
            let seen = &rest[..char_boundary(rest, size.max(4))];
            let splits = self.split(seen).map_err(failed)?;
            let splits = splits.get_splits(OffsetReferential::Original, OffsetType::Byte);
            let is_last = seen.len() == rest.len();
            let num_kept = if is_last {
                splits.len()
            } else {
                num_certain(&splits, seen.len())
            };
            if num_kept == 0 && !is_last {
                size *= 2;
                check_run(size / 2)?;
                continue;
            }
            for (piece, _, tokens) in &splits[..num_kept] {
                self.push_tokens(piece, tokens.as_deref(), &mut ids)?;
                if ids.len() > max_tokens {
                    return Err(EncodeError::TooMany);
                }
            }
            let end = splits
                .get(num_kept)
                .map_or(seen.len(), |(_, offsets, _)| offsets.0);
            (rest, size) = (&rest[end..], window);
        }
        Ok(ids)
    }

    /// The pre-tokenizer's splits, and added tokens among them.
    fn split(&self, text: &str) -> tokenizers::Result<PreTokenizedString> {
        let normalizer = self.tokenizer.get_normalizer();
        let added = self.tokenizer.get_added_vocabulary();
        let mut splits = added.extract_and_normalize(normalizer, text);
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut splits)?;
        }
        Ok(splits)
    }

    fn push_tokens(
        &self,
        piece: &str,
        tokens: Option<&[Token]>,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), EncodeError> {
        if let Some(added) = tokens {
            ids.extend(added.iter().map(|token| token.id));
            return Ok(());
        }
        if self.tokenizer.get_pre_tokenizer().is_some() {
            check_run(piece.len())?;
        }
        let tokens = self.tokenizer.get_model().tokenize(piece).map_err(failed)?;
        ids.extend(tokens.iter().map(|token| token.id));
        Ok(())
    }

    fn keeps_the_sample(&self) -> bool {
        let encode = |window| self.encode_windows(SAMPLE, window, usize::MAX);
        let whole = encode(SAMPLE.len());
        whole.is_ok()
            && (2 * MARGIN_BYTES..SAMPLE.len())
                .step_by(7)
                .all(|window| encode(window) == whole)
    }
}

/// The last boundary of characters up to `end`.
fn char_boundary(text: &str, end: usize) -> usize {
    let ends = (0..=end.min(text.len())).rev();
    let mut boundaries = ends.filter(|&it| text.is_char_boundary(it));
    boundaries.next().unwrap_or(0)
}

/// A piece of text, its place in the original, and its tokens if it is an added token.
type Split<'a> = (&'a str, (usize, usize), &'a Option<Vec<Token>>);

/// Splits of a window that what comes after it cannot change.
fn num_certain(splits: &[Split<'_>], num_bytes: usize) -> usize {
    let is_certain = |&(_, (start, _), _): &Split<'_>| start + MARGIN_BYTES <= num_bytes;
    let num = splits.iter().rposition(is_certain).unwrap_or(0);
    let num = num.min(splits.len().saturating_sub(2));
    // A normaliser may turn one character into several, of more than one split: ½ into 1⁄2.
    let is_between_characters = |&it: &usize| it == 0 || splits[it].1.0 >= splits[it - 1].1.1;
    (0..=num).rev().find(is_between_characters).unwrap_or(0)
}

fn check_run(num_bytes: usize) -> Result<(), EncodeError> {
    match num_bytes <= MAX_RUN_BYTES {
        true => Ok(()),
        false => Err(EncodeError::Run {
            max_bytes: MAX_RUN_BYTES,
        }),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "map_err gives it away")]
fn failed(error: tokenizers::Error) -> EncodeError {
    EncodeError::Failed(error.to_string())
}

fn read_frame(tokenizer: &Tokenizer) -> tokenizers::Result<[Vec<TokenId>; 2]> {
    let text = Encoding::from_tokens(vec![Token::new(MARKER, "a".to_owned(), (0, 1))], 0);
    let framed = tokenizer.post_process(text, None, true)?;
    let mut parts = framed.get_ids().split(|&id| id == MARKER);
    let mut part = || parts.next().unwrap_or_default().to_vec();
    Ok([part(), part()])
}

/// Whether a text's splits are those of its windows: what a split is depends on the text from its start on, and
/// on little of what comes after it.
fn can_be_cut(tokenizer: &Tokenizer) -> bool {
    let added = tokenizer.get_added_tokens_decoder();
    let are_plain = added
        .values()
        .all(|it| !it.lstrip && !it.rstrip && !it.single_word && it.content.len() <= MARGIN_BYTES);
    are_plain
        && tokenizer.get_normalizer().is_none_or(is_local)
        && tokenizer.get_pre_tokenizer().is_some_and(looks_ahead_only)
}

fn is_local(normalizer: &NormalizerWrapper) -> bool {
    matches!(
        normalizer,
        NormalizerWrapper::NFC(_)
            | NormalizerWrapper::NFD(_)
            | NormalizerWrapper::NFKC(_)
            | NormalizerWrapper::NFKD(_)
            | NormalizerWrapper::Lowercase(_)
    )
}

fn looks_ahead_only(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(it) => !it.add_prefix_space,
        PreTokenizerWrapper::Digits(_)
        | PreTokenizerWrapper::Punctuation(_)
        | PreTokenizerWrapper::WhitespaceSplit(_) => true,
        PreTokenizerWrapper::Split(it) => match &it.pattern {
            SplitPattern::String(_) => true,
            SplitPattern::Regex(pattern) => has_no_assertions(pattern),
        },
        PreTokenizerWrapper::Sequence(it) => it.as_ref().iter().all(looks_ahead_only),
        _ => false,
    }
}

/// But `(?!\S)`, which all patterns after GPT-2's have.
fn has_no_assertions(pattern: &str) -> bool {
    let rest = pattern.replace(r"(?!\S)", "").replace("[^", "[");
    let assertions = [
        "(?=", "(?!", "(?<", "^", "$", r"\b", r"\B", r"\A", r"\G", r"\z", r"\Z",
    ];
    !assertions.iter().any(|it| rest.contains(it))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn encoder(pre_tokenizer: &Value, normalizer: &Value) -> TextEncoder {
        let letters = ('!'..='~').chain('Ā'..='ń').chain('¡'..='ÿ');
        let vocab: serde_json::Map<_, _> = letters
            .enumerate()
            .map(|(id, letter)| (letter.to_string(), json!(id)))
            .collect();
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "post_processor": null, "decoder": null, "model": {"type": "BPE", "vocab": vocab, "merges": []},
        });
        TextEncoder::new(Tokenizer::from_bytes(tokenizer.to_string()).unwrap()).unwrap()
    }

    fn split(pattern: &str) -> Value {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
    }

    fn byte_level(add_prefix_space: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": true})
    }

    #[test]
    fn tokenizers_that_only_look_ahead_have_windows() {
        let digits = json!({"type": "Digits", "individual_digits": true});
        let gpt_2 = byte_level(false);
        let llama_3 = split(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+");
        let smol = json!({"type": "Sequence", "pretokenizers": [digits, gpt_2]});
        for pre_tokenizer in [gpt_2, llama_3, smol] {
            assert!(encoder(&pre_tokenizer, &Value::Null).has_windows);
            assert!(encoder(&pre_tokenizer, &json!({"type": "NFC"})).has_windows);
        }
    }

    #[test]
    fn others_see_the_whole_text() {
        let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        for (pre_tokenizer, normalizer) in [
            (Value::Null, Value::Null),
            (metaspace, Value::Null),
            (byte_level(true), Value::Null),
            (byte_level(false), prepend),
            (split(r"(?<=a)b|\w+"), Value::Null),
            (split(r"^a|\w+"), Value::Null),
        ] {
            assert!(
                !encoder(&pre_tokenizer, &normalizer).has_windows,
                "{pre_tokenizer}"
            );
        }
    }
}
