//! The wire between Plait's engine and its workers, and between the engines of a group: typed messages, and frames of bytes.
//!
//! `proto/README.md` is the contract, frame by frame; the Python package `plait_proto` is the other half.
//! [`encode`] and [`decode`] take any message. [`PlanEncoder`] encodes plans on the step path, in buffers
//! that it keeps.
//!
//! The messages' serde names and JSON form are for the golden files only; the wire has no names.

mod adjustment;
mod capped_text;
mod codec;
mod control;
mod extensible;
mod families;
mod fingerprint;
mod kind;
mod malformed;
mod message;
mod msgpack;
mod new_slot;
mod plan;
mod result;
#[cfg(test)]
mod schema;
mod slot_state;
mod step_masks;
mod word_arrays;

pub use adjustment::{Adjustment, TokenBias};
pub use capped_text::MAX_TEXT_BYTES;
pub use codec::{
    Frames, MAX_FRAME_BYTES, MAX_FRAMES, MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, decode, encode,
};
pub use control::{
    Bye, CapturedSize, Decision, Drain, ExitCode, Fact, Fail, ForwardDone, Heartbeat, Hello, Join,
    Mode, PROTOCOL, PageKind, PromptCounts, StoreOperation, StoreReply, StoreRequest, Vote,
    Welcome,
};
pub use families::{AttentionKind, CacheKind, Family, LayerKind};
pub use fingerprint::{Fingerprint, config_fingerprint, schema_fingerprint};
pub use kind::Kind;
pub use malformed::Malformed;
pub use message::Message;
pub use new_slot::{NewSlot, SamplingParams};
pub use plan::{
    AppendedPage, DecodeRow, OtherPage, Plan, PlanEncoder, PooledSlot, Pooling, PrefillRow,
    ScoredId, TrimmedSlot,
};
pub use result::{FAILED_ROW, LogprobRecord, LogprobRecords, StepResult};
pub use slot_state::{RestoredSlot, SavedSlot, SlotState};
pub use step_masks::{MaskedRow, NewMask, StepMasks};
