//! Slot state on the fake device: a running hash of the KV that a slot's rows have computed, and snapshots of it.
//!
//! A sampled token follows from it alone. It cannot be taken back, and begins anew or with a snapshot only.

use std::collections::BTreeSet;

use plait_core::{Plan, SavedSlot, Settings, SlotId, SnapshotId, Stats};

use crate::oracle;

/// What a slot has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub length: u32,
    pub hash: u64,
}

/// Of slots that nobody may use before they are new or restored.
const POISON: State = State {
    length: u32::MAX,
    hash: 666,
};

/// The state of every slot and snapshot.
#[derive(Clone, Debug)]
pub struct SlotMemory {
    slots: Vec<State>,
    snapshots: Vec<State>,
    /// Saves of the running step.
    saves: Vec<SavedSlot>,
}

impl SlotMemory {
    /// None for a model that keeps no slot state.
    pub fn new(settings: &Settings) -> Option<Self> {
        settings.runtime.num_snapshots.map(|num| Self {
            slots: vec![POISON; settings.scheduler.num_slots() as usize],
            snapshots: vec![POISON; num as usize],
            saves: Vec::new(),
        })
    }

    /// New slots are empty or restored, freed ones and those to be saved to are poisoned.
    pub fn begin(&mut self, plan: &Plan) {
        for slot in &plan.freed_slots {
            self.slots[slot.0 as usize] = POISON;
        }
        for new in &plan.new_slots {
            let restored = plan.restored_slots.iter().find(|it| it.slot == new.slot);
            let state = restored.map_or(State::EMPTY, |it| self.snapshots[it.snapshot.0 as usize]);
            assert_eq!(state.length, new.num_cached, "another snapshot: {new:?}");
            self.slots[new.slot.0 as usize] = state;
        }
        for save in &plan.saved_slots {
            self.snapshots[save.snapshot.0 as usize] = POISON;
        }
        self.saves.clone_from(&plan.saved_slots);
    }

    pub fn get(&self, slot: SlotId) -> State {
        self.slots[slot.0 as usize]
    }

    /// A row has computed the KV of a position.
    pub fn add(&mut self, slot: SlotId, position: u32, kv: u64) {
        let state = &mut self.slots[slot.0 as usize];
        assert_eq!(state.length, position, "slot state sees each token once");
        state.length += 1;
        state.hash = oracle::mix(state.hash, kv);
        let (length, state) = (state.length, *state);
        for save in &self.saves {
            if (save.slot, save.position) == (slot, length) {
                self.snapshots[save.snapshot.0 as usize] = state;
            }
        }
    }

    /// The row of a slot was left out: its state is of no use any more.
    pub fn poison(&mut self, slot: SlotId) {
        self.slots[slot.0 as usize] = POISON;
    }
}

impl State {
    const EMPTY: Self = Self {
        length: 0,
        hash: oracle::VISIBLE_SEED,
    };
}

/// What a plan says of snapshots fits its rows, and it saves to none that is in use by steps in flight or by its own
/// slots. Returns those that it names.
pub fn check_snapshots(
    plan: &Plan,
    settings: &Settings,
    mut in_use: BTreeSet<SnapshotId>,
) -> Vec<SnapshotId> {
    let has_slot_state = settings.runtime.num_snapshots.is_some();
    assert!(has_slot_state || (plan.restored_slots.is_empty() && plan.saved_slots.is_empty()));
    for new in &plan.new_slots {
        let restored = plan.restored_slots.iter().filter(|it| it.slot == new.slot);
        let expected = usize::from(has_slot_state && new.num_cached > 0);
        assert_eq!(restored.count(), expected, "{new:?}");
    }
    let prefills = plan.prefill.iter();
    let rows: Vec<_> = prefills
        .map(|row| (row.slot, row.start, row.length))
        .chain(
            plan.decode
                .iter()
                .map(|row| (row.slot, row.start, row.length)),
        )
        .collect();
    for save in &plan.saved_slots {
        let is_of_row = |(slot, start, length): &(SlotId, u32, u32)| {
            *slot == save.slot && *start < save.position && save.position <= start + length
        };
        assert!(rows.iter().any(is_of_row), "{save:?} of no row: {plan:?}");
        assert!(save.position.is_multiple_of(settings.pages.page_size));
    }
    let in_order =
        |pair: &[SavedSlot]| pair[0].slot != pair[1].slot || pair[0].position < pair[1].position;
    assert!(plan.saved_slots.windows(2).all(in_order), "{plan:?}");
    let restored = plan.restored_slots.iter().map(|it| it.snapshot);
    in_use.extend(restored.clone());
    for save in &plan.saved_slots {
        assert!(in_use.insert(save.snapshot), "{save:?} is in use: {plan:?}");
    }
    let saved = plan.saved_slots.iter().map(|it| it.snapshot);
    restored.chain(saved).collect()
}

/// Invariant 2 of snapshots.
pub fn check_counts(stats: &Stats, num_snapshots: u32) {
    let counts = stats.snapshots;
    let sum = counts.free + counts.writing + counts.findable + counts.parked;
    assert_eq!(sum, num_snapshots, "{counts:?}");
    let is_idle = stats.num_in_flight == 0;
    assert!(
        !is_idle || (counts.writing, counts.parked) == (0, 0),
        "{counts:?}"
    );
}
