//! The running requests, indexed by slot, by order and by phase.

use std::collections::BTreeMap;

use crate::ids::{SlotId, StepId};
use crate::kv_cache::{KvCache, Lease, PageSizes, PerKind};
use crate::plan::TrimmedSlot;
use crate::round_robin::RoundRobin;
use crate::settings::Settings;
use crate::state::{Order, Phase, Running};

/// The running requests. Every index follows from their phases and leases.
#[derive(Clone, Debug)]
pub(crate) struct RunningSet {
    by_slot: Vec<Option<Running>>,
    free_slots: Vec<SlotId>,
    by_order: BTreeMap<Order, SlotId>,
    prefills: BTreeMap<Order, SlotId>,
    decode_queue: RoundRobin,
    num_held: u32,
    num_expected_tokens: u64,
    num_held_pages: PerKind<u32>,
    num_prefill_pages: PerKind<u32>,
    page_sizes: PageSizes,
}

impl RunningSet {
    pub(crate) fn new(settings: &Settings) -> Self {
        let num_kinds = 1 + settings.runtime.other_kinds.len();
        Self {
            by_slot: (0..settings.scheduler.num_slots()).map(|_| None).collect(),
            free_slots: (0..settings.scheduler.num_slots())
                .rev()
                .map(SlotId)
                .collect(),
            by_order: BTreeMap::new(),
            prefills: BTreeMap::new(),
            decode_queue: RoundRobin::new(settings.scheduler.num_slots()),
            num_held: 0,
            num_expected_tokens: 0,
            num_held_pages: PerKind::from_elem(0, num_kinds),
            num_prefill_pages: PerKind::from_elem(0, num_kinds),
            page_sizes: PageSizes::of(settings),
        }
    }

    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.by_order.len()).expect("bounded by max_seqs")
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_order.is_empty()
    }

    /// The running requests in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Running> {
        self.by_order.values().map(|slot| self.at(*slot))
    }

    /// All requests, in order.
    pub(crate) fn into_ordered(mut self) -> impl Iterator<Item = Running> {
        let slots = self.by_order.into_values();
        slots.filter_map(move |slot| self.by_slot[slot.0 as usize].take())
    }

    /// The request in a slot; None if it ended while its rows were in flight.
    pub(crate) fn get(&self, slot: SlotId) -> Option<&Running> {
        self.by_slot[slot.0 as usize].as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: SlotId) -> Option<&mut Running> {
        self.by_slot[slot.0 as usize].as_mut()
    }

    /// The request in a slot that an index of this set gave.
    pub(crate) fn at(&self, slot: SlotId) -> &Running {
        self.get(slot).expect("the indexes hold taken slots only")
    }

    pub(crate) fn at_mut(&mut self, slot: SlotId) -> &mut Running {
        self.get_mut(slot)
            .expect("the indexes hold taken slots only")
    }

    /// Tokens that the running requests were expected to hold at their ends.
    pub(crate) fn num_expected_tokens(&self) -> u64 {
        self.num_expected_tokens
    }

    pub(crate) fn num_held(&self) -> u32 {
        self.num_held
    }

    /// Pages of each kind that become free when the held requests' results are in.
    pub(crate) fn num_held_pages(&self) -> &[u32] {
        &self.num_held_pages
    }

    /// Pages of each kind that running prefills still need.
    pub(crate) fn num_prefill_pages(&self) -> &[u32] {
        &self.num_prefill_pages
    }

    pub(crate) fn decode_queue(&mut self) -> &mut RoundRobin {
        &mut self.decode_queue
    }

    pub(crate) fn first_prefill(&self) -> Option<SlotId> {
        self.prefills.first_key_value().map(|(_, slot)| *slot)
    }

    /// The requests that are prefilling.
    pub(crate) fn prefills(&self) -> impl Iterator<Item = &Running> {
        self.prefills.values().map(|slot| self.at(*slot))
    }

    /// The next prefill in order.
    pub(crate) fn prefill_after(&self, order: Order) -> Option<SlotId> {
        use std::ops::Bound::{Excluded, Unbounded};
        self.prefills
            .range((Excluded(order), Unbounded))
            .next()
            .map(|(_, slot)| *slot)
    }

    /// The running requests from `last` backwards, last in order first.
    pub(crate) fn backwards_from(&self, last: Option<Order>) -> impl Iterator<Item = &Running> {
        use std::ops::Bound::{Included, Unbounded};
        let range = self
            .by_order
            .range((Unbounded, last.map_or(Unbounded, Included)));
        range.rev().map(|(_, slot)| self.at(*slot))
    }

    pub(crate) fn free_slot(&self) -> Option<SlotId> {
        self.free_slots.last().copied()
    }

    pub(crate) fn num_free_slots(&self) -> usize {
        self.free_slots.len()
    }

    pub(crate) fn release_slot(&mut self, slot: SlotId) {
        self.free_slots.push(slot);
    }

    /// Puts a request into the slot that [`RunningSet::free_slot`] returned.
    pub(crate) fn insert(&mut self, running: Running) {
        let (order, slot) = (running.job.order, running.slot);
        assert_eq!(
            self.free_slots.pop(),
            Some(slot),
            "a request takes the slot that `free_slot` gave"
        );
        self.num_expected_tokens += running.num_expected;
        self.by_order.insert(order, slot);
        self.by_slot[slot.0 as usize] = Some(running);
        self.enter(slot);
    }

    /// Removes a request. The caller frees or parks its lease and slot.
    pub(crate) fn remove(&mut self, slot: SlotId) -> Running {
        self.leave(slot);
        let running = self.by_slot[slot.0 as usize]
            .take()
            .expect("the indexes hold taken slots only");
        self.num_expected_tokens -= running.num_expected;
        self.by_order.remove(&running.job.order);
        running
    }

    /// Schedules no more rows of a request.
    pub(crate) fn hold(&mut self, slot: SlotId) {
        self.shift(slot, Phase::Held);
    }

    /// Schedules a row that samples `num_sampled` tokens at most. A decoder moves to the queue's tail.
    pub(crate) fn schedule_row(
        &mut self,
        slot: SlotId,
        step: StepId,
        length: u32,
        num_sampled: u32,
    ) {
        let running = self.at_mut(slot);
        let before = running.phase;
        let after = running.schedule_row(step, length, num_sampled);
        if before != after {
            self.shift(slot, after);
        } else if after == Phase::Decoding {
            self.decode_queue.move_to_tail(slot);
        }
    }

    /// Pages of each kind that a slot's request lacks for `num_tokens` tokens.
    pub(crate) fn num_missing_pages(&self, slot: SlotId, num_tokens: u32) -> PerKind<u32> {
        let lease = &self.at(slot).lease;
        self.page_sizes.num_missing(lease, num_tokens)
    }

    /// Leases so many free pages of each kind to a request, and returns its lease.
    pub(crate) fn grow(&mut self, slot: SlotId, num: &[u32], cache: &mut KvCache) -> &Lease {
        let running = self.by_slot[slot.0 as usize]
            .as_mut()
            .expect("the indexes hold taken slots only");
        if running.phase == Phase::Prefilling {
            subtract(&mut self.num_prefill_pages, num);
        }
        cache.grow(&mut running.lease, num);
        &running.lease
    }

    /// Adds published pages up to `num_tokens` to a prefill's lease, and goes on behind them. Returns the lease
    /// and the number of pages of each kind.
    pub(crate) fn adopt(
        &mut self,
        slot: SlotId,
        num_tokens: u32,
        cache: &mut KvCache,
    ) -> (&Lease, PerKind<u32>) {
        let running = self.by_slot[slot.0 as usize]
            .as_mut()
            .expect("the indexes hold taken slots only");
        let num = cache.pin_more(&mut running.lease, &running.job, num_tokens);
        running.num_planned = num_tokens;
        subtract(&mut self.num_prefill_pages, &num);
        (&running.lease, num)
    }

    /// Puts a fully planned decoder back into the queue, because draft tokens were rejected.
    pub(crate) fn resume_decoding(&mut self, slot: SlotId) {
        let running = self.at(slot);
        if running.phase == Phase::FullyPlanned && running.num_left() > 0 {
            self.shift(slot, Phase::Decoding);
        }
    }

    /// Schedules no row of a request until its mask is there.
    pub(crate) fn await_mask(&mut self, slot: SlotId) {
        if self.at(slot).phase != Phase::Held {
            self.shift(slot, Phase::AwaitingMask);
        }
    }

    /// Lets a request go on whose mask is there, once its results are in.
    pub(crate) fn resume_with_mask(&mut self, slot: SlotId) {
        let running = self.at_mut(slot);
        if running.takes_late_mask() {
            let phase = running.phase_with_mask();
            self.shift(slot, phase);
        }
    }

    /// Takes back pages that no row in flight can reach.
    pub(crate) fn trim(
        &mut self,
        slot: SlotId,
        cache: &mut KvCache,
        trimmed: &mut Vec<TrimmedSlot>,
    ) {
        let running = self.by_slot[slot.0 as usize]
            .as_mut()
            .expect("the indexes hold taken slots only");
        let is_held = running.phase == Phase::Held;
        let num_held = &mut self.num_held_pages;
        cache.trim(
            &mut running.lease,
            running.num_planned,
            |kind, num_pages, num_taken| {
                trimmed.push(TrimmedSlot {
                    kind,
                    slot,
                    num_pages,
                });
                if is_held {
                    num_held[kind as usize] -= num_taken;
                }
            },
        );
    }

    fn shift(&mut self, slot: SlotId, phase: Phase) {
        self.leave(slot);
        self.at_mut(slot).phase = phase;
        self.enter(slot);
    }

    fn enter(&mut self, slot: SlotId) {
        let running = self.at(slot);
        let order = running.job.order;
        match running.phase {
            Phase::Prefilling => {
                let num = self.num_missing_pages(slot, running.job.num_known());
                add(&mut self.num_prefill_pages, &num);
                self.prefills.insert(order, slot);
            }
            Phase::Decoding => self.decode_queue.push(slot),
            Phase::FullyPlanned | Phase::AwaitingMask => {}
            Phase::Held => {
                let num = running.lease.num_pages();
                self.num_held += 1;
                add(&mut self.num_held_pages, &num);
            }
        }
    }

    fn leave(&mut self, slot: SlotId) {
        let running = self.at(slot);
        let order = running.job.order;
        match running.phase {
            Phase::Prefilling => {
                let num = self.num_missing_pages(slot, running.job.num_known());
                subtract(&mut self.num_prefill_pages, &num);
                self.prefills.remove(&order);
            }
            Phase::Decoding => self.decode_queue.remove(slot),
            Phase::FullyPlanned | Phase::AwaitingMask => {}
            Phase::Held => {
                let num = running.lease.num_pages();
                self.num_held -= 1;
                subtract(&mut self.num_held_pages, &num);
            }
        }
    }
}

pub(crate) fn add(sums: &mut [u32], num: &[u32]) {
    for (sum, num) in sums.iter_mut().zip(num) {
        *sum += num;
    }
}

fn subtract(sums: &mut [u32], num: &[u32]) {
    for (sum, num) in sums.iter_mut().zip(num) {
        *sum -= num;
    }
}
