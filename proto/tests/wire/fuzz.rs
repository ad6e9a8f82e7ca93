//! Broken frames give `Malformed`: no panic, and no memory beyond what came in.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use plait_proto::{Frames, Malformed, Message, decode, encode};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::golden_files;

/// The system's allocator, which remembers each thread's largest request.
struct Watched;

thread_local! {
    static LARGEST_BYTES: Cell<usize> = const { Cell::new(0) };
}

fn note(num_bytes: usize) {
    LARGEST_BYTES.set(LARGEST_BYTES.get().max(num_bytes));
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// serde reserves up to 1 MiB on the word of a length; the golden frames are far smaller.
const LARGEST_BYTES_ALLOWED: usize = 2 << 20;

#[derive(Clone, Debug)]
enum Mutation {
    FlipBit(Index, Index, u8),
    Truncate(Index, Index),
    Insert(Index, Index, Vec<u8>),
    Overwrite(Index, Index, Vec<u8>),
    Drop(Index),
    Repeat(Index),
    Swap(Index, Index),
}

impl Mutation {
    fn apply(&self, frames: &mut Frames) {
        if frames.is_empty() {
            return;
        }
        let num_frames = frames.len();
        match self {
            Self::FlipBit(frame, byte, bit) => flip(&mut frame.get_mut(frames)[..], byte, *bit),
            Self::Truncate(frame, length) => {
                let frame = frame.get_mut(frames);
                frame.truncate(length.index(frame.len() + 1));
            }
            Self::Insert(frame, at, bytes) => {
                let frame = frame.get_mut(frames);
                let at = at.index(frame.len() + 1);
                frame.splice(at..at, bytes.iter().copied());
            }
            Self::Overwrite(frame, at, bytes) => {
                let frame = frame.get_mut(frames);
                let at = at.index(frame.len() + 1);
                let end = frame.len().min(at + bytes.len());
                frame.splice(at..end, bytes.iter().copied());
            }
            Self::Drop(frame) => drop(frames.remove(frame.index(num_frames))),
            Self::Repeat(frame) => frames.push(frames[frame.index(num_frames)].clone()),
            Self::Swap(one, other) => frames.swap(one.index(num_frames), other.index(num_frames)),
        }
    }
}

fn flip(frame: &mut [u8], byte: &Index, bit: u8) {
    if !frame.is_empty() {
        let byte = byte.index(frame.len());
        frame[byte] ^= 1 << bit;
    }
}

/// MessagePack headers that promise more than any frame holds.
fn huge_header() -> impl Strategy<Value = Vec<u8>> {
    let markers = select(vec![0xc6_u8, 0xc9, 0xdb, 0xdd, 0xdf]);
    let lengths = select(vec![u32::MAX, 1 << 31, 1 << 24]);
    (markers, lengths).prop_map(|(marker, length)| {
        std::iter::once(marker)
            .chain(length.to_be_bytes())
            .collect()
    })
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let at = any::<Index>;
    prop_oneof![
        4 => (at(), at(), 0..8_u8).prop_map(|(frame, byte, bit)| Mutation::FlipBit(frame, byte, bit)),
        2 => (at(), at()).prop_map(|(frame, length)| Mutation::Truncate(frame, length)),
        2 => (at(), at(), vec(any::<u8>(), 1..9))
            .prop_map(|(frame, byte, bytes)| Mutation::Insert(frame, byte, bytes)),
        2 => (at(), at(), huge_header())
            .prop_map(|(frame, byte, bytes)| Mutation::Overwrite(frame, byte, bytes)),
        1 => at().prop_map(Mutation::Drop),
        1 => at().prop_map(Mutation::Repeat),
        1 => (at(), at()).prop_map(|(one, other)| Mutation::Swap(one, other)),
    ]
}

fn mutated_frames() -> impl Strategy<Value = Frames> {
    let frames = select(
        golden_files::all()
            .into_iter()
            .map(|golden| golden.frames)
            .collect::<Vec<_>>(),
    );
    (frames, vec(mutation(), 1..4)).prop_map(|(mut frames, mutations)| {
        mutations
            .iter()
            .for_each(|mutation| mutation.apply(&mut frames));
        frames
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn mutated_frames_give_a_message_or_malformed(frames in mutated_frames()) {
        LARGEST_BYTES.set(0);
        let decoded = decode(&frames);
        prop_assert!(LARGEST_BYTES.get() <= LARGEST_BYTES_ALLOWED);
        if let Ok(message) = decoded {
            prop_assert_eq!(decode(&encode(&message)), Ok(message));
        }
    }

    #[test]
    fn noise_gives_a_message_or_malformed(kind in 0..17_u8, header in vec(any::<u8>(), 0..200)) {
        let _: Result<_, Malformed> = decode(&[vec![kind], header]);
    }
}

#[test]
fn deep_nesting_is_malformed() {
    for opening in [0x91, 0x81] {
        assert!(matches!(
            heartbeat_with_nested_field(opening, 1_000_000),
            Err(Malformed::Header { .. })
        ));
    }
    assert!(heartbeat_with_nested_field(0x91, 8).is_ok());
    assert!(matches!(
        heartbeat_with_nested_field(0x91, 40),
        Err(Malformed::Header { .. })
    ));
}

/// A Heartbeat with one field more than it has: `depth` containers of one nil.
fn heartbeat_with_nested_field(opening: u8, depth: usize) -> Result<Message, Malformed> {
    decode(&[
        vec![8],
        [&[0x93, 0, 0][..], &vec![opening; depth], &[0xc0]].concat(),
    ])
}
