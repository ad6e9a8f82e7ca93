//! Frame 1: a positional MessagePack array.

use std::io::Cursor;

use rmp_serde::Deserializer;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::capped_text::cut;
use crate::kind::Kind;
use crate::malformed::Malformed;

/// How deep arrays of frame 1 may nest, unknown fields included.
/// At rmp-serde's own limit of 1,024 a debug build overflows a thread's stack of 2 MiB.
const MAX_DEPTH: usize = 32;

/// Bytes of a reason that may quote the peer.
const MAX_REASON_BYTES: usize = 256;

/// Writes `fields` into `frame` as a positional array.
pub fn pack(frame: &mut Vec<u8>, fields: &impl Serialize) {
    frame.clear();
    rmp_serde::encode::write(frame, fields)
        .expect("a vector takes every byte, and lengths are known");
}

/// The fields of a frame that holds nothing else.
pub fn unpack<T: DeserializeOwned>(kind: Kind, frame: &[u8]) -> Result<T, Malformed> {
    let mut reader = Deserializer::new(Cursor::new(frame));
    reader.set_max_depth(MAX_DEPTH);
    let fields =
        T::deserialize(&mut reader).map_err(|error| broken_header(kind, &error.to_string()))?;
    match frame.len() as u64 - reader.position() {
        0 => Ok(fields),
        num_behind => Err(broken_header(
            kind,
            &format!("{num_behind} bytes follow the array"),
        )),
    }
}

fn broken_header(kind: Kind, reason: &str) -> Malformed {
    Malformed::Header {
        kind,
        reason: cut(reason, MAX_REASON_BYTES).to_owned(),
    }
}
