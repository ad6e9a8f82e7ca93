//! Which pages a replica should hold, by what it was sent: the last ones that fit its pool.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::prefix_hasher::PageHash;

/// Pages in the order of their last use. The replica itself may hold fewer, for requests lease pages too, or
/// more: the pages of its answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeldPages {
    max_pages: usize,
    last_use: FxHashMap<PageHash, u64>,
    /// Uses, oldest first; only a page's last one counts.
    uses: VecDeque<(PageHash, u64)>,
    num_uses: u64,
}

impl HeldPages {
    /// Holds so many pages from now on.
    pub(crate) fn resize(&mut self, max_pages: usize) {
        self.max_pages = max_pages;
        self.evict();
    }

    /// How many of a prompt's first pages are held.
    pub(crate) fn num_held(&self, pages: &[PageHash]) -> usize {
        let held = pages
            .iter()
            .take_while(|page| self.last_use.contains_key(page));
        held.count()
    }

    /// A prompt with these pages is sent. Its last pages are evicted before its first ones.
    pub(crate) fn touch(&mut self, pages: &[PageHash]) {
        for page in pages.iter().rev() {
            self.num_uses += 1;
            self.last_use.insert(*page, self.num_uses);
            self.uses.push_back((*page, self.num_uses));
        }
        self.evict();
        if self.uses.len() > 2 * self.last_use.len() {
            self.uses
                .retain(|(page, at)| self.last_use.get(page) == Some(at));
        }
    }

    fn evict(&mut self) {
        while self.last_use.len() > self.max_pages {
            let Some((page, at)) = self.uses.pop_front() else {
                return;
            };
            if self.last_use.get(&page) == Some(&at) {
                self.last_use.remove(&page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(numbers: &[u8]) -> Vec<PageHash> {
        let hash = |number: &u8| PageHash::from_bytes([*number; 16]);
        numbers.iter().map(hash).collect()
    }

    #[test]
    fn a_prefix_is_held_up_to_the_first_page_that_is_not() {
        let mut held = HeldPages::default();
        held.resize(8);
        held.touch(&pages(&[1, 2, 3]));
        assert_eq!(held.num_held(&pages(&[1, 2, 9, 3])), 2);
        assert_eq!(held.num_held(&pages(&[2, 3])), 2);
        assert_eq!(held.num_held(&pages(&[9])), 0);
    }

    #[test]
    fn the_pages_used_longest_ago_go_first_and_of_one_prompt_the_last() {
        let mut held = HeldPages::default();
        held.resize(4);
        held.touch(&pages(&[1, 2]));
        held.touch(&pages(&[3, 4]));
        held.touch(&pages(&[1, 5]));
        assert_eq!(held.num_held(&pages(&[1, 5])), 2);
        assert_eq!(held.num_held(&pages(&[1, 2])), 1, "2 was used longest ago");
        assert_eq!(held.num_held(&pages(&[3, 4])), 2);
        held.resize(1);
        assert_eq!(
            held.num_held(&pages(&[1])),
            1,
            "the last prompt's first page"
        );
    }

    #[test]
    fn memory_follows_the_pool_and_not_the_number_of_uses() {
        let mut held = HeldPages::default();
        held.resize(16);
        for number in 0..=255 {
            held.touch(&pages(&[0, number % 32]));
        }
        assert!(held.uses.len() <= 2 * 16 + 2, "{}", held.uses.len());
    }
}
