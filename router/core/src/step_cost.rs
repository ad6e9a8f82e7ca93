//! Step time: coefficients fitted to measured steps by least squares with exponential decay.

use crate::ids::Micros;
use crate::plan::Plan;

/// What a step computes, in terms that its time is nearly linear in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Tokens of its prefill rows.
    pub num_prefill_tokens: u64,
    /// Pairs of a prefill token and a KV token that it attends to.
    pub num_prefill_pairs: u64,
    /// Its decode rows.
    pub num_decode_rows: u64,
    /// KV tokens that its decode rows read.
    pub num_decode_kv_tokens: u64,
}

impl StepWork {
    /// The work of a plan.
    pub fn of(plan: &Plan) -> Self {
        let mut work = Self::default();
        for row in &plan.prefill {
            work.add_prefill(row.start, row.length);
        }
        for row in &plan.decode {
            work.add_decode(row.start);
        }
        work
    }

    /// Adds a chunk of `length` tokens whose first is at position `start`.
    pub fn add_prefill(&mut self, start: u32, length: u32) {
        let (start, length) = (u64::from(start), u64::from(length));
        self.num_prefill_tokens += length;
        self.num_prefill_pairs += length * start + length * (length + 1) / 2;
    }

    /// Adds a decode row at position `start`.
    pub fn add_decode(&mut self, start: u32) {
        self.num_decode_rows += 1;
        self.num_decode_kv_tokens += u64::from(start) + 1;
    }

    fn terms(&self) -> Terms {
        [
            1,
            self.num_prefill_tokens,
            self.num_prefill_pairs,
            self.num_decode_rows,
            self.num_decode_kv_tokens,
        ]
        .map(|count| count as f64)
    }
}

const NUM_TERMS: usize = 5;
type Terms = [f64; NUM_TERMS];

/// Weight of a step against the one after it. After 100 steps a third is left.
const DECAY: f64 = 0.99;
/// Coordinate-descent passes after each step. They start from the last fit, which is close.
const NUM_PASSES: usize = 16;
/// Passes for a whole run, which start from nothing.
const NUM_OFFLINE_PASSES: usize = 10_000;
/// Cap of a measured time, as a multiple of the estimate. One outlier hardly counts; a lasting change is
/// followed within a few steps.
const MAX_OUTLIER: f64 = 4.0;

/// Microseconds of each term, never negative, and how far steps exceed the estimate.
#[derive(Clone, Debug, PartialEq)]
pub struct StepCost {
    coefficients: Terms,
    /// The normal equations, with terms relative to their step's time.
    gram: [Terms; NUM_TERMS],
    rhs: Terms,
    /// Largest excess of a decoding step's time over its estimate, with decay.
    excess: f64,
}

impl StepCost {
    /// Knows only a guess of a prefill token's time, in microseconds.
    pub fn new(prefill_token_micros: f64) -> Self {
        Self {
            coefficients: [0.0, prefill_token_micros, 0.0, 0.0, 0.0],
            gram: [[0.0; NUM_TERMS]; NUM_TERMS],
            rhs: [0.0; NUM_TERMS],
            excess: 0.0,
        }
    }

    /// The best fit to the steps of a whole run, all with equal weight.
    pub fn fitted(steps: &[(StepWork, Micros)]) -> Self {
        let mut cost = Self::new(0.0);
        for (work, time) in steps {
            cost.accumulate(&work.terms(), time.0.max(1) as f64, 1.0);
        }
        for _ in 0..NUM_OFFLINE_PASSES {
            cost.refine();
        }
        cost
    }

    /// Expected microseconds of `work`.
    pub fn estimate(&self, work: &StepWork) -> f64 {
        dot(&self.coefficients, &work.terms())
    }

    /// Microseconds by which recent decoding steps exceeded their estimates at most.
    pub fn excess(&self) -> f64 {
        self.excess
    }

    /// Adds a measured step that took `micros`.
    pub fn observe(&mut self, work: &StepWork, micros: f64) {
        let estimate = self.estimate(work).max(1.0);
        let micros = micros.clamp(1.0, MAX_OUTLIER * estimate);
        if work.num_decode_rows > 0 {
            self.excess = (self.excess * DECAY).max(micros - estimate);
        }
        self.accumulate(&work.terms(), micros, DECAY);
        for _ in 0..NUM_PASSES {
            self.refine();
        }
    }

    /// Tokens of a chunk from `start` on that fit into `micros`.
    ///
    /// Solves `a n + b (n start + n (n + 1) / 2) = micros` for n.
    pub fn num_tokens_within(&self, micros: f64, start: u32) -> u32 {
        if micros <= 0.0 {
            return 0;
        }
        let (token, pair) = (self.coefficients[1], self.coefficients[2]);
        let linear = token + pair * (f64::from(start) + 0.5);
        let root = (linear * linear + 2.0 * pair * micros).sqrt();
        #[expect(
            clippy::cast_sign_loss,
            reason = "it is positive, and the cast saturates"
        )]
        let num_tokens = (2.0 * micros / (linear + root)) as u32;
        num_tokens
    }

    /// Errors count relative to the step's time, so that long prefills do not outweigh decoding steps.
    fn accumulate(&mut self, terms: &Terms, micros: f64, decay: f64) {
        let relative = terms.map(|term| term / micros);
        for i in 0..NUM_TERMS {
            for j in 0..NUM_TERMS {
                self.gram[i][j] = self.gram[i][j] * decay + relative[i] * relative[j];
            }
            self.rhs[i] = self.rhs[i] * decay + relative[i];
        }
    }

    /// Minimises the squared error over each coefficient in turn, bounded below by zero.
    fn refine(&mut self) {
        for i in 0..NUM_TERMS {
            let diagonal = self.gram[i][i];
            if diagonal > f64::MIN_POSITIVE {
                let error = self.rhs[i] - dot(&self.gram[i], &self.coefficients);
                self.coefficients[i] = (self.coefficients[i] + error / diagonal).max(0.0);
            }
        }
    }
}

fn dot(a: &Terms, b: &Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
