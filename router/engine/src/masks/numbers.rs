//! The numbers under which the ranks keep masks.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::Mask;

/// Gives each mask a number; the one used longest ago loses its own.
#[derive(Debug)]
pub struct MaskNumbers {
    by_mask: FxHashMap<Mask, u32>,
    /// By number: the mask, and its last use.
    masks: Vec<(Mask, u64)>,
    /// Uses, oldest first; only a number's last one counts.
    uses: VecDeque<(u32, u64)>,
    num_uses: u64,
    capacity: usize,
}

impl MaskNumbers {
    /// Room for so many masks, at least as many as a step may have.
    pub fn new(capacity: usize) -> Self {
        Self {
            by_mask: FxHashMap::default(),
            masks: Vec::new(),
            uses: VecDeque::new(),
            num_uses: 0,
            capacity,
        }
    }

    /// The ranks are gone, and have no mask.
    pub fn forget(&mut self) {
        *self = Self::new(self.capacity);
    }

    /// The same mask. One that the ranks have is the one that is kept here, which the next comparison sees at once.
    pub fn shared(&self, mask: Mask) -> Mask {
        let known = self.by_mask.get_key_value(&mask);
        known.map_or(mask, |(known, _)| known.clone())
    }

    /// The mask's number, and whether the ranks do not have it. Nothing that a step's masks were given is lost before
    /// `capacity` others.
    pub fn number_of(&mut self, mask: &Mask) -> (u32, bool) {
        let known = self.by_mask.get(mask).copied();
        let number = known.unwrap_or_else(|| self.give_number(mask));
        self.num_uses += 1;
        self.masks[number as usize].1 = self.num_uses;
        self.uses.push_back((number, self.num_uses));
        if self.uses.len() > 2 * self.capacity {
            let masks = &self.masks;
            self.uses
                .retain(|(number, at)| masks[*number as usize].1 == *at);
        }
        (number, known.is_none())
    }

    fn give_number(&mut self, mask: &Mask) -> u32 {
        let number = if self.masks.len() < self.capacity {
            self.masks.push((mask.clone(), 0));
            u32::try_from(self.masks.len() - 1).expect("bounded by the capacity")
        } else {
            let number = self.longest_unused();
            let old = std::mem::replace(&mut self.masks[number as usize].0, mask.clone());
            self.by_mask.remove(&old);
            number
        };
        self.by_mask.insert(mask.clone(), number);
        number
    }

    fn longest_unused(&mut self) -> u32 {
        loop {
            let (number, at) = self.uses.pop_front().expect("every number has a last use");
            if self.masks[number as usize].1 == at {
                return number;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn mask(bits: u32) -> Mask {
        Mask::new(vec![bits])
    }

    #[test]
    fn a_mask_is_new_once_and_keeps_its_number() {
        let mut numbers = MaskNumbers::new(4);
        assert_eq!(numbers.number_of(&mask(1)), (0, true));
        assert_eq!(numbers.number_of(&mask(2)), (1, true));
        assert_eq!(numbers.number_of(&mask(1)), (0, false));
    }

    #[test]
    fn a_mask_that_the_ranks_have_shares_its_words() {
        let mut numbers = MaskNumbers::new(4);
        let kept = mask(1);
        numbers.number_of(&kept);
        assert!(Arc::ptr_eq(&numbers.shared(mask(1)).words, &kept.words));
        let other = mask(2);
        assert_eq!(numbers.shared(other.clone()), other);
    }

    #[test]
    fn the_mask_used_longest_ago_loses_its_number() {
        let mut numbers = MaskNumbers::new(2);
        numbers.number_of(&mask(1));
        numbers.number_of(&mask(2));
        numbers.number_of(&mask(1));
        assert_eq!(numbers.number_of(&mask(3)), (1, true));
        assert_eq!(numbers.number_of(&mask(1)), (0, false));
        assert_eq!(numbers.number_of(&mask(2)), (1, true), "it was forgotten");
    }

    #[test]
    fn as_many_masks_as_the_capacity_keep_their_numbers_whatever_was_used_before() {
        let mut numbers = MaskNumbers::new(8);
        for round in 0..50 {
            let masks: Vec<Mask> = (0..8).map(|i| mask(round * 5 + i)).collect();
            let mut given: Vec<u32> = masks.iter().map(|it| numbers.number_of(it).0).collect();
            let again: Vec<u32> = masks.iter().map(|it| numbers.number_of(it).0).collect();
            assert_eq!(given, again);
            given.sort_unstable();
            given.dedup();
            assert_eq!(given.len(), 8);
        }
    }
}
