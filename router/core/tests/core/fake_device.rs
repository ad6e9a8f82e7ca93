//! A worker that applies plans as `proto/README.md` says and sees its KV through page tables only.

use std::collections::{BTreeMap, BTreeSet};

use plait_core::{
    DecodeRow, FAILED_ROW, NewSlot, PageId, Plan, PrefillRow, RequestId, Settings, SlotId, TokenId,
};

use crate::oracle;
use crate::slot_memory::SlotMemory;

#[derive(Clone, Debug)]
struct Slot {
    /// The pages of each kind.
    tables: Vec<Vec<PageId>>,
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
    pub named: Vec<(Page, SlotId)>,
}

impl Computed {
    /// The tokens, where those of failing requests' rows have none.
    pub fn with_failures(
        &self,
        sampling: &[RequestId],
        failing: &BTreeSet<RequestId>,
    ) -> Vec<TokenId> {
        let rows = sampling.iter().zip(&self.num_accepted);
        let whose = rows.flat_map(|(request, num)| vec![*request; *num as usize]);
        let tokens = whose.zip(&self.tokens);
        tokens
            .map(|(request, token)| match failing.contains(&request) {
                true => FAILED_ROW,
                false => *token,
            })
            .collect()
    }
}

/// A page of a kind's pool.
pub type Page = (usize, PageId);

/// What one kind of layers keeps.
#[derive(Clone, Debug)]
struct Pool {
    page_size: u32,
    /// By page and offset; nothing where the page was never written or its owner was freed.
    cells: Vec<Option<u64>>,
}

impl Pool {
    fn new(num_pages: u32, page_size: u32) -> Self {
        let num_cells = (num_pages * page_size) as usize;
        Self {
            page_size,
            cells: vec![None; num_cells],
        }
    }

    fn cells_of(&self, page: PageId) -> std::ops::Range<usize> {
        let first = (page.0 * self.page_size) as usize;
        first..first + self.page_size as usize
    }

    fn cell(&self, table: &[PageId], position: u32) -> usize {
        let page = table[(position / self.page_size) as usize];
        (page.0 * self.page_size + position % self.page_size) as usize
    }
}

/// KV by kind and page, and the tables by slot. Every kind keeps the KV of every position.
#[derive(Clone, Debug)]
pub struct FakeDevice {
    pools: Vec<Pool>,
    slots: Vec<Option<Slot>>,
    /// Of requests that came from another scheduler, where they had other numbers.
    pub seeds: BTreeMap<RequestId, u64>,
    /// If the model keeps slot state.
    memory: Option<SlotMemory>,
}

impl FakeDevice {
    pub fn new(settings: &Settings) -> Self {
        let mut pools = vec![Pool::new(
            settings.runtime.num_pages,
            settings.pages.page_size,
        )];
        let others = settings.runtime.other_kinds.iter();
        pools.extend(others.map(|kind| Pool::new(kind.num_pages, kind.page_size)));
        Self {
            pools,
            slots: vec![None; settings.scheduler.num_slots() as usize],
            seeds: BTreeMap::new(),
            memory: SlotMemory::new(settings),
        }
    }

    /// Runs one step. Rows of the requests that are left out sample nothing.
    pub fn step(&mut self, plan: &Plan, left_out: &BTreeSet<RequestId>) -> Computed {
        plan.freed_slots.iter().for_each(|slot| self.free(*slot));
        plan.new_slots.iter().for_each(|new| self.take(new));
        for trimmed in &plan.trimmed_slots {
            let tables = &mut self.slot_mut(trimmed.slot).tables;
            tables[trimmed.kind as usize].truncate(trimmed.num_pages as usize);
        }
        let hits = self.hits(plan);
        for (kind, slot, page) in appended(plan) {
            self.append(kind, slot, page, hits.contains(&(slot, (kind, page))));
        }
        if let Some(memory) = &mut self.memory {
            memory.begin(plan);
        }
        let mut tokens = plan.token_ids.as_slice();
        let named = self.named(plan);
        let (mut sampled, mut num_accepted) = (Vec::new(), Vec::new());
        for row in &plan.prefill {
            let (own, rest) = tokens.split_at((row.length + u32::from(row.lookahead)) as usize);
            let is_left_out = left_out.contains(&row.request);
            let token = self.prefill(row, &own[..row.length as usize], is_left_out);
            if row.is_last_chunk {
                num_accepted.push(u32::from(token.is_some()));
            }
            sampled.extend(token);
            tokens = rest;
        }
        assert!(tokens.is_empty(), "token ids of no row");
        for row in &plan.decode {
            let accepted = self.decode(row, left_out.contains(&row.request));
            num_accepted.push(u32::try_from(accepted.len()).unwrap());
            sampled.extend(accepted);
        }
        Computed {
            num_accepted,
            tokens: sampled,
            named,
        }
    }

