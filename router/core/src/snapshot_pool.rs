//! Snapshots of slot state: every snapshot is free, being written, findable or parked.

use std::fmt;

use rustc_hash::FxHashMap;

use crate::eviction_order::EvictionOrder;
use crate::ids::{SnapshotId, TenantId};
use crate::prefix_hasher::PageHash;

/// Counts of snapshots by state; they add up to the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotCounts {
    /// Without content or user.
    pub free: u32,
    /// A step in flight saves to them.
    pub writing: u32,
    /// Later prompts may find them.
    pub findable: u32,
    /// Nobody finds them any more, but a step in flight still uses them.
    pub parked: u32,
}

#[derive(Clone, Debug, Default)]
struct Snapshot {
    /// The page that ends where it was taken; None unless prompts can find it.
    hash: Option<PageHash>,
    /// Whose request saved it.
    tenant: TenantId,
    /// Steps in flight that restore it.
    num_readers: u32,
    /// It was restored since it is findable.
    was_restored: bool,
}

/// All snapshots. Each operation is O(1).
#[derive(Clone)]
pub(crate) struct SnapshotPool {
    snapshots: Vec<Snapshot>,
    free: Vec<SnapshotId>,
    /// Findable ones that no step in flight restores, in the order of eviction.
    idle: EvictionOrder,
    by_hash: FxHashMap<PageHash, SnapshotId>,
    num_writing: u32,
    num_parked: u32,
}

impl SnapshotPool {
    pub(crate) fn new(num_snapshots: u32) -> Self {
        Self {
            snapshots: vec![Snapshot::default(); num_snapshots as usize],
            free: (0..num_snapshots).rev().map(SnapshotId).collect(),
            idle: EvictionOrder::new(num_snapshots),
            by_hash: FxHashMap::default(),
            num_writing: 0,
            num_parked: 0,
        }
    }

    pub(crate) fn counts(&self) -> SnapshotCounts {
        SnapshotCounts {
            free: count(self.free.len()),
            writing: self.num_writing,
            findable: count(self.by_hash.len()),
            parked: self.num_parked,
        }
    }

    pub(crate) fn has(&self, hash: PageHash) -> bool {
        self.by_hash.contains_key(&hash)
    }

    /// Of a prompt's pages, those up to the last one that ends at a snapshot.
    pub(crate) fn num_restorable(&self, hashes: &[PageHash]) -> usize {
        let last = hashes.iter().rposition(|hash| self.has(*hash));
        last.map_or(0, |last| last + 1)
    }

    /// A snapshot to save to: a free one, or else one that prompts can find and that was used longest ago.
    pub(crate) fn take(&mut self) -> Option<SnapshotId> {
        let snapshot = self.free.pop().or_else(|| self.evict())?;
        self.num_writing += 1;
        Some(snapshot)
    }

    fn evict(&mut self) -> Option<SnapshotId> {
        let snapshot = self.idle.first()?;
        self.idle.remove(snapshot);
        let hash = self.snapshots[snapshot as usize].hash.take();
        self.by_hash
            .remove(&hash.expect("only findable snapshots are idle"));
        Some(SnapshotId(snapshot))
    }

    /// What was saved is final: prompts with this page find it, unless they have one already.
    pub(crate) fn publish(&mut self, snapshot: SnapshotId, hash: PageHash, tenant: TenantId) {
        self.num_writing -= 1;
        if self.has(hash) {
            return self.free.push(snapshot);
        }
        self.by_hash.insert(hash, snapshot);
        self.snapshots[snapshot.0 as usize] = Snapshot {
            hash: Some(hash),
            tenant,
            ..Snapshot::default()
        };
        self.add_idle(snapshot);
    }

    /// What was saved is of no use.
    pub(crate) fn discard(&mut self, snapshot: SnapshotId) {
        self.num_writing -= 1;
        self.free.push(snapshot);
    }

    /// The same of `num` of them while steps in flight may still write them.
    pub(crate) fn park(&mut self, num: u32) {
        self.num_writing -= num;
        self.num_parked += num;
    }

    /// The last of these steps is complete.
    pub(crate) fn unpark(&mut self, snapshot: SnapshotId) {
        self.num_parked -= 1;
        self.free.push(snapshot);
    }

    /// Keeps a findable snapshot until a step that restores it is complete.
    pub(crate) fn pin(&mut self, hash: PageHash) -> SnapshotId {
        let snapshot = self.by_hash[&hash];
        let state = &mut self.snapshots[snapshot.0 as usize];
        state.was_restored = true;
        state.num_readers += 1;
        if state.num_readers == 1 {
            self.idle.remove(snapshot.0);
        }
        snapshot
    }

    /// A step that restored it is complete.
    pub(crate) fn unpin(&mut self, snapshot: SnapshotId) {
        let state = &mut self.snapshots[snapshot.0 as usize];
        state.num_readers -= 1;
        if state.num_readers > 0 {
            return;
        }
        if state.hash.is_some() {
            self.add_idle(snapshot);
        } else {
            self.unpark(snapshot);
        }
    }

    /// Frees a snapshot that a newer one of its request replaces. One that another request has restored stays.
    pub(crate) fn replace(&mut self, hash: PageHash) {
        let snapshot = self.by_hash.get(&hash);
        if snapshot.is_some_and(|it| !self.snapshots[it.0 as usize].was_restored) {
            self.forget(hash);
        }
    }

    /// Nobody finds the snapshot at the end of this page any more: the page is gone.
    pub(crate) fn forget(&mut self, hash: PageHash) {
        let Some(snapshot) = self.by_hash.remove(&hash) else {
            return;
        };
        let state = &mut self.snapshots[snapshot.0 as usize];
        state.hash = None;
        if state.num_readers > 0 {
            self.num_parked += 1;
        } else {
            self.idle.remove(snapshot.0);
            self.free.push(snapshot);
        }
    }

    /// Nobody finds any snapshot any more.
    pub(crate) fn unpublish_all(&mut self) {
        let hashes: Vec<PageHash> = self.by_hash.keys().copied().collect();
        hashes.into_iter().for_each(|hash| self.forget(hash));
    }

    /// The device has lost all snapshots.
    pub(crate) fn forget_all(&mut self) {
        *self = Self::new(count(self.snapshots.len()));
    }

    fn add_idle(&mut self, snapshot: SnapshotId) {
        let list = self
            .idle
            .own_list(self.snapshots[snapshot.0 as usize].tenant);
        self.idle.push(snapshot.0, list);
    }
}

/// The snapshots by state, each set in its order of use.
impl fmt::Debug for SnapshotPool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let described = |snapshot: u32| {
            let state = &self.snapshots[snapshot as usize];
            (SnapshotId(snapshot), state.hash, state.was_restored)
        };
        let lists = self.idle.iter();
        let idle: Vec<Vec<_>> = lists.map(|list| list.map(described).collect()).collect();
        let each = (0..).zip(&self.snapshots);
        let read = each.filter(|(_, state)| state.num_readers > 0);
        let read: Vec<_> = read
            .map(|(snapshot, state)| (described(snapshot), state.num_readers))
            .collect();
        formatter
            .debug_struct("SnapshotPool")
            .field("idle", &idle)
            .field("read", &read)
            .field("free", &self.free)
            .finish_non_exhaustive()
    }
}

fn count(num: usize) -> u32 {
    u32::try_from(num).expect("a pool is made from a u32 of snapshots")
}
