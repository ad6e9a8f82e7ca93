//! The round-robin queue of decoders: only getting a row moves a request to the tail.

use crate::ids::SlotId;
use crate::index_list::IndexList;

/// A queue of slots, and the position of this round in it.
#[derive(Clone, Debug)]
pub(crate) struct RoundRobin {
    slots: IndexList,
    /// The last slot passed over in this round, or the list's end.
    passed: u32,
}

impl RoundRobin {
    pub(crate) fn new(num_slots: u32) -> Self {
        Self {
            slots: IndexList::new(num_slots),
            passed: num_slots,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.slots.len()
    }

    pub(crate) fn push(&mut self, slot: SlotId) {
        self.slots.push(slot.0);
    }

    #[inline]
    pub(crate) fn remove(&mut self, slot: SlotId) {
        if self.passed == slot.0 {
            self.passed = self.slots.before(slot.0);
        }
        self.slots.remove(slot.0);
    }

    #[inline]
    pub(crate) fn move_to_tail(&mut self, slot: SlotId) {
        self.remove(slot);
        self.push(slot);
    }

    /// Starts again at the head.
    pub(crate) fn begin_round(&mut self) {
        self.passed = self.slots.end();
    }

    /// The next slot of this round. A slot that got a row is at the tail and comes up again.
    pub(crate) fn next(&self) -> Option<SlotId> {
        let next = self.slots.after(self.passed);
        (next != self.slots.end()).then_some(SlotId(next))
    }

    /// Passes over a slot, which keeps its position.
    pub(crate) fn pass(&mut self, slot: SlotId) {
        self.passed = slot.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(queue: &mut RoundRobin) -> Vec<u32> {
        queue.begin_round();
        let mut slots = Vec::new();
        while let Some(slot) = queue.next() {
            queue.pass(slot);
            slots.push(slot.0);
        }
        slots
    }

    #[test]
    fn newcomers_queue_at_the_tail() {
        let mut queue = RoundRobin::new(4);
        for slot in [2, 0, 3] {
            queue.push(SlotId(slot));
        }
        assert_eq!(order(&mut queue), [2, 0, 3]);
    }

    #[test]
    fn leaving_or_moving_keeps_the_others_in_place() {
        let mut queue = RoundRobin::new(4);
        for slot in 0..4 {
            queue.push(SlotId(slot));
        }
        queue.remove(SlotId(1));
        queue.move_to_tail(SlotId(0));
        assert_eq!(order(&mut queue), [2, 3, 0]);
        assert_eq!(queue.len(), 3);
    }

    #[test]
    fn one_that_was_passed_over_may_leave_in_the_middle_of_a_round() {
        let mut queue = RoundRobin::new(4);
        for slot in 0..4 {
            queue.push(SlotId(slot));
        }
        queue.begin_round();
        queue.pass(SlotId(0));
        queue.pass(SlotId(1));
        queue.remove(SlotId(1));
        assert_eq!(queue.next(), Some(SlotId(2)));
        queue.remove(SlotId(0));
        assert_eq!(queue.next(), Some(SlotId(2)));
    }
}
