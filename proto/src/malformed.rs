//! Why frames are not a message.

use std::ops::RangeInclusive;

use crate::kind::Kind;

/// The rule of the wire that a peer broke.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// More frames than any message has.
    #[error("{given} frames; a message has at most {limit}")]
    TooManyFrames {
        /// Frames that came.
        given: usize,
        /// Frames that may come.
        limit: usize,
    },
    /// Not even kind and header.
    #[error("{given} frames; a message has at least 2")]
    TooFewFrames {
        /// Frames that came.
        given: usize,
    },
    /// Frame 0 is not one byte.
    #[error("frame 0 has {bytes} bytes; the kind is one byte")]
    KindSize {
        /// Bytes in the frame.
        bytes: usize,
    },
    /// An unknown kind.
    #[error("kind {byte} is unknown; kinds go from 1 to 15")]
    UnknownKind {
        /// Frame 0.
        byte: u8,
    },
    /// A frame over its cap.
    #[error("frame {frame} has {bytes} bytes; {limit} are allowed")]
    FrameTooLarge {
        /// Which frame.
        frame: usize,
        /// Bytes in it.
        bytes: usize,
        /// Bytes that it may have.
        limit: usize,
    },
    /// All frames together are over their cap.
    #[error("the message has {bytes} bytes; {limit} are allowed")]
    MessageTooLarge {
        /// Bytes of all frames.
        bytes: usize,
        /// Bytes that they may have.
        limit: usize,
    },
    /// An array that is not whole words.
    #[error("frame {frame} has {bytes} bytes, which is no whole number of 4-byte words")]
    NotWords {
        /// Which frame.
        frame: usize,
        /// Bytes in it.
        bytes: usize,
    },
    /// Another number of frames than the kind has.
    #[error("{kind:?} came in {given} frames; it has {}", in_words(&.kind.num_frames()))]
    FrameCount {
        /// Which kind.
        kind: Kind,
        /// Frames that came.
        given: usize,
    },
    /// An empty last frame, which must be left out.
    #[error(
        "frame {frame} of {kind:?} is empty; an empty optional frame comes only before a later one"
    )]
    EmptyLastFrame {
        /// Which kind.
        kind: Kind,
        /// Which frame.
        frame: usize,
    },
    /// Frame 1 is not the MessagePack array of its kind.
    #[error("frame 1 of {kind:?}: {reason}")]
    Header {
        /// Which kind.
        kind: Kind,
        /// What was wrong with it.
        reason: String,
    },
    /// Arrays and header disagree.
    #[error("frame {frame} of {kind:?} has {given} words; the rest of the message says {expected}")]
    WordCount {
        /// Which kind.
        kind: Kind,
        /// Which frame.
        frame: usize,
        /// Words in it.
        given: usize,
        /// Words that it should have.
        expected: u64,
    },
    /// Records of which the last one is cut.
    #[error("frame {frame} of {kind:?} has {given} words; each record has {record}")]
    CutRecord {
        /// Which kind.
        kind: Kind,
        /// Which frame.
        frame: usize,
        /// Words in it.
        given: usize,
        /// Words of a record.
        record: usize,
    },
    /// Adjustments of which one is cut, or has a bad word without tokens.
    #[error(
        "frame {frame} of Plan has {given} words, which end within a record or have a bad word without tokens"
    )]
    CutAdjustment {
        /// Which frame.
        frame: usize,
        /// Words in it.
        given: usize,
    },
    /// A page of the first kind in the frame of the others.
    #[error("frame 6 of Plan has a page of kind 0 for slot {slot}; those are in frame 4")]
    FirstPageKind {
        /// Whose page.
        slot: u32,
    },
    /// A pooled slot with an unknown pooling.
    #[error("frame 12 of Plan pools slot {slot} by {word}; 1 (last) and 2 (mean) are known")]
    UnknownPooling {
        /// Which slot.
        slot: u32,
        /// What was given.
        word: u32,
    },
    /// A decode row without tokens.
    #[error("decode row {row} computes no token; each computes at least one")]
    EmptyDecodeRow {
        /// Which row.
        row: usize,
    },
    /// A prefill row without tokens.
    #[error("prefill row {row} has no tokens; a chunk has at least one")]
    EmptyChunk {
        /// Which row.
        row: usize,
    },
    /// A prefill row with unknown flags.
    #[error("prefill row {row} has flags {flags:#x}; bits 0 and 1 are known")]
    UnknownFlags {
        /// Which row.
        row: usize,
        /// Its flags.
        flags: u32,
    },
    /// A sampling parameter that is infinite or no number.
    #[error("slot {slot}: {field} is {value}; a finite number is needed")]
    NotFinite {
        /// Whose sampling.
        slot: u32,
        /// Which parameter.
        field: &'static str,
        /// What was given, in words.
        value: String,
    },
}

/// `6`, or `6 to 8`.
fn in_words(counts: &RangeInclusive<usize>) -> String {
    if counts.start() == counts.end() {
        counts.start().to_string()
    } else {
        format!("{} to {}", counts.start(), counts.end())
    }
}
