//! The pages that prompts find now, for listeners that have missed something.

use std::collections::BTreeMap;

use plait_core::{KvEvent, PageHash, StoredPage};
use rustc_hash::FxHashMap;

/// Every stored page, in the order in which they were stored.
#[derive(Debug, Default)]
pub struct StoredPages {
    pages: BTreeMap<u64, StoredPage>,
    numbers: FxHashMap<(u32, PageHash), u64>,
    next: u64,
}

impl StoredPages {
    /// Follows events.
    pub fn apply(&mut self, events: Vec<KvEvent>) {
        for event in events {
            match event {
                KvEvent::Stored(page) => self.store(page),
                KvEvent::Removed { kind, hash } => self.remove(kind, hash),
            }
        }
    }

    /// The pages, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &StoredPage> {
        self.pages.values()
    }

    fn store(&mut self, page: StoredPage) {
        self.numbers.insert((page.kind, page.hash), self.next);
        self.pages.insert(self.next, page);
        self.next += 1;
    }

    fn remove(&mut self, kind: u32, hash: PageHash) {
        let number = self.numbers.remove(&(kind, hash));
        number.and_then(|number| self.pages.remove(&number));
    }
}
