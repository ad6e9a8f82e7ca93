//! A worker that applies plans as `proto/README.md` says and sees its KV through block tables only.

use plait_core::{DecodeRow, NewSlot, PageId, Plan, PrefillRow, SlotId, TokenId};

use crate::oracle;

#[derive(Clone, Debug)]
struct Slot {
    table: Vec<PageId>,
    seed: u64,
    next_output: u32,
    last_token: Option<TokenId>,
    /// Tokens whose KV it has.
    length: u32,
}

/// What one step did.
#[derive(Clone, Debug)]
pub struct Computed {
    /// How many tokens each row that samples accepted.
    pub num_accepted: Vec<u32>,
    /// These tokens.
    pub tokens: Vec<TokenId>,
    /// Pages that the rows could read or write, with whose slots they are.
    pub named: Vec<(PageId, SlotId)>,
    /// Where KV was written.
    written: Vec<usize>,
}

/// KV by page, and the tables by slot.
#[derive(Clone, Debug)]
pub struct FakeDevice {
    page_size: u32,
    /// By page and offset; nothing where the page was never written or its owner was freed.
    cells: Vec<Option<u64>>,
    /// Cells whose step's result is in.
    is_complete: Vec<bool>,
    slots: Vec<Option<Slot>>,
    written: Vec<usize>,
}

impl FakeDevice {
    pub fn new(num_pages: u32, page_size: u32, num_slots: u32) -> Self {
        let (cells, slots) = ((num_pages * page_size) as usize, num_slots as usize);
        Self {
            page_size,
            cells: vec![None; cells],
            is_complete: vec![false; cells],
            slots: vec![None; slots],
            written: Vec::new(),
        }
    }

    /// Runs one step.
    pub fn step(&mut self, plan: &Plan) -> Computed {
        plan.freed_slots.iter().for_each(|slot| self.free(*slot));
        plan.new_slots.iter().for_each(|new| self.take(new));
        for (slot, num_kept) in &plan.trimmed_slots {
            self.slot_mut(*slot).table.truncate(*num_kept as usize);
        }
        self.append(plan);
        self.written.clear();
        let mut tokens = plan.token_ids.as_slice();
        let named = self.named(plan);
        let (mut sampled, mut num_accepted) = (Vec::new(), Vec::new());
        for row in &plan.prefill {
            let (own, rest) = tokens.split_at((row.length + u32::from(row.lookahead)) as usize);
            let token = self.prefill(row, &own[..row.length as usize]);
            num_accepted.extend(token.map(|_| 1));
            sampled.extend(token);
            tokens = rest;
        }
        assert!(tokens.is_empty(), "token ids of no row");
        for row in &plan.decode {
            let accepted = self.decode(row);
            num_accepted.push(u32::try_from(accepted.len()).unwrap());
            sampled.extend(accepted);
        }
        Computed {
            num_accepted,
            tokens: sampled,
            named,
            written: self.written.clone(),
        }
    }

    /// The step's result is in.
    pub fn complete(&mut self, computed: &Computed) {
        for cell in &computed.written {
            self.is_complete[*cell] = true;
        }
    }

    /// The KV of every token in the page is computed, and the results of the steps are in.
    pub fn is_full(&self, page: PageId) -> bool {
        self.is_complete[self.cells_of(page)].iter().all(|it| *it)
    }

    /// The pages in a slot's table.
    pub fn table(&self, slot: SlotId) -> &[PageId] {
        &self.slots[slot.0 as usize]
            .as_ref()
            .expect("the slot is taken")
            .table
    }

    fn free(&mut self, slot: SlotId) {
        self.slots[slot.0 as usize]
            .take()
            .expect("only taken slots are freed");
    }

    /// A page that is not from the cache is wiped, so that nobody can profit from what it held.
    fn append(&mut self, plan: &Plan) {
        for (slot, page) in &plan.appended_pages {
            let new = plan.new_slots.iter().find(|new| new.slot == *slot);
            let num_hits = new.map_or(0, |new| new.num_cached / self.page_size);
            let table = &mut self.slot_mut(*slot).table;
            let is_hit = table.len() < num_hits as usize;
            table.push(*page);
            if !is_hit {
                let cells = self.cells_of(*page);
                self.cells[cells.clone()].fill(None);
                self.is_complete[cells].fill(false);
            }
        }
    }

    fn cells_of(&self, page: PageId) -> std::ops::Range<usize> {
        let first = (page.0 * self.page_size) as usize;
        first..first + self.page_size as usize
    }

    fn take(&mut self, new: &NewSlot) {
        let slot = &mut self.slots[new.slot.0 as usize];
        assert!(slot.is_none(), "{:?} is given out twice", new.slot);
        let (seed, next_output) = (new.request.0, new.next_output);
        *slot = Some(Slot {
            table: Vec::new(),
            seed,
            next_output,
            last_token: None,
            length: new.num_cached,
        });
    }

    fn prefill(&mut self, row: &PrefillRow, tokens: &[TokenId]) -> Option<TokenId> {
        for (position, token) in (row.start..).zip(tokens) {
            self.write(row.slot, position, *token);
        }
        self.slot_mut(row.slot).length = row.start + row.length;
        row.is_last_chunk
            .then(|| self.sample(row.slot, row.start + row.length))
    }

    /// Drafts are right by luck; what is written for the others is garbage.
    fn decode(&mut self, row: &DecodeRow) -> Vec<TokenId> {
        let (slot, length) = (row.slot, self.slot_mut(row.slot).length);
        assert!(length <= row.start, "start is an upper bound");
        let mut accepted = Vec::new();
        for position in length..length + row.length {
            let token = self.slot_mut(slot).last_token;
            self.write(slot, position, token.expect("it follows a sampled token"));
            accepted.push(self.sample(slot, position + 1));
            self.slot_mut(slot).length = position + 1;
            if oracle::mix(u64::from(position), accepted.len() as u64).is_multiple_of(3) {
                break;
            }
        }
        for position in self.slot_mut(slot).length..length + row.length {
            let cell = self.cell(slot, position);
            self.cells[cell] = Some(666);
        }
        accepted
    }

    /// Everything up to the last position that a row can write.
    fn named(&mut self, plan: &Plan) -> Vec<(PageId, SlotId)> {
        let prefills = plan
            .prefill
            .iter()
            .map(|row| (row.slot, row.start + row.length));
        let decodes = plan.decode.iter().map(|row| {
            let length = self.slots[row.slot.0 as usize].as_ref().unwrap().length;
            (row.slot, length + row.length)
        });
        let ends: Vec<_> = prefills.chain(decodes).collect();
        let pages = ends.into_iter().flat_map(|(slot, end)| {
            let num_pages = end.div_ceil(self.page_size) as usize;
            self.table(slot)[..num_pages]
                .iter()
                .map(move |page| (*page, slot))
        });
        pages.collect()
    }

    fn write(&mut self, slot: SlotId, position: u32, token: TokenId) {
        let kv = oracle::key_value(self.visible(slot, position), token);
        let cell = self.cell(slot, position);
        self.cells[cell] = Some(kv);
        self.written.push(cell);
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