    /// The KV of every token in the page is computed by steps that were sent.
    pub fn is_full(&self, (kind, page): Page) -> bool {
        let pool = &self.pools[kind];
        pool.cells[pool.cells_of(page)].iter().all(Option::is_some)
    }

    /// The pages of a plan that come from the cache: those a slot gains before its row's first token.
    pub fn hits(&self, plan: &Plan) -> Vec<(SlotId, Page)> {
        let mut hits = Vec::new();
        for row in &plan.prefill {
            let is_new = plan.new_slots.iter().any(|new| new.slot == row.slot);
            for (kind, pool) in self.pools.iter().enumerate() {
                let num_held = if is_new {
                    0
                } else {
                    self.table(kind, row.slot).len()
                };
                let gained = appended(plan).filter(|it| (it.0, it.1) == (kind, row.slot));
                let num = (row.start / pool.page_size) as usize;
                let adopted = gained.take(num.saturating_sub(num_held));
                hits.extend(adopted.map(|it| (row.slot, (kind, it.2))));
            }
        }
        hits
    }

    /// The pages of a kind in a slot's table.
    pub fn table(&self, kind: usize, slot: SlotId) -> &[PageId] {
        &self.slot(slot).tables[kind]
    }

    fn free(&mut self, slot: SlotId) {
        self.slots[slot.0 as usize]
            .take()
            .expect("only taken slots are freed");
    }

    /// A page that is not from the cache is wiped, so that no read can profit from what it held.
    fn append(&mut self, kind: usize, slot: SlotId, page: PageId, is_hit: bool) {
        self.slot_mut(slot).tables[kind].push(page);
        if !is_hit {
            let pool = &mut self.pools[kind];
            let cells = pool.cells_of(page);
            pool.cells[cells].fill(None);
        }
    }

    fn take(&mut self, new: &NewSlot) {
        let num_kinds = self.pools.len();
        let slot = &mut self.slots[new.slot.0 as usize];
        assert!(slot.is_none(), "{:?} is given out twice", new.slot);
        let seed = self.seeds.get(&new.request).copied();
        let (seed, next_output) = (seed.unwrap_or(new.request.0), new.next_output);
        *slot = Some(Slot {
            tables: vec![Vec::new(); num_kinds],
            seed,
            next_output,
            last_token: None,
            length: new.num_cached,
        });
    }

    fn prefill(
        &mut self,
        row: &PrefillRow,
        tokens: &[TokenId],
        is_left_out: bool,
    ) -> Option<TokenId> {
        let length = self.slot(row.slot).length;
        let is_page_start = self
            .pools
            .iter()
            .all(|it| row.start.is_multiple_of(it.page_size));
        assert!(
            row.start == length || row.start > length && is_page_start,
            "{row:?} goes on elsewhere"
        );
        for (position, token) in (row.start..).zip(tokens) {
            self.write(row.slot, position, *token);
        }
        // The last token of a row that is left out is computed again.
        self.slot_mut(row.slot).length = row.start + row.length - u32::from(is_left_out);
        if let Some(memory) = self.memory.as_mut().filter(|_| is_left_out) {
            memory.poison(row.slot);
        }
        (row.is_last_chunk && !is_left_out).then(|| self.sample(row.slot, row.start + row.length))
    }

    /// Drafts are right by luck; what is written for the others is garbage.
    fn decode(&mut self, row: &DecodeRow, is_left_out: bool) -> Vec<TokenId> {
        let (slot, length) = (row.slot, self.slot(row.slot).length);
        assert!(length <= row.start, "start is an upper bound");
        let mut accepted = Vec::new();
        if is_left_out {
            if let Some(memory) = &mut self.memory {
                memory.poison(slot);
            }
            return accepted;
        }
        for position in length..length + row.length {
            let token = self.slot(slot).last_token;
            self.write(slot, position, token.expect("it follows a sampled token"));
            accepted.push(self.sample(slot, position + 1));
            self.slot_mut(slot).length = position + 1;
            if oracle::mix(u64::from(position), accepted.len() as u64).is_multiple_of(3) {
                break;
            }
        }
        for position in self.slot(slot).length..length + row.length {
            for kind in 0..self.pools.len() {
                let cell = self.cell(kind, slot, position);
                self.pools[kind].cells[cell] = Some(666);
            }
        }
        accepted
    }

