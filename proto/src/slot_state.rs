//! State of a fixed size that comes and goes with a slot, and snapshots of it.

use serde::{Deserialize, Serialize};

/// What a rank keeps for each slot beside its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotState {
    /// One slot over all layers of the rank.
    pub slot_bytes: u64,
    /// One snapshot: what of a slot's state is in use at a page boundary.
    pub snapshot_bytes: u64,
    /// Snapshots that the device has room for, or as many as the settings asked for.
    pub num_snapshots: u32,
}

/// A new slot that begins with a snapshot's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredSlot {
    /// Which slot.
    pub slot: u32,
    /// Which snapshot of the pool.
    pub snapshot: u32,
}

/// A slot whose state at a position is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSlot {
    /// Which slot.
    pub slot: u32,
    /// Tokens of the slot that the state covers: a page boundary in its row of this plan, or at the row's end.
    pub position: u32,
    /// Where it goes.
    pub snapshot: u32,
}
