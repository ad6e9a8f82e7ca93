//! Whose turn it is to decode: one queue, in which only getting a row moves a request.

use crate::ids::SlotId;
use crate::ring::Ring;

/// A queue of slots, and how far this round has come in it.
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    slots: Ring,
    /// The last one passed over in this round, or the ring's end.
    passed: u32,
}

impl Turns {
    pub(crate) fn new(num_slots: u32) -> Self {
        Self {
            slots: Ring::new(num_slots),
            passed: num_slots,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.slots.len()
    }

    pub(crate) fn push(&mut self, slot: SlotId) {
        self.slots.push(slot.0);
    }

    pub(crate) fn remove(&mut self, slot: SlotId) {
        if self.passed == slot.0 {
            self.passed = self.slots.before(slot.0);
        }
        self.slots.remove(slot.0);
    }

    pub(crate) fn move_to_tail(&mut self, slot: SlotId) {
        self.remove(slot);
        self.push(slot);
    }

    /// Asks from the head again.
    pub(crate) fn begin_round(&mut self) {
        self.passed = self.slots.end();
    }

    /// Who is asked next; who was served stands at the tail and comes up again.
    pub(crate) fn next(&self) -> Option<SlotId> {
        let next = self.slots.after(self.passed);
        (next != self.slots.end()).then_some(SlotId(next))
    }

    /// Leaves a request where it is and asks the one behind it.
    pub(crate) fn pass(&mut self, slot: SlotId) {
        self.passed = slot.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(turns: &mut Turns) -> Vec<u32> {
        turns.begin_round();
        let mut slots = Vec::new();
        while let Some(slot) = turns.next() {
            turns.pass(slot);
            slots.push(slot.0);
        }
        slots
    }

    #[test]
    fn newcomers_queue_at_the_tail() {
        let mut turns = Turns::new(4);
        for slot in [2, 0, 3] {
            turns.push(SlotId(slot));
        }
        assert_eq!(order(&mut turns), [2, 0, 3]);
    }

    #[test]
    fn leaving_or_moving_keeps_the_others_in_place() {
        let mut turns = Turns::new(4);
        for slot in 0..4 {
            turns.push(SlotId(slot));
        }
        turns.remove(SlotId(1));
        turns.move_to_tail(SlotId(0));
        assert_eq!(order(&mut turns), [2, 3, 0]);
        assert_eq!(turns.len(), 3);
    }

    #[test]
    fn one_that_was_passed_over_may_leave_in_the_middle_of_a_round() {
        let mut turns = Turns::new(4);
        for slot in 0..4 {
            turns.push(SlotId(slot));
        }
        turns.begin_round();
        turns.pass(SlotId(0));
        turns.pass(SlotId(1));
        turns.remove(SlotId(1));
        assert_eq!(turns.next(), Some(SlotId(2)));
        turns.remove(SlotId(0));
        assert_eq!(turns.next(), Some(SlotId(2)));
    }
}
