//! Serde values appended to a buffer as JSON.

use std::io;

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// serde_json's compact form with the shortest decimals of an `f32`, as Rust's `Debug` writes them.
struct JsonFormat;

impl Formatter for JsonFormat {
    fn write_f32<W: io::Write + ?Sized>(&mut self, writer: &mut W, value: f32) -> io::Result<()> {
        write!(writer, "{value:?}")
    }
}

/// Appends `value` as compact JSON.
pub(crate) fn append(value: &impl Serialize, out: &mut Vec<u8>) {
    let mut serializer = Serializer::with_formatter(out, JsonFormat);
    value
        .serialize(&mut serializer)
        .expect("answers have text keys, and a Vec takes every write");
}
