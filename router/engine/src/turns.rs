//! What waits for a thread, taken in turns among tenants.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

/// Something that waits.
pub trait Waits {
    /// Whose turn it takes.
    fn tenant(&self) -> u64;
    /// What it holds in memory.
    fn num_bytes(&self) -> usize;
}

/// A lane for each tenant; each one's own go by arrival.
#[derive(Debug)]
pub struct Turns<T> {
    lanes: FxHashMap<u64, Lane<T>>,
    /// Tenants that wait; the first is next.
    turns: VecDeque<u64>,
    size: Size,
}

/// How much waits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Size {
    /// How many.
    pub num: usize,
    /// In memory.
    pub num_bytes: usize,
}

/// What one tenant has, by arrival. A lane is never empty.
#[derive(Debug)]
struct Lane<T> {
    waiting: VecDeque<T>,
    size: Size,
}

impl Size {
    fn add(&mut self, item: &impl Waits) {
        self.num += 1;
        self.num_bytes += item.num_bytes();
    }

    fn remove(&mut self, item: &impl Waits) {
        self.num -= 1;
        self.num_bytes -= item.num_bytes();
    }
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self {
            lanes: FxHashMap::default(),
            turns: VecDeque::new(),
            size: Size::default(),
        }
    }
}

impl<T> Default for Lane<T> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            size: Size::default(),
        }
    }
}

impl<T: Waits> Turns<T> {
    /// How much waits.
    pub fn size(&self) -> Size {
        self.size
    }

    /// The last of its tenant.
    pub fn push(&mut self, item: T) {
        self.size.add(&item);
        if !self.lanes.contains_key(&item.tenant()) {
            self.turns.push_back(item.tenant());
        }
        let lane = self.lanes.entry(item.tenant()).or_default();
        lane.size.add(&item);
        lane.waiting.push_back(item);
    }

    /// The first that `may_go`, of the next tenant that has one.
    pub fn take(&mut self, may_go: impl Fn(&T) -> bool) -> Option<T> {
        let mut turns = self.turns.iter().enumerate();
        let (turn, place) = turns.find_map(|(turn, tenant)| {
            let lane = self.lanes.get(tenant)?;
            Some((turn, lane.waiting.iter().position(&may_go)?))
        })?;
        let tenant = self.turns.remove(turn)?;
        let item = self.lanes.get_mut(&tenant)?.waiting.remove(place)?;
        if self.note_removed(&item) {
            self.turns.push_back(tenant);
        }
        Some(item)
    }

    /// All that `goes`; each tenant's by arrival.
    pub fn take_all(&mut self, goes: impl Fn(&T) -> bool) -> Vec<T> {
        let tenants: Vec<u64> = self.turns.iter().copied().collect();
        let mut taken = Vec::new();
        for tenant in tenants {
            let lane = self.lanes.get_mut(&tenant);
            let (go, stay) = lane
                .map(|lane| std::mem::take(&mut lane.waiting))
                .unwrap_or_default()
                .into_iter()
                .partition::<VecDeque<T>, _>(&goes);
            if let Some(lane) = self.lanes.get_mut(&tenant) {
                lane.waiting = stay;
            }
            for item in go {
                self.forget(&item);
                taken.push(item);
            }
        }
        taken
    }

    /// The last of the tenant with most. Of lanes of one size, that of `tenant` counts as the largest.
    pub fn drop_last_of_largest(&mut self, by_bytes: bool, tenant: u64) -> Option<T> {
        let size = |lane: &Lane<T>| match by_bytes {
            true => lane.size.num_bytes,
            false => lane.size.num,
        };
        let lanes = self.lanes.iter_mut();
        let (_, lane) = lanes.max_by_key(|(it, lane)| (size(lane), **it == tenant))?;
        let item = lane.waiting.pop_back()?;
        self.forget(&item);
        Some(item)
    }

    /// What was taken out of turn.
    fn forget(&mut self, item: &T) {
        if !self.note_removed(item) {
            self.turns.retain(|it| *it != item.tenant());
        }
    }

    /// Whether its tenant has more.
    fn note_removed(&mut self, item: &T) -> bool {
        self.size.remove(item);
        let Some(lane) = self.lanes.get_mut(&item.tenant()) else {
            return false;
        };
        lane.size.remove(item);
        let has_more = !lane.waiting.is_empty();
        if !has_more {
            self.lanes.remove(&item.tenant());
        }
        has_more
    }
}
