//! Events on their way from the driver to the publisher.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{io, mem};

use plait_core::{KvEvent, PageHash};
use rustc_hash::FxHashMap;

use crate::wakeup::Wakeup;

/// Waiting events from which on those that cancel each other are dropped.
const MAX_WAITING: usize = 16_384;

/// Filled by the driver, which never waits, and emptied whole by the publisher.
///
/// Its length is bounded by the pool. A page that was stored and removed since the publisher looked counts
/// for nothing, so at most one event a page remains.
#[derive(Debug)]
pub struct KvEventQueue {
    waiting: Mutex<Waiting>,
    wakeup: Wakeup,
}

#[derive(Debug)]
struct Waiting {
    events: Vec<KvEvent>,
    /// The number of events at which they are compacted next.
    compact_at: usize,
    is_closed: bool,
}

impl KvEventQueue {
    /// An empty one.
    pub fn new() -> io::Result<Self> {
        let waiting = Waiting {
            events: Vec::new(),
            compact_at: MAX_WAITING,
            is_closed: false,
        };
        Ok(Self {
            waiting: Mutex::new(waiting),
            wakeup: Wakeup::new()?,
        })
    }

    /// What the publisher polls.
    pub fn wakeup(&self) -> &Wakeup {
        &self.wakeup
    }

    /// Moves events into the queue.
    pub fn put(&self, events: &mut Vec<KvEvent>) {
        if events.is_empty() {
            return;
        }
        let mut waiting = self.lock();
        waiting.events.append(events);
        if waiting.events.len() >= waiting.compact_at {
            compact(&mut waiting.events);
            waiting.compact_at = MAX_WAITING.max(2 * waiting.events.len());
        }
        drop(waiting);
        self.wakeup.signal();
    }

    /// All events so far; None once the queue is closed and empty.
    pub fn take(&self) -> Option<Vec<KvEvent>> {
        self.wakeup.clear();
        let mut waiting = self.lock();
        waiting.compact_at = MAX_WAITING;
        let events = mem::take(&mut waiting.events);
        if waiting.is_closed {
            // Nothing more is signalled: whoever takes the last events must look once more.
            self.wakeup.signal();
        }
        (!waiting.is_closed || !events.is_empty()).then_some(events)
    }

    /// No event follows.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.wakeup.signal();
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The driver's end. The queue is closed when it is dropped.
#[derive(Debug)]
pub struct KvEventSender(pub Arc<KvEventQueue>);

impl Drop for KvEventSender {
    fn drop(&mut self) {
        self.0.close();
    }
}

fn page_of(event: &KvEvent) -> (u32, PageHash) {
    match event {
        KvEvent::Stored(page) => (page.kind, page.hash),
        KvEvent::Removed { kind, hash } => (*kind, *hash),
    }
}

/// Drops the events of a page that leave it as it was: a page's events alternate, and one hash always means
/// the same tokens.
fn compact(events: &mut Vec<KvEvent>) {
    let mut counts: FxHashMap<(u32, PageHash), (usize, usize)> = FxHashMap::default();
    for event in &*events {
        counts.entry(page_of(event)).or_default().0 += 1;
    }
    events.retain(|event| {
        let (num, seen) = counts.entry(page_of(event)).or_default();
        *seen += 1;
        *num % 2 == 1 && num == seen
    });
}

#[cfg(test)]
mod tests {
    use plait_core::StoredPage;

    use super::*;

    fn hash(number: u32) -> PageHash {
        PageHash::from_bytes(u128::from(number).to_le_bytes())
    }

    fn stored(number: u32) -> KvEvent {
        KvEvent::Stored(StoredPage {
            kind: 0,
            hash: hash(number),
            parent: None,
            salt: 0,
            tokens: Box::new([number]),
        })
    }

    fn removed(number: u32) -> KvEvent {
        let (kind, hash) = (0, hash(number));
        KvEvent::Removed { kind, hash }
    }

    #[test]
    fn what_leaves_a_page_as_it_was_is_dropped() {
        let mut events = vec![
            stored(1),
            removed(2),
            removed(1),
            stored(3),
            stored(2),
            removed(2),
            stored(1),
        ];
        compact(&mut events);
        assert_eq!(events, [stored(3), removed(2), stored(1)]);
    }

    #[test]
    fn a_publisher_that_never_looks_costs_memory_for_the_pool_only() {
        let queue = KvEventQueue::new().unwrap();
        for number in 0..10 * u32::try_from(MAX_WAITING).unwrap() {
            let page = number % 100;
            queue.put(&mut vec![stored(page), removed(page)]);
        }
        assert!(queue.lock().events.len() <= MAX_WAITING);
        assert!(queue.lock().events.capacity() <= 4 * MAX_WAITING);
    }

    fn is_readable(queue: &KvEventQueue) -> bool {
        let mut items = [zmq::PollItem::from_fd(queue.wakeup().fd(), zmq::POLLIN)];
        zmq::poll(&mut items, 0).unwrap() == 1
    }

    #[test]
    fn a_closed_queue_gives_the_rest_and_then_the_end() {
        let queue = KvEventQueue::new().unwrap();
        assert_eq!(queue.take(), Some(Vec::new()));
        queue.put(&mut vec![stored(1)]);
        queue.close();
        assert_eq!(queue.take(), Some(vec![stored(1)]));
        assert!(
            is_readable(&queue),
            "who polls before looking again must wake"
        );
        assert_eq!(queue.take(), None);
    }
}
