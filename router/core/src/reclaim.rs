//! The rule of pages: who gives way when a row lacks them.

use crate::draft::Draft;
use crate::ids::SlotId;
use crate::scheduler::Scheduler;
use crate::state::{Order, Phase};

impl Scheduler {
    /// Leases the pages that a request lacks for `num_tokens` tokens; false where its row must wait.
    pub(crate) fn lease_pages(&mut self, slot: SlotId, num_tokens: u32, draft: &mut Draft) -> bool {
        let num = self
            .roster
            .num_missing_pages(self.roster.seated(slot), num_tokens);
        if num == 0 {
            return true;
        }
        let has_room = self.make_room(slot, num, draft);
        if has_room {
            let pages = self.roster.grow(slot, num, &mut self.pages);
            draft
                .appended_pages
                .extend(pages.iter().map(|page| (slot, *page)));
        }
        has_room
    }

    /// Lets requests after the asker give way until `num` pages are free, or promised by results
    /// on the wire; the asker itself does where nobody after it has a row in this plan.
    fn make_room(&mut self, asker: SlotId, num: u32, draft: &mut Draft) -> bool {
        let order = self.roster.seated(asker).job.order;
        while self.pages.num_available() < num {
            if self.pages.num_available() + self.num_promised() >= num {
                return false;
            }
            let Some(victim) = self.last_candidate(order, draft) else {
                if !draft.has_row_after(order) {
                    self.give_way(asker);
                }
                return false;
            };
            self.give_way(victim);
        }
        true
    }

    fn num_promised(&self) -> u32 {
        self.pages.num_parked() + self.roster.num_held_pages()
    }

    /// The last in order after `asker` that has no row in this plan and is not held yet.
    fn last_candidate(&self, asker: Order, draft: &mut Draft) -> Option<SlotId> {
        let is_candidate = |phase, last_step| phase != Phase::Held && last_step != draft.step;
        let mut after = self
            .roster
            .backwards_from(draft.last_candidate)
            .take_while(|running| running.job.order > asker);
        let found = after.find(|running| is_candidate(running.phase, running.last_step));
        let (order, slot) = found.map_or((asker, None), |running| {
            (running.job.order, Some(running.slot))
        });
        draft.last_candidate = Some(order);
        slot
    }

    /// Without rows on the wire a request goes back to the queue now, else when its results are in.
    fn give_way(&mut self, slot: SlotId) {
        if self.roster.seated(slot).is_in_flight() {
            self.roster.hold(slot);
        } else {
            self.preempt(slot);
        }
    }
}
