//! Least squares with coefficients that are never negative (Lawson and Hanson), for a few terms.

/// The step itself, prefill tokens, prefill pairs, decode rows, KV tokens of decode rows.
pub(crate) const NUM_TERMS: usize = 5;
pub(crate) type Terms = [f64; NUM_TERMS];

/// Below this a term has no data.
const MIN_DIAGONAL: f64 = 1e-200;
/// A term joins the fit only if that lowers the error by more than rounding does.
const MIN_GRADIENT: f64 = 1e-9;
/// More changes of the terms in use than any fit needs: rounding may make two terms swap for ever.
const MAX_ROUNDS: usize = 4 * NUM_TERMS;
const MIN_PIVOT: f64 = 1e-12;
/// What the data cannot tell from the step itself mostly is the step itself: kernels launched, weights read.
const RIDGE_SHARES: Terms = [0.1, 1.0, 1.0, 1.0, 1.0];

/// Normal equations with decay, and their solution.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LeastSquares {
    coefficients: Terms,
    gram: [Terms; NUM_TERMS],
    rhs: Terms,
}

/// The equations with terms of unit length.
struct Scaled {
    gram: [Terms; NUM_TERMS],
    rhs: Terms,
    scales: Terms,
}

impl LeastSquares {
    /// Without data. A coefficient stays as it is until its term has some.
    pub(crate) fn new(coefficients: Terms) -> Self {
        Self {
            coefficients,
            gram: [[0.0; NUM_TERMS]; NUM_TERMS],
            rhs: [0.0; NUM_TERMS],
        }
    }

    pub(crate) fn coefficients(&self) -> &Terms {
        &self.coefficients
    }

    pub(crate) fn value(&self, terms: &Terms) -> f64 {
        dot(&self.coefficients, terms)
    }

    /// Forgets the data and keeps the coefficients.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.coefficients);
    }

    /// Adds an observation whose error counts relative to `unit`. Earlier ones count `decay` as much.
    pub(crate) fn add(&mut self, terms: &Terms, value: f64, unit: f64, decay: f64) {
        let relative = terms.map(|term| term / unit);
        for i in 0..NUM_TERMS {
            for j in 0..NUM_TERMS {
                self.gram[i][j] = self.gram[i][j] * decay + relative[i] * relative[j];
            }
            self.rhs[i] = self.rhs[i] * decay + relative[i] * value / unit;
        }
    }

    /// Minimises the squared error. `ridge` shares what the data cannot tell apart among the terms.
    pub(crate) fn solve(&mut self, ridge: f64) {
        let scaled = self.scaled(ridge);
        let solution = scaled.solve(&self.coefficients);
        for (j, scale) in scaled.scales.iter().enumerate() {
            let coefficient = solution[j] / scale;
            if *scale > 0.0 && coefficient.is_finite() {
                self.coefficients[j] = coefficient.max(0.0);
            }
        }
    }

    fn scaled(&self, ridge: f64) -> Scaled {
        let mut scales = [0.0; NUM_TERMS];
        let mut inverse = [0.0; NUM_TERMS];
        for j in 0..NUM_TERMS {
            if self.gram[j][j] > MIN_DIAGONAL {
                scales[j] = self.gram[j][j].sqrt();
                inverse[j] = 1.0 / scales[j];
            }
        }
        let mut gram = self.gram;
        let mut rhs = self.rhs;
        for i in 0..NUM_TERMS {
            for j in 0..NUM_TERMS {
                gram[i][j] *= inverse[i] * inverse[j];
            }
            gram[i][i] += ridge * RIDGE_SHARES[i];
            rhs[i] *= inverse[i];
        }
        Scaled { gram, rhs, scales }
    }
}

impl Scaled {
    fn solve(&self, start: &Terms) -> Terms {
        let mut x = [0.0; NUM_TERMS];
        let mut in_use = [false; NUM_TERMS];
        for j in 0..NUM_TERMS {
            x[j] = start[j] * self.scales[j];
            in_use[j] = x[j] > 0.0;
        }
        for _ in 0..MAX_ROUNDS {
            let unbounded = self.solve_for(&in_use);
            if drop_negative(&mut x, &unbounded, &mut in_use) {
                continue;
            }
            x = unbounded;
            match self.steepest(&x, &in_use) {
                Some(term) => in_use[term] = true,
                None => break,
            }
        }
        x
    }

    /// The unused term whose rise lowers the error most.
    fn steepest(&self, x: &Terms, in_use: &[bool; NUM_TERMS]) -> Option<usize> {
        let unused = (0..NUM_TERMS).filter(|j| !in_use[*j] && self.scales[*j] > 0.0);
        let gradients = unused.map(|j| (j, self.rhs[j] - dot(&self.gram[j], x)));
        let rising = gradients.filter(|(_, gradient)| *gradient > MIN_GRADIENT);
        rising.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(j, _)| j)
    }

    /// Least squares without bounds over the terms in use (Cholesky); zero for the others.
    fn solve_for(&self, in_use: &[bool; NUM_TERMS]) -> Terms {
        let mut factor = [[0.0; NUM_TERMS]; NUM_TERMS];
        let mut x = [0.0; NUM_TERMS];
        for i in (0..NUM_TERMS).filter(|i| in_use[*i]) {
            for j in (0..i).filter(|j| in_use[*j]) {
                let sum = self.gram[i][j] - dot(&factor[i], &factor[j]);
                factor[i][j] = sum / factor[j][j];
            }
            let pivot = self.gram[i][i] - dot(&factor[i], &factor[i]);
            x[i] = self.rhs[i] - dot(&factor[i], &x);
            factor[i][i] = pivot.max(MIN_PIVOT).sqrt();
            x[i] /= factor[i][i];
        }
        for i in (0..NUM_TERMS).rev().filter(|i| in_use[*i]) {
            let after = (i + 1..NUM_TERMS).map(|j| factor[j][i] * x[j]);
            x[i] = (x[i] - after.sum::<f64>()) / factor[i][i];
        }
        x
    }
}

/// Goes from `x` towards `to` until the first term is zero, and drops it. False if all stay positive.
fn drop_negative(x: &mut Terms, to: &Terms, in_use: &mut [bool; NUM_TERMS]) -> bool {
    let negative = (0..NUM_TERMS).filter(|j| in_use[*j] && to[*j] <= 0.0);
    let reach = |j: usize| x[j] / (x[j] - to[j]).max(f64::MIN_POSITIVE);
    let Some(first) = negative.min_by(|a, b| reach(*a).total_cmp(&reach(*b))) else {
        return false;
    };
    let share = reach(first);
    for j in 0..NUM_TERMS {
        x[j] = (x[j] + share * (to[j] - x[j])).max(0.0);
    }
    x[first] = 0.0;
    in_use[first] = false;
    true
}

fn dot(a: &Terms, b: &Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
