//! Messages between engine and workers.

use plait_proto::{Frames, decode, encode};

use super::Target;

pub fn frames() -> Target {
    Target {
        name: "frames",
        // MessagePack's headers of long arrays, maps, strings and bytes.
        words: &[
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\x91",
            b"\xc0",
            b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\x01\x00\x00\x00",
        ],
        max_mib: 2,
        num_reduced: 5000,
        decode: decode_frames,
    }
}

/// What can be decoded survives a round trip.
fn decode_frames(input: &[u8]) -> bool {
    let Ok(message) = decode(&split(input)) else {
        return false;
    };
    assert_eq!(decode(&encode(&message)), Ok(message));
    true
}

/// Frames as the golden files keep them: each after its length. The last one may be cut.
fn split(mut input: &[u8]) -> Frames {
    let mut frames = Vec::new();
    while let Some((length, rest)) = input.split_first_chunk() {
        let length = u32::from_le_bytes(*length) as usize;
        let (frame, rest) = rest.split_at(length.min(rest.len()));
        frames.push(frame.to_vec());
        input = rest;
    }
    frames
}
