//! JSON written straight into a buffer, for what is written at every token.

use std::io::Write as _;

use plait_core::TokenId;

/// The least log-probability that is written: JSON has no infinity (vLLM's value).
const LOWEST_LOGPROB: f32 = -9999.0;

/// Appends a string with its quotes.
pub(super) fn write_str(text: &str, out: &mut Vec<u8>) {
    serde_json::to_writer(out, text).expect("a Vec takes every write");
}

/// Appends a number.
pub(super) fn write_u64(number: u64, out: &mut Vec<u8>) {
    write!(out, "{number}").expect("a Vec takes every write");
}

/// Appends a log-probability.
pub(super) fn write_logprob(logprob: f32, out: &mut Vec<u8>) {
    let written = if logprob.is_finite() {
        logprob.max(LOWEST_LOGPROB)
    } else {
        LOWEST_LOGPROB
    };
    write!(out, "{written:?}").expect("a Vec takes every write");
}

/// Appends `[...]` with one element after the other.
pub(super) fn write_list<T>(
    items: impl IntoIterator<Item = T>,
    out: &mut Vec<u8>,
    mut write_item: impl FnMut(T, &mut Vec<u8>),
) {
    out.push(b'[');
    for (index, item) in items.into_iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write_item(item, out);
    }
    out.push(b']');
}

/// Appends a list of token ids.
pub(super) fn write_ids(ids: &[TokenId], out: &mut Vec<u8>) {
    write_list(ids, out, |&id, out| write_u64(id.into(), out));
}
