//! Messages to frames and back. Every cap is checked before anything is decoded.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::extensible::Extensible;
use crate::kind::Kind;
use crate::malformed::Malformed;
use crate::message::Message;
use crate::msgpack::{pack, unpack};
use crate::plan::{PlanEncoder, decode_plan};
use crate::result::{decode_result, encode_result};
use crate::step_masks::{decode_masks, encode_masks};

/// A message as ZeroMQ carries it.
pub type Frames = Vec<Vec<u8>>;

/// Frames that a message may have.
pub const MAX_FRAMES: usize = 13;
/// Bytes that frame 1 may have.
pub const MAX_HEADER_BYTES: usize = 1 << 20;
/// Bytes that each later frame may have.
pub const MAX_FRAME_BYTES: usize = 16 << 20;
/// Bytes that all frames of a message may have together.
pub const MAX_MESSAGE_BYTES: usize = 32 << 20;

/// The frames of `message`. Strings are cut to [`crate::MAX_TEXT_BYTES`].
pub fn encode(message: &Message) -> Frames {
    let kind = vec![message.kind() as u8];
    let rest = match message {
        Message::Hello(hello) => vec![packed(hello)],
        Message::Welcome(welcome) => vec![packed(welcome)],
        Message::Plan(plan) => {
            let mut encoder = PlanEncoder::default();
            encoder.encode(plan);
            return encoder.into_frames(plan);
        }
        Message::StepResult(result) => encode_result(result),
        Message::Vote(vote) => vec![packed(vote)],
        Message::Decision(decision) => vec![packed(decision)],
        Message::Drain(drain) => vec![packed(drain)],
        Message::Heartbeat(heartbeat) => vec![packed(heartbeat)],
        Message::Fail(fail) => vec![packed(fail)],
        Message::Bye(bye) => vec![packed(bye)],
        Message::Join(join) => vec![packed(join)],
        Message::StoreRequest(request) => vec![packed(request)],
        Message::StoreReply(reply) => vec![packed(reply)],
        Message::StepMasks(masks) => encode_masks(masks),
        Message::ForwardDone(done) => vec![packed(done)],
    };
    std::iter::once(kind).chain(rest).collect()
}

/// The message in `frames`.
///
/// # Errors
///
/// [`Malformed`] names the first rule that the frames break.
pub fn decode<F: AsRef<[u8]>>(frames: &[F]) -> Result<Message, Malformed> {
    check_caps(frames)?;
    let [kind, header, arrays @ ..] = frames else {
        return Err(Malformed::TooFewFrames {
            given: frames.len(),
        });
    };
    let kind = read_kind(kind.as_ref())?;
    if !kind.num_frames().contains(&frames.len()) {
        let given = frames.len();
        return Err(Malformed::FrameCount { kind, given });
    }
    decode_kind(kind, header.as_ref(), arrays)
}

fn decode_kind<F: AsRef<[u8]>>(
    kind: Kind,
    header: &[u8],
    arrays: &[F],
) -> Result<Message, Malformed> {
    Ok(match kind {
        Kind::Hello => Message::Hello(unpack_extensible(kind, header)?),
        Kind::Welcome => Message::Welcome(unpack_extensible(kind, header)?),
        Kind::Plan => Message::Plan(decode_plan(header, &borrowed(arrays))?),
        Kind::StepResult => Message::StepResult(decode_result(header, &borrowed(arrays))?),
        Kind::Vote => Message::Vote(unpack_extensible(kind, header)?),
        Kind::Decision => Message::Decision(unpack_extensible(kind, header)?),
        Kind::Drain => Message::Drain(unpack_extensible(kind, header)?),
        Kind::Heartbeat => Message::Heartbeat(unpack_extensible(kind, header)?),
        Kind::Fail => Message::Fail(unpack_extensible(kind, header)?),
        Kind::Bye => Message::Bye(unpack_extensible(kind, header)?),
        Kind::Join => Message::Join(unpack_extensible(kind, header)?),
        Kind::StoreRequest => Message::StoreRequest(unpack_extensible(kind, header)?),
        Kind::StoreReply => Message::StoreReply(unpack_extensible(kind, header)?),
        Kind::StepMasks => Message::StepMasks(decode_masks(header, array_of(arrays))?),
        Kind::ForwardDone => Message::ForwardDone(unpack_extensible(kind, header)?),
    })
}

fn borrowed<F: AsRef<[u8]>>(arrays: &[F]) -> Vec<&[u8]> {
    arrays.iter().map(AsRef::as_ref).collect()
}

/// The arrays of a kind that always has so many.
fn array_of<F: AsRef<[u8]>, const N: usize>(arrays: &[F]) -> [&[u8]; N] {
    std::array::from_fn(|index| arrays[index].as_ref())
}

fn check_caps<F: AsRef<[u8]>>(frames: &[F]) -> Result<(), Malformed> {
    if frames.len() > MAX_FRAMES {
        return Err(Malformed::TooManyFrames {
            given: frames.len(),
            limit: MAX_FRAMES,
        });
    }
    for (frame, bytes) in frames.iter().enumerate().skip(1) {
        let bytes = bytes.as_ref().len();
        let limit = if frame == 1 {
            MAX_HEADER_BYTES
        } else {
            MAX_FRAME_BYTES
        };
        if bytes > limit {
            return Err(Malformed::FrameTooLarge {
                frame,
                bytes,
                limit,
            });
        }
        if frame > 1 && bytes % 4 != 0 {
            return Err(Malformed::NotWords { frame, bytes });
        }
    }
    let bytes = frames.iter().map(|frame| frame.as_ref().len()).sum();
    if bytes > MAX_MESSAGE_BYTES {
        let limit = MAX_MESSAGE_BYTES;
        return Err(Malformed::MessageTooLarge { bytes, limit });
    }
    Ok(())
}

fn read_kind(frame: &[u8]) -> Result<Kind, Malformed> {
    match frame {
        [byte] => Kind::from_byte(*byte).ok_or(Malformed::UnknownKind { byte: *byte }),
        _ => Err(Malformed::KindSize { bytes: frame.len() }),
    }
}

fn packed(fields: &impl Serialize) -> Vec<u8> {
    let mut frame = Vec::new();
    pack(&mut frame, fields);
    frame
}

fn unpack_extensible<T: DeserializeOwned>(kind: Kind, frame: &[u8]) -> Result<T, Malformed> {
    unpack(kind, frame).map(|Extensible(fields)| fields)
}
