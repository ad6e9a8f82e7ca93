//! What a step costs: coefficients fitted to measured steps by least squares that forget.

use crate::ids::Micros;
use crate::plan::Plan;

/// What a step computes, in the terms in which its time is nearly linear.
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

/// What a measured step weighs against the one after it: after 100 steps a third is left.
const MEMORY: f64 = 0.99;
/// Passes over the coefficients after each step; they start from the last fit, which is close.
const NUM_PASSES: usize = 16;
/// The same where they start from nothing.
const NUM_PASSES_OF_A_RUN: usize = 10_000;
/// A hiccup counts as this many times what was expected at most; a lasting change is followed in a
/// few steps all the same.
const MAX_SURPRISE: f64 = 4.0;

/// Microseconds that each term costs, never negative, and how far beyond them steps go.
#[derive(Clone, Debug, PartialEq)]
pub struct StepCost {
    coefficients: Terms,
    /// Sums of products of terms, and of terms, both as shares of their step's time.
    moments: [Terms; NUM_TERMS],
    products: Terms,
    /// The largest excess of a decoding step's time over its estimate, forgotten like the rest.
    excess: f64,
}

impl StepCost {
    /// Nothing is known but a guess at what a prefill token costs, in microseconds.
    pub fn new(prefill_token_micros: f64) -> Self {
        Self {
            coefficients: [0.0, prefill_token_micros, 0.0, 0.0, 0.0],
            moments: [[0.0; NUM_TERMS]; NUM_TERMS],
            products: [0.0; NUM_TERMS],
            excess: 0.0,
        }
    }

    /// The best fit to the steps of a whole run, which all weigh alike.
    pub fn fitted(steps: &[(StepWork, Micros)]) -> Self {
        let mut cost = Self::new(0.0);
        for (work, time) in steps {
            cost.remember(&work.terms(), time.0.max(1) as f64, 1.0);
        }
        for _ in 0..NUM_PASSES_OF_A_RUN {
            cost.refine();
        }
        cost
    }

    /// Microseconds that `work` is expected to take.
    pub fn estimate(&self, work: &StepWork) -> f64 {
        dot(&self.coefficients, &work.terms())
    }

    /// Microseconds by which recent decoding steps went beyond their estimates at most.
    pub fn excess(&self) -> f64 {
        self.excess
    }

    /// Learns that a step with this work took `micros`.
    pub fn observe(&mut self, work: &StepWork, micros: f64) {
        let estimate = self.estimate(work).max(1.0);
        let micros = micros.clamp(1.0, MAX_SURPRISE * estimate);
        if work.num_decode_rows > 0 {
            self.excess = (self.excess * MEMORY).max(micros - estimate);
        }
        self.remember(&work.terms(), micros, MEMORY);
        for _ in 0..NUM_PASSES {
            self.refine();
        }
    }

    /// How many tokens of a chunk that begins at `start` fit into `micros`.
    ///
    /// They cost `a n + b (n start + n (n + 1) / 2)`, which is solved for n.
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

    /// Errors count by their share of the step: long prefills do not drown the steps that decode.
    fn remember(&mut self, terms: &Terms, micros: f64, memory: f64) {
        let shares = terms.map(|term| term / micros);
        for i in 0..NUM_TERMS {
            for j in 0..NUM_TERMS {
                self.moments[i][j] = self.moments[i][j] * memory + shares[i] * shares[j];
            }
            self.products[i] = self.products[i] * memory + shares[i];
        }
    }

    /// Moves each coefficient in turn to where the squared error is least, or to zero.
    fn refine(&mut self) {
        for i in 0..NUM_TERMS {
            let moment = self.moments[i][i];
            if moment > f64::MIN_POSITIVE {
                let error = self.products[i] - dot(&self.moments[i], &self.coefficients);
                self.coefficients[i] = (self.coefficients[i] + error / moment).max(0.0);
            }
        }
    }
}

fn dot(a: &Terms, b: &Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
