//! Which states of a slot become snapshots, and what becomes of those that steps in flight save.
//!
//! Saved are, at boundaries of pages: the last ones of what is prefilled, one in an interval, the end of pages that
//! were found without a snapshot, and while decoding each one, which replaces the one before. A boundary lies within
//! a row or at its end: no chunk is cut for it.

use smallvec::SmallVec;

use crate::ids::{SlotId, SnapshotId, StepId};
use crate::plan::SavedSlot;
use crate::plan_builder::PlanBuilder;
use crate::prefix_hasher::PageHash;
use crate::scheduler::Scheduler;
use crate::state::Running;

/// Where snapshots are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SaveRule {
    /// Tokens of a page.
    pub(crate) page_size: u32,
    /// One boundary in so many tokens is saved, and kept.
    pub(crate) interval: u32,
}

impl SaveRule {
    /// The first page boundary at or after the multiple `index` of the interval.
    fn of_interval(self, index: u32) -> u64 {
        (u64::from(index) * u64::from(self.interval)).next_multiple_of(self.page_size.into())
    }

    /// The first boundary after `position` that is kept because of the interval.
    fn next_of_interval(self, position: u32) -> u32 {
        let index = position / self.interval;
        let boundaries = [index, index + 1].map(|index| self.of_interval(index));
        let next = boundaries.into_iter().find(|at| *at > position.into());
        next.map_or(u32::MAX, saturate)
    }

    fn is_of_interval(self, boundary: u32) -> bool {
        self.next_of_interval(boundary - 1) == boundary
    }

    /// The end of the last whole page within `num_tokens`.
    fn last_boundary(self, num_tokens: u32) -> u32 {
        num_tokens - num_tokens % self.page_size
    }

    fn next_boundary(self, position: u32) -> u32 {
        let next = u64::from(self.last_boundary(position)) + u64::from(self.page_size);
        saturate(next)
    }
}

fn saturate(position: u64) -> u32 {
    u32::try_from(position).unwrap_or(u32::MAX)
}

/// A state that a step in flight saves.
#[derive(Clone, Copy, Debug)]
struct Save {
    step: StepId,
    position: u32,
    snapshot: SnapshotId,
}

/// The snapshots of a running request.
#[derive(Clone, Debug)]
pub(crate) struct SlotSaves {
    rule: SaveRule,
    /// Tokens that its prefill finds in the cache.
    num_cached: u32,
    /// Tokens that were known at admission: what is prefilled.
    num_prefill: u32,
    /// Where pages ended that were found without a snapshot.
    branch: u32,
    in_flight: SmallVec<[Save; 2]>,
    /// The newest boundary that decoding saved.
    newest: Option<PageHash>,
}

impl SlotSaves {
    /// Of a request that starts at `num_cached` of `num_prefill` known tokens, and found pages up to `branch`.
    pub(crate) fn new(rule: SaveRule, num_cached: u32, num_prefill: u32, branch: u32) -> Self {
        Self {
            rule,
            num_cached,
            num_prefill,
            branch,
            in_flight: SmallVec::new(),
            newest: None,
        }
    }

    /// The first boundary to save.
    pub(crate) fn first(&self) -> u32 {
        self.next_after(self.num_cached)
    }

    fn next_after(&self, position: u32) -> u32 {
        let rule = self.rule;
        let whole = rule.last_boundary(self.num_prefill);
        if position >= whole {
            return rule.next_boundary(position);
        }
        // A later prompt that is the same finds all but its last token.
        let of_prompt = [self.branch, rule.last_boundary(self.num_prefill - 1), whole];
        let of_prompt = of_prompt.into_iter().filter(|at| *at > position);
        let next = of_prompt.min().unwrap_or(whole);
        next.min(rule.next_of_interval(position))
    }

    /// Whether decoding replaces the snapshot at a boundary by the next one.
    fn is_replaced(&self, boundary: u32) -> bool {
        boundary > self.num_prefill && !self.rule.is_of_interval(boundary)
    }

    /// Takes the snapshots that steps in flight save.
    pub(crate) fn take_in_flight(&mut self) -> Vec<SnapshotId> {
        let saves = std::mem::take(&mut self.in_flight);
        saves.into_iter().map(|save| save.snapshot).collect()
    }