    /// Whether no other slot has the page of a position.
    fn is_held_by_one(&self, kind: usize, slot: SlotId, position: u32) -> bool {
        let page_of = |table: &[PageId]| table[(position / self.pools[kind].page_size) as usize];
        let page = page_of(self.table(kind, slot));
        let holders = self.slots.iter().flatten();
        holders.filter(|it| it.tables[kind].contains(&page)).count() == 1
    }

    /// Everything up to the last position that a row can write.
    fn named(&self, plan: &Plan) -> Vec<(Page, SlotId)> {
        let prefills = plan
            .prefill
            .iter()
            .map(|row| (row.slot, row.start + row.length));
        let decodes = plan
            .decode
            .iter()
            .map(|row| (row.slot, self.slot(row.slot).length + row.length));
        let mut named = Vec::new();
        for (slot, end) in prefills.chain(decodes) {
            for (kind, pool) in self.pools.iter().enumerate() {
                let num_pages = end.div_ceil(pool.page_size) as usize;
                let pages = &self.table(kind, slot)[..num_pages];
                named.extend(pages.iter().map(|page| ((kind, *page), slot)));
            }
        }
        named
    }

    /// Each kind keeps something else of the same token.
    fn write(&mut self, slot: SlotId, position: u32, token: TokenId) {
        let kv = oracle::key_value(self.visible(slot, position), token);
        for kind in 0..self.pools.len() {
            let cell = self.cell(kind, slot, position);
            let is_written = self.pools[kind].cells[cell].is_some();
            assert!(
                !is_written || self.is_held_by_one(kind, slot, position),
                "a row writes again what others read"
            );
            self.pools[kind].cells[cell] = Some(kv.wrapping_add(kind as u64));
        }
        if let Some(memory) = &mut self.memory {
            memory.add(slot, position, kv);
        }
    }

    fn sample(&mut self, slot: SlotId, length: u32) -> TokenId {
        let (seed, next_output) = (self.slot(slot).seed, self.slot(slot).next_output);
        let visible = self.visible(slot, length);
        let token = match &self.memory {
            // What it sees of earlier tokens is in the slot state only.
            Some(memory) => oracle::sample_from(memory.get(slot).hash, seed, next_output),
            None => oracle::sample(visible, seed, next_output),
        };
        let slot = self.slot_mut(slot);
        slot.next_output += 1;
        slot.last_token = Some(token);
        token
    }

    /// What all kinds keep of the first positions, which is of the same tokens.
    fn visible(&self, slot: SlotId, length: u32) -> Vec<u64> {
        let read = |kind: usize, position| {
            let kept = self.pools[kind].cells[self.cell(kind, slot, position)];
            kept.expect("only computed KV is read")
                .wrapping_sub(kind as u64)
        };
        let first: Vec<u64> = (0..length).map(|position| read(0, position)).collect();
        for kind in 1..self.pools.len() {
            let other = (0..length).map(|position| read(kind, position));
            assert!(
                other.eq(first.iter().copied()),
                "kind {kind} is of other tokens"
            );
        }
        first
    }

    fn cell(&self, kind: usize, slot: SlotId, position: u32) -> usize {
        self.pools[kind].cell(self.table(kind, slot), position)
    }

    fn slot(&self, slot: SlotId) -> &Slot {
        self.slots[slot.0 as usize]
            .as_ref()
            .expect("rows and pages name taken slots")
    }

    fn slot_mut(&mut self, slot: SlotId) -> &mut Slot {
        self.slots[slot.0 as usize]
            .as_mut()
            .expect("rows and pages name taken slots")
    }
}

/// Kind, slot and page of every page that a plan appends.
pub fn appended(plan: &Plan) -> impl Iterator<Item = (usize, SlotId, PageId)> {
    let first = plan.appended_pages.iter().map(|it| (0, it.0, it.1));
    let others = plan.other_pages.iter();
    first.chain(others.map(|it| (it.kind as usize, it.slot, it.page)))
}
