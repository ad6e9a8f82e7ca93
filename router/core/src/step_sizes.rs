//! What mixed steps of each size take beside the fit, which is linear. Devices are not: a GEMM takes as long for
//! part of a tile as for all of it, and a graph as long for part of its tokens.

use crate::step_work::{StepWork, WorkKind};

/// Prefill tokens by which sizes are told apart.
pub(crate) const SIZE: u32 = 32;
/// Sizes up to 4,096 tokens. What is larger is linear enough.
const NUM_SIZES: usize = 128;
/// Steps on the fit that are assumed beside those measured.
const NUM_PRIOR: f32 = 4.0;
/// Steps of a size that are remembered. Tile and graph sizes change with the number of decoders.
const NUM_KEPT: f32 = 16.0;
/// Ratios to the fit that a size explains. Others are hiccups, or the fit is wrong.
const EXPLAINED: std::ops::Range<f64> = 0.7..1.4;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Size {
    num_steps: f32,
    /// Sum of measured time to the fit's value, less 1.
    excess: f32,
}

/// Mixed steps by their prefill tokens.
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
    pub(crate) fn ratio(&self, work: &StepWork) -> f64 {
        let size = index(work).and_then(|index| self.sizes.get(index));
        size.map_or(1.0, |size| {
            1.0 + f64::from(size.excess / (size.num_steps + NUM_PRIOR))
        })
    }
}

fn index(work: &StepWork) -> Option<usize> {
    if work.kind() != WorkKind::Mixed {
        return None;
    }
    usize::try_from((work.num_prefill_tokens - 1) / u64::from(SIZE)).ok()
}