    /// Takes a save of a step that is complete.
    fn take_of(&mut self, step: StepId) -> Option<Save> {
        let index = self.in_flight.iter().position(|save| save.step == step)?;
        Some(self.in_flight.remove(index))
    }
}

impl Scheduler {
    /// Saves the boundaries that a row passes which ends at `end`.
    pub(crate) fn save_boundaries(&mut self, slot: SlotId, end: u32, builder: &mut PlanBuilder) {
        let Running {
            job,
            saves,
            next_save,
            num_saves_in_flight,
            ..
        } = self.running.at_mut(slot);
        let Some(saves) = saves.as_deref_mut() else {
            return;
        };
        while *next_save <= end {
            let position = *next_save;
            *next_save = saves.next_after(position);
            if position <= job.num_known() {
                let hasher = &mut self.sharing.hasher;
                if self.cache.has_snapshot(position, job, hasher) {
                    continue;
                }
            }
            let Some(snapshot) = self.cache.take_snapshot() else {
                continue;
            };
            let step = builder.step;
            *num_saves_in_flight += 1;
            saves.in_flight.push(Save {
                step,
                position,
                snapshot,
            });
            builder.saved_slots.push(SavedSlot {
                slot,
                position,
                snapshot,
            });
        }
    }

    /// A row of `step` is complete that began at `start`: what it has saved of computed tokens is published. Drafts
    /// that were not accepted leave nothing.
    pub(crate) fn complete_saves(&mut self, slot: SlotId, step: StepId, start: u32) {
        let running = self.running.at_mut(slot);
        let num_computed = running.num_computed;
        let Some(saves) = running.saves.as_deref_mut() else {
            return;
        };
        while let Some(save) = saves.take_of(step) {
            running.num_saves_in_flight -= 1;
            let is_final = save.position > start && save.position <= num_computed;
            if !is_final {
                self.cache.discard_snapshot(save.snapshot);
                let next = saves.next_after(running.num_planned);
                running.next_save = running.next_save.min(next);
                continue;
            }
            let hash = self
                .cache
                .publish_snapshot(save.snapshot, save.position, &running.job);
            if save.position > saves.num_prefill
                && let Some(before) = saves.newest.take()
            {
                self.cache.replace_snapshot(before);
            }
            if saves.is_replaced(save.position) {
                saves.newest = Some(hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boundaries(saves: &SlotSaves, most: u32) -> Vec<u32> {
        let next = |at: &u32| Some(saves.next_after(*at));
        let each = std::iter::successors(Some(saves.first()), next);
        each.take_while(|at| *at <= most).collect()
    }

    const RULE: SaveRule = SaveRule {
        page_size: 4,
        interval: 10,
    };

    #[test]
    fn a_prompt_is_saved_at_its_end_in_intervals_and_where_pages_were_found() {
        assert_eq!(
            boundaries(&SlotSaves::new(RULE, 0, 31, 16), 31),
            [12, 16, 20, 28]
        );
        assert_eq!(boundaries(&SlotSaves::new(RULE, 12, 31, 0), 31), [20, 28]);
        assert_eq!(boundaries(&SlotSaves::new(RULE, 0, 8, 0), 8), [4, 8]);
    }

    #[test]
    fn decoding_saves_every_boundary() {
        assert_eq!(
            boundaries(&SlotSaves::new(RULE, 0, 3, 0), 24),
            [4, 8, 12, 16, 20, 24]
        );
    }

    #[test]
    fn decoding_keeps_those_of_the_interval() {
        let saves = SlotSaves::new(RULE, 0, 9, 0);
        let kept = [12, 16, 20, 24, 28, 32].map(|at| !saves.is_replaced(at));
        assert_eq!(kept, [true, false, true, false, false, true]);
    }

    #[test]
    fn an_interval_below_a_page_saves_every_boundary() {
        let every = SaveRule {
            interval: 1,
            ..RULE
        };
        assert_eq!(
            boundaries(&SlotSaves::new(every, 0, 17, 0), 17),
            [4, 8, 12, 16]
        );
    }

    #[test]
    fn positions_at_the_end_of_numbers_do_not_overflow() {
        let saves = SlotSaves::new(RULE, u32::MAX - 2, u32::MAX - 1, 0);
        assert_eq!(saves.first(), u32::MAX);
    }
}
