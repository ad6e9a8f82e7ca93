//! A plan while it is built.

use rustc_hash::FxHashSet;

use crate::ids::{PageId, SlotId, StepId};
use crate::kv_cache::Lease;
use crate::outlook::Forecast;
use crate::plan::{DecodeRow, NewSlot, OtherPage, PrefillRow, RestoredSlot, SavedSlot};
use crate::prefix_hasher::PageHash;
use crate::settings::Limits;
use crate::state::Order;
use crate::step_work::StepWork;

/// A prefill chunk is not cut shorter than this for lack of tokens: a remainder of 3 in every plan
/// would take a prompt of 8,192 tokens through thousands of steps.
pub(crate) const MIN_CHUNK: u32 = 16;

/// Words that travel with new slots: past them no further request is admitted. One request's own fit a frame of the
/// wire beside them, whose cap is four times as many.
const MAX_SLOT_WORDS: u32 = 1 << 20;

/// What the rules have scheduled so far, and what is left.
// budget: one field for each thing that a plan may run out of
#[derive(Clone, Debug)]
pub(crate) struct PlanBuilder {
    pub(crate) step: StepId,
    pub(crate) num_tokens_left: u32,
    /// Of prompts; beyond it only decode rows use what is left of the step.
    pub(crate) num_prompt_tokens_left: u32,
    pub(crate) num_rows_left: u32,
    pub(crate) work: StepWork,
    /// The ITL target leaves no time for another prefill row.
    pub(crate) is_out_of_time: bool,
    pub(crate) new_slots: Vec<NewSlot>,
    /// Words that travel with them.
    num_slot_words: u32,
    pub(crate) appended_pages: Vec<(SlotId, PageId)>,
    pub(crate) other_pages: Vec<OtherPage>,
    pub(crate) restored_slots: Vec<RestoredSlot>,
    pub(crate) saved_slots: Vec<SavedSlot>,
    pub(crate) prefill: Vec<(Order, PrefillRow)>,
    pub(crate) decode: Vec<(Order, DecodeRow)>,
    /// Slots whose rows sample under a mask.
    pub(crate) masked: FxHashSet<SlotId>,
    /// Hashes of the blocks in which the prefill rows begin.
    pub(crate) computing: FxHashSet<PageHash>,
    /// Made when the first head is checked against it.
    pub(crate) forecast: Option<Forecast>,
    /// The last request in order among the rows that were looked at for it. Most plans ask for none.
    last_with_row: Option<Order>,
    /// How many prefill and decode rows those are.
    num_looked_at: (usize, usize),
    /// The last request in order that may still be preempted.
    pub(crate) last_victim: Option<Order>,
}

impl PlanBuilder {
    pub(crate) fn new(step: StepId, limits: &Limits) -> Self {
        Self {
            step,
            num_tokens_left: limits.max_batch_tokens,
            num_prompt_tokens_left: limits.max_batch_tokens,
            num_rows_left: limits.max_rows,
            work: StepWork::default(),
            is_out_of_time: false,
            new_slots: Vec::new(),
            num_slot_words: 0,
            appended_pages: Vec::new(),
            other_pages: Vec::new(),
            restored_slots: Vec::new(),
            saved_slots: Vec::new(),
            prefill: Vec::new(),
            decode: Vec::new(),
            masked: FxHashSet::default(),
            computing: FxHashSet::default(),
            forecast: None,
            last_with_row: None,
            num_looked_at: (0, 0),
            last_victim: None,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.prefill.is_empty() && self.decode.is_empty()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.num_tokens_left == 0 || self.num_rows_left == 0 || self.is_out_of_time
    }

    /// Admits a request whose slot brings so many words.
    pub(crate) fn push_new_slot(&mut self, new_slot: NewSlot, num_words: u32) {
        self.num_slot_words = self.num_slot_words.saturating_add(num_words);
        self.new_slots.push(new_slot);
    }

    /// Whether the new slots bring as many words as a plan should.
    pub(crate) fn has_all_slot_words(&self) -> bool {
        self.num_slot_words >= MAX_SLOT_WORDS
    }

    /// Whether a request after `order` has a row, and so keeps its pages in this plan.
    pub(crate) fn has_row_after(&mut self, order: Order) -> bool {
        let (num_prefill, num_decode) = self.num_looked_at;
        let prefill = self.prefill[num_prefill..].iter().map(|(order, _)| *order);
        let decode = self.decode[num_decode..].iter().map(|(order, _)| *order);
        self.last_with_row = self.last_with_row.max(prefill.chain(decode).max());
        self.num_looked_at = (self.prefill.len(), self.decode.len());
        self.last_with_row.is_some_and(|last| last > order)
    }

    /// Appends the last `num` pages of each kind of a slot's lease.
    pub(crate) fn append_pages(&mut self, slot: SlotId, lease: &Lease, num: &[u32]) {
        let mut each = (0..).zip(lease.lists().iter().zip(num));
        if let Some((_, (list, num))) = each.next() {
            let pages = list.last(*num).iter();
            self.appended_pages.extend(pages.map(|page| (slot, *page)));
        }
        for (kind, (list, num)) in each {
            let pages = list.last(*num).iter();
            let others = pages.map(|page| OtherPage {
                kind,
                slot,
                page: *page,
            });
            self.other_pages.extend(others);
        }
    }

    pub(crate) fn push_prefill(&mut self, order: Order, row: PrefillRow) {
        self.count(row.length);
        self.num_prompt_tokens_left = self.num_prompt_tokens_left.saturating_sub(row.length);
        self.work.add_prefill(row.start, row.length);
        self.prefill.push((order, row));
    }

    pub(crate) fn push_decode(&mut self, order: Order, row: DecodeRow) {
        self.count(row.length);
        self.work.add_decode(row.start);
        self.decode.push((order, row));
    }

    fn count(&mut self, num_tokens: u32) {
        self.num_tokens_left -= num_tokens;
        self.num_rows_left -= 1;
    }
}
