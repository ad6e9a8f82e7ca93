//! Frame 0: the kind of a message.

use std::ops::RangeInclusive;

/// Frame 0: which message follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// [`crate::Hello`]
    Hello = 1,
    /// [`crate::Welcome`]
    Welcome = 2,
    /// [`crate::Plan`]
    Plan = 3,
    /// [`crate::StepResult`]
    StepResult = 4,
    /// [`crate::Vote`]
    Vote = 5,
    /// [`crate::Decision`]
    Decision = 6,
    /// [`crate::Drain`]
    Drain = 7,
    /// [`crate::Heartbeat`]
    Heartbeat = 8,
    /// [`crate::Fail`]
    Fail = 9,
    /// [`crate::Bye`]
    Bye = 10,
    /// [`crate::Join`]
    Join = 11,
    /// [`crate::StoreRequest`]
    StoreRequest = 12,
    /// [`crate::StoreReply`]
    StoreReply = 13,
    /// [`crate::StepMasks`]
    StepMasks = 14,
    /// [`crate::ForwardDone`]
    ForwardDone = 15,
}

impl Kind {
    /// Every kind, in the order of their bytes.
    pub const ALL: [Self; 15] = [
        Self::Hello,
        Self::Welcome,
        Self::Plan,
        Self::StepResult,
        Self::Vote,
        Self::Decision,
        Self::Drain,
        Self::Heartbeat,
        Self::Fail,
        Self::Bye,
        Self::Join,
        Self::StoreRequest,
        Self::StoreReply,
        Self::StepMasks,
        Self::ForwardDone,
    ];

    /// How many frames a message of this kind may have, the first two included.
    pub fn num_frames(self) -> RangeInclusive<usize> {
        match self {
            Self::Plan => 6..=13,
            Self::StepResult => 6..=7,
            Self::StepMasks => 5..=5,
            _ => 2..=2,
        }
    }

    /// The kind that frame 0 says, if this protocol has it.
    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}
