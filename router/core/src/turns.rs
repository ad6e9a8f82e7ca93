//! Whose turn it is to decode: one queue, in which only getting a row moves a request.

use crate::ids::SlotId;

#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
}

/// A queue of slots: to the tail, out of the middle and on to the next in constant time.
///
/// A ring with one link per slot, closed by a link of its own that stands before the first and
/// after the last.
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    links: Vec<Link>,
    len: u32,
    /// The last one passed over in this round, or the closing link.
    passed: u32,
}

impl Turns {
    pub(crate) fn new(num_slots: u32) -> Self {
        let links = (0..=num_slots)
            .map(|i| Link {
                before: i,
                after: i,
            })
            .collect();
        Self {
            links,
            len: 0,
            passed: num_slots,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn push(&mut self, slot: SlotId) {
        let last = self.link(self.end()).before;
        self.join(last, slot.0);
        self.join(slot.0, self.end());
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, slot: SlotId) {
        let Link { before, after } = self.link(slot.0);
        self.join(before, after);
        self.len -= 1;
        if self.passed == slot.0 {
            self.passed = before;
        }
    }

    pub(crate) fn move_to_tail(&mut self, slot: SlotId) {
        self.remove(slot);
        self.push(slot);
    }

    /// Asks from the head again.
    pub(crate) fn begin_round(&mut self) {
        self.passed = self.end();
    }

    /// Who is asked next; who was served stands at the tail and comes up again.
    pub(crate) fn next(&self) -> Option<SlotId> {
        let next = self.link(self.passed).after;
        (next != self.end()).then_some(SlotId(next))
    }

    /// Leaves a request where it is and asks the one behind it.
    pub(crate) fn pass(&mut self, slot: SlotId) {
        self.passed = slot.0;
    }

    fn end(&self) -> u32 {
        u32::try_from(self.links.len() - 1).expect("made from a u32 of slots")
    }

    fn link(&self, index: u32) -> Link {
        self.links[index as usize]
    }

    fn join(&mut self, before: u32, after: u32) {
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
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
