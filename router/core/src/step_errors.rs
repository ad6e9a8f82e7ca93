//! How far mixed steps exceed what they were planned to take, and hiccups.

/// Steps that the margin follows.
const WINDOW: usize = 512;
/// Of so many steps one may exceed the margin.
const PERCENTILE: usize = 100;
/// Width of a bin, as a share of the target.
const BIN: f64 = 0.005;
/// The last bin with an upper end; what is longer lies in it too.
const NUM_BINS: usize = 200;
const HICCUP: usize = NUM_BINS + 1;
/// Where a step counts as a hiccup, as a multiple of its expected time.
const HICCUP_RATIO: f64 = 2.0;
/// Least margin until so many steps were measured that a percentile can be told.
const FIRST_MARGIN: f64 = 0.03;
/// What chunks add to it at first.
const FIRST_MARGIN_OF_CHUNKS: f64 = 0.12;
/// Steps after which half of that is left; after three times as many it is a quarter.
const NUM_HALVING: f64 = 8.0;

/// A histogram of the last steps' errors.
#[derive(Clone, Debug)]
pub(crate) struct StepErrors {
    /// What errors are a share of: the ITL target, or each step's expected time.
    target: Option<f64>,
    /// The bin of each step, in a ring.
    steps: [u8; WINDOW],
    len: usize,
    next: usize,
    /// Steps in each bin. The first holds those that were no slower than expected.
    bins: [u16; HICCUP + 1],
    margin: f64,
    num_hiccups: u64,
    /// The last steps in a row, of any kind, that took twice as long as they should.
    num_in_row: u64,
}

impl StepErrors {
    pub(crate) fn new(target: Option<f64>) -> Self {
        Self {
            target,
            steps: [0; WINDOW],
            len: 0,
            next: 0,
            bins: [0; HICCUP + 1],
            margin: FIRST_MARGIN,
            num_hiccups: 0,
            num_in_row: 0,
        }
    }

    /// By how much 99 of 100 observed steps exceed their expected time at most, as a share of the target.
    /// Hiccups count among the hundredth that may exceed it.
    pub(crate) fn margin(&self) -> f64 {
        self.margin
    }

    /// The margin of prefill chunks, which is larger at first. Admission must not wait for it to shrink: only
    /// steps with prefill make it.
    pub(crate) fn margin_of_chunks(&self) -> f64 {
        if self.len >= PERCENTILE {
            return self.margin;
        }
        let more = FIRST_MARGIN_OF_CHUNKS / (1.0 + self.len as f64 / NUM_HALVING);
        self.margin.max(FIRST_MARGIN + more)
    }

    /// Steps so far that took twice as long as they should, while those after them did not.
    pub(crate) fn num_hiccups(&self) -> u64 {
        self.num_hiccups
    }

    /// A step took `micros` where `expected` were planned. The margin follows mixed ones.
    pub(crate) fn observe(&mut self, micros: f64, expected: f64, tells_margin: bool) {
        let is_hiccup = micros > HICCUP_RATIO * expected;
        if is_hiccup {
            self.num_in_row += 1;
        } else {
            self.num_hiccups += std::mem::take(&mut self.num_in_row);
        }
        if tells_margin {
            let error = (micros - expected) / self.target.unwrap_or(expected);
            self.push(if is_hiccup { HICCUP } else { bin_of(error) });
            self.margin = self.percentile();
        }
    }

    /// Times have changed for good: what was measured before tells nothing.
    pub(crate) fn start_again(&mut self) {
        *self = Self {
            num_hiccups: self.num_hiccups,
            ..Self::new(self.target)
        };
    }

    fn push(&mut self, bin: usize) {
        if self.len == WINDOW {
            self.bins[usize::from(self.steps[self.next])] -= 1;
        }
        self.bins[bin] += 1;
        self.steps[self.next] = u8::try_from(bin).expect("there are fewer than 256 bins");
        self.next = (self.next + 1) % WINDOW;
        self.len = WINDOW.min(self.len + 1);
    }

    fn percentile(&self) -> f64 {
        let mut num_left = (self.len / PERCENTILE).saturating_sub(self.bins[HICCUP].into());
        for bin in (1..=NUM_BINS).rev() {
            let num = usize::from(self.bins[bin]);
            if num > num_left {
                return self.at_least_first(bin as f64 * BIN);
            }
            num_left -= num;
        }
        self.at_least_first(0.0)
    }

    fn at_least_first(&self, margin: f64) -> f64 {
        let is_certain = self.len >= PERCENTILE;
        if is_certain {
            margin
        } else {
            margin.max(FIRST_MARGIN)
        }
    }
}

fn bin_of(error: f64) -> usize {
    #[expect(
        clippy::cast_sign_loss,
        reason = "it is positive, and the cast saturates"
    )]
    let bin = (error.max(0.0) / BIN).ceil() as usize;
    bin.min(NUM_BINS)
}
