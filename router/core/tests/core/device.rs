//! A worker that applies plans as `proto/README.md` says and sees its KV through block tables only.

use plait_core::{NewSlot, PageId, Plan, PrefillRow, SlotId, TokenId};

use crate::oracle;

#[derive(Clone, Debug)]
struct Slot {
    table: Vec<PageId>,
    seed: u64,
    next_output: u32,
    last_token: Option<TokenId>,
}

/// KV by page, and the tables by slot.
#[derive(Clone, Debug)]
pub struct Device {
    page_size: u32,
    /// By page and offset; nothing where the page was never written or its owner was freed.
    cells: Vec<Option<u64>>,
    slots: Vec<Option<Slot>>,
}

impl Device {
    pub fn new(num_pages: u32, page_size: u32, num_slots: u32) -> Self {
        let (cells, slots) = ((num_pages * page_size) as usize, num_slots as usize);
        Self {
            page_size,
            cells: vec![None; cells],
            slots: vec![None; slots],
        }
    }

    /// Runs one step; gives the token of each row that samples.
    pub fn step(&mut self, plan: &Plan) -> Vec<TokenId> {
        plan.freed_slots.iter().for_each(|slot| self.free(*slot));
        plan.new_slots.iter().for_each(|new| self.take(new));
        for (slot, page) in &plan.appended_pages {
            self.slot_mut(*slot).table.push(*page);
        }
        let mut tokens = plan.token_ids.as_slice();
        let mut sampled = Vec::new();
        for row in &plan.prefill {
            let (own, rest) = tokens.split_at((row.length + u32::from(row.lookahead)) as usize);
            sampled.extend(self.prefill(row, &own[..row.length as usize]));
            tokens = rest;
        }
        assert!(tokens.is_empty(), "token ids of no row");
        sampled.extend(
            plan.decode
                .iter()
                .map(|row| self.decode(row.slot, row.start)),
        );
        sampled
    }

    /// The pages in a slot's table.
    pub fn table(&self, slot: SlotId) -> &[PageId] {
        &self.slots[slot.0 as usize]
            .as_ref()
            .expect("the slot is taken")
            .table
    }

    /// A freed slot's KV is wiped, so that nobody can profit from it.
    fn free(&mut self, slot: SlotId) {
        let freed = self.slots[slot.0 as usize]
            .take()
            .expect("only taken slots are freed");
        for page in freed.table {
            let first = page.0 * self.page_size;
            self.cells[first as usize..(first + self.page_size) as usize].fill(None);
        }
    }

    fn take(&mut self, new: &NewSlot) {
        let slot = &mut self.slots[new.slot.0 as usize];
        assert!(slot.is_none(), "{:?} is given out twice", new.slot);
        let (seed, next_output) = (new.sampling.seed, new.next_output);
        *slot = Some(Slot {
            table: Vec::new(),
            seed,
            next_output,
            last_token: None,
        });
    }

    fn prefill(&mut self, row: &PrefillRow, tokens: &[TokenId]) -> Option<TokenId> {
        for (position, token) in (row.start..).zip(tokens) {
            self.write(row.slot, position, *token);
        }
        row.is_last_chunk
            .then(|| self.sample(row.slot, row.start + row.length))
    }

    fn decode(&mut self, slot: SlotId, position: u32) -> TokenId {
        let token = self
            .slot_mut(slot)
            .last_token
            .expect("a decode row follows a sampled token");
        self.write(slot, position, token);
        self.sample(slot, position + 1)
    }

    fn write(&mut self, slot: SlotId, position: u32, token: TokenId) {
        let kv = oracle::key_value(self.visible(slot, position), token);
        let cell = self.cell(slot, position);
        self.cells[cell] = Some(kv);
    }

    fn sample(&mut self, slot: SlotId, length: u32) -> TokenId {
        let (seed, next_output) = (self.slot_mut(slot).seed, self.slot_mut(slot).next_output);
        let token = oracle::sample(self.visible(slot, length), seed, next_output);
        let slot = self.slot_mut(slot);
        slot.next_output += 1;
        slot.last_token = Some(token);
        token
    }

    fn visible(&self, slot: SlotId, length: u32) -> Vec<u64> {
        let read =
            |position| self.cells[self.cell(slot, position)].expect("only computed KV is read");
        (0..length).map(read).collect()
    }

    fn cell(&self, slot: SlotId, position: u32) -> usize {
        let page = self.table(slot)[(position / self.page_size) as usize];
        (page.0 * self.page_size + position % self.page_size) as usize
    }

    fn slot_mut(&mut self, slot: SlotId) -> &mut Slot {
        self.slots[slot.0 as usize]
            .as_mut()
            .expect("rows and pages name taken slots")
    }
}
