//! The running requests, indexed by slot, by order and by phase.

use std::collections::BTreeMap;

use crate::ids::{PageId, SlotId, StepId};
use crate::page_pool::PagePool;
use crate::round_robin::RoundRobin;
use crate::settings::Settings;
use crate::state::{Order, Phase, Running};

/// The requests that run. Every index follows from their phases and leases.
#[derive(Clone, Debug)]
pub(crate) struct RunningSet {
    by_slot: Vec<Option<Running>>,
    free_slots: Vec<SlotId>,
    by_order: BTreeMap<Order, SlotId>,
    prefills: BTreeMap<Order, SlotId>,
    decode_queue: RoundRobin,
    num_held: u32,
    num_held_pages: u32,
    num_prefill_pages: u32,
    page_size: u32,
}

impl RunningSet {
    pub(crate) fn new(settings: &Settings) -> Self {
        Self {
            by_slot: (0..settings.scheduler.max_seqs).map(|_| None).collect(),
            free_slots: (0..settings.scheduler.max_seqs).rev().map(SlotId).collect(),
            by_order: BTreeMap::new(),
            prefills: BTreeMap::new(),
            decode_queue: RoundRobin::new(settings.scheduler.max_seqs),
            num_held: 0,
            num_held_pages: 0,
            num_prefill_pages: 0,
            page_size: settings.pages.page_size,
        }
    }

    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.by_order.len()).expect("bounded by max_seqs")
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_order.is_empty()
    }

    /// The request in a slot; none where it ended while rows of it were on the wire.
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

    pub(crate) fn num_held(&self) -> u32 {
        self.num_held
    }

    /// Pages that come free when the held requests' results are in.
    pub(crate) fn num_held_pages(&self) -> u32 {
        self.num_held_pages
    }

    /// Pages that the prefills under way still need.
    pub(crate) fn num_prefill_pages(&self) -> u32 {
        self.num_prefill_pages
    }

    pub(crate) fn decode_queue(&mut self) -> &mut RoundRobin {
        &mut self.decode_queue
    }

    pub(crate) fn first_prefill(&self) -> Option<SlotId> {
        self.prefills.first_key_value().map(|(_, slot)| *slot)
    }

    /// The next prefill in order.
    pub(crate) fn prefill_after(&self, order: Order) -> Option<SlotId> {
        use std::ops::Bound::{Excluded, Unbounded};
        self.prefills
            .range((Excluded(order), Unbounded))
            .next()
            .map(|(_, slot)| *slot)
    }

    /// The running requests from `last` backwards, the last in order first.
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

    pub(crate) fn release_slot(&mut self, slot: SlotId) {
        self.free_slots.push(slot);
    }

    /// Puts a request into the slot that [`RunningSet::free_slot`] showed.
    pub(crate) fn insert(&mut self, running: Running) {
        let (order, slot) = (running.job.order, running.slot);
        assert_eq!(
            self.free_slots.pop(),
            Some(slot),
            "a request takes the slot that `free_slot` gave"
        );
        self.by_order.insert(order, slot);
        self.by_slot[slot.0 as usize] = Some(running);
        self.enter(slot);
    }

    /// Takes a request out; its lease and slot are the caller's to free or to park.
    pub(crate) fn remove(&mut self, slot: SlotId) -> Running {
        self.leave(slot);
        let running = self.by_slot[slot.0 as usize]
            .take()
            .expect("the indexes hold taken slots only");
        self.by_order.remove(&running.job.order);
        running
    }

    /// Gives a request no more rows.
    pub(crate) fn hold(&mut self, slot: SlotId) {
        self.shift(slot, Phase::Held);
    }

    /// Schedules a row that samples `num_sampled` tokens at most; a decoder goes to the tail of the decode queue.
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

    /// Pages that a request lacks to hold `num_tokens` tokens.
    pub(crate) fn num_missing_pages(&self, running: &Running, num_tokens: u32) -> u32 {
        num_tokens
            .div_ceil(self.page_size)
            .saturating_sub(running.lease.num_pages())
    }

    /// Leases free pages to a request.
    pub(crate) fn grow(&mut self, slot: SlotId, num: u32, pages: &mut PagePool) -> &[PageId] {
        let running = self.by_slot[slot.0 as usize]
            .as_mut()
            .expect("the indexes hold taken slots only");
        if running.phase == Phase::Prefilling {
            self.num_prefill_pages -= num;
        }
        pages.grow(&mut running.lease, num)
    }

    /// A decoder that was planned to its end is due tokens after all: its drafts were not accepted.
    pub(crate) fn resume_decoding(&mut self, slot: SlotId) {
        let running = self.at(slot);
        if running.phase == Phase::FullyPlanned && running.num_left() > 0 {
            self.shift(slot, Phase::Decoding);
        }
    }

    /// Takes back pages that no row on the wire can reach; how many are kept, where any are taken.
    pub(crate) fn trim(&mut self, slot: SlotId, pages: &mut PagePool) -> Option<u32> {
        let num_kept = self.at(slot).num_planned.div_ceil(self.page_size);
        let num_surplus = self.at(slot).lease.num_pages() - num_kept;
        if num_surplus == 0 {
            return None;
        }
        let running = self.at_mut(slot);
        pages.shrink(&mut running.lease, num_kept);
        if running.phase == Phase::Held {
            self.num_held_pages -= num_surplus;
        }
        Some(num_kept)
    }

    fn shift(&mut self, slot: SlotId, phase: Phase) {
        self.leave(slot);
        self.at_mut(slot).phase = phase;
        self.enter(slot);
    }

    fn enter(&mut self, slot: SlotId) {
        let running = self.at(slot);
        let (order, num_pages) = (running.job.order, running.lease.num_pages());
        match running.phase {
            Phase::Prefilling => {
                self.num_prefill_pages += self.num_missing_pages(running, running.job.num_known());
                self.prefills.insert(order, slot);
            }
            Phase::Decoding => self.decode_queue.push(slot),
            Phase::FullyPlanned => {}
            Phase::Held => {
                self.num_held += 1;
                self.num_held_pages += num_pages;
            }
        }
    }

    fn leave(&mut self, slot: SlotId) {
        let running = self.at(slot);
        let (order, num_pages) = (running.job.order, running.lease.num_pages());
        match running.phase {
            Phase::Prefilling => {
                self.num_prefill_pages -= self.num_missing_pages(running, running.job.num_known());
                self.prefills.remove(&order);
            }
            Phase::Decoding => self.decode_queue.remove(slot),
            Phase::FullyPlanned => {}
            Phase::Held => {
                self.num_held -= 1;
                self.num_held_pages -= num_pages;
            }
        }
    }
}
