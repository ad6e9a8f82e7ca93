//! What mixed steps of each size take beside the fit, which is linear. Devices are not: a GEMM takes as long for
//! part of a tile as for all of it, and a graph as long for part of its tokens.

use crate::step_work::{StepWork, WorkKind};

/// Tokens by which sizes are told apart.
pub(crate) const SIZE: u32 = 32;
/// Sizes up to 4,096 tokens. What is larger is linear enough.
const NUM_SIZES: usize = 128;
/// Steps that are assumed beside those measured, as the next smaller size that was measured tells.
const NUM_PRIOR: f64 = 1.0;
/// How much smaller that size is at most: two tiles.
const NUM_NEAR: usize = 8;
/// Steps of a size that are remembered: the fit that they are told by changes.
const NUM_KEPT: f32 = 16.0;
/// Ratios to the fit that a size explains. Others are hiccups, or the fit is wrong.
const EXPLAINED: std::ops::Range<f64> = 0.7..1.4;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Size {
    num_steps: f32,
    /// Sum of measured time to the fit's value, less 1.
    excess: f32,
}

/// Mixed steps by their tokens, decode rows padded.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepSizes {
    sizes: [Size; NUM_SIZES],
}

impl Default for StepSizes {
    fn default() -> Self {
        Self {
            sizes: [Size::default(); NUM_SIZES],
        }
    }
}

impl StepSizes {
    /// A step took `ratio` times what the fit says.
    pub(crate) fn observe(&mut self, work: &StepWork, ratio: f64) {
        let Some(size) = index(work).and_then(|index| self.sizes.get_mut(index)) else {
            return;
        };
        if !EXPLAINED.contains(&ratio) {
            return;
        }
        if size.num_steps >= NUM_KEPT {
            size.excess *= 1.0 - 1.0 / NUM_KEPT;
            size.num_steps -= 1.0;
        }
        size.num_steps += 1.0;
        #[expect(clippy::cast_possible_truncation, reason = "it is a small number")]
        let excess = (ratio - 1.0) as f32;
        size.excess += excess;
    }

    /// Whether a step of this size was measured; true unless sizes matter to it.
    pub(crate) fn has_seen(&self, work: &StepWork) -> bool {
        let size = index(work).and_then(|index| self.sizes.get(index));
        size.is_none_or(|size| size.num_steps > 0.0)
    }

    /// Expected time of `work` to the fit's value; 1 unless it is mixed.
    ///
    /// A size that follows one above the fit is taken to be above it too: most likely they are parts of one tile.
    pub(crate) fn ratio(&self, work: &StepWork) -> f64 {
        let Some(index) = index(work).filter(|index| *index < NUM_SIZES) else {
            return 1.0;
        };
        let mut smaller = self.sizes[index.saturating_sub(NUM_NEAR)..index].iter();
        let smaller = smaller.rfind(|size| size.num_steps > 0.0);
        let prior = smaller.map_or(1.0, |size| size.ratio(1.0).max(1.0));
        self.sizes[index].ratio(prior)
    }
}

impl Size {
    fn ratio(&self, prior: f64) -> f64 {
        let num_steps = f64::from(self.num_steps);
        let sum = num_steps + f64::from(self.excess) + prior * NUM_PRIOR;
        sum / (num_steps + NUM_PRIOR)
    }
}

/// Tokens of the step if its decode rows are padded: steps of a tile or a graph have the same.
pub(crate) fn padded_tokens(work: &StepWork) -> u64 {
    work.num_prefill_tokens + padded_decode_rows(work.num_decode_rows)
}

/// Decode rows of the captured mixed step for so many: `MIXED_DECODE_ROWS` of `plait_worker.graph_sizes`.
fn padded_decode_rows(num: u64) -> u64 {
    match num {
        0 => 0,
        1..=128 => num.next_power_of_two().max(16),
        129..=256 => num.next_multiple_of(64),
        _ => num.next_multiple_of(128),
    }
}

fn index(work: &StepWork) -> Option<usize> {
    if work.kind() != WorkKind::Mixed {
        return None;
    }
    usize::try_from((padded_tokens(work) - 1) / u64::from(SIZE)).ok()
}
