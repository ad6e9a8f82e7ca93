//! Step time: a fit over all steps, and the level at which recent steps of each kind lie above or below it.

use crate::ids::Micros;
use crate::least_squares::{LeastSquares, NUM_TERMS, Terms};
use crate::step_sizes::StepSizes;
use crate::step_work::{StepWork, WorkKind};

/// Weight of a step against the one after it. After 500 steps a third is left; levels follow faster.
const DECAY: f64 = 0.998;
/// Ridge of the fit to one step. It takes a few steps to outweigh it.
const RIDGE: f64 = 0.01;
/// Ridge of the fit to a whole run.
const OFFLINE_RIDGE: f64 = 1e-9;
/// Steps of each kind whose median sets its level: fewer than half of them may be hiccups.
const NUM_RECENT: usize = 9;
/// So many steps in a row that miss the estimate to one side are a lasting change.
const LASTING: usize = 5;
/// What counts as a miss.
const MISS: f64 = 1.2;
/// Bound of the level, either way.
const MAX_LEVEL: f64 = 32.0;
/// Longest time that is believed: a week.
const MAX_MICROS: f64 = 6e11;
/// Steps of a kind after which it is known.
const NUM_KNOWN: usize = 4;
/// Work of a step that is like recent ones, as a multiple of theirs.
const ALIKE: f64 = 2.0;

/// Microseconds of each term, never negative, and each kind's level.
#[derive(Clone, Debug, PartialEq)]
pub struct StepCost {
    fit: LeastSquares,
    /// Steps in the fit, with decay.
    num_steps: f64,
    /// By [`WorkKind`].
    kinds: [RecentSteps; 3],
    sizes: StepSizes,
}

impl StepCost {
    /// Knows only a guess of a prefill token's time, in microseconds.
    pub fn new(prefill_token_micros: f64) -> Self {
        Self {
            fit: LeastSquares::new([0.0, prefill_token_micros, 0.0, 0.0, 0.0]),
            num_steps: 0.0,
            kinds: Default::default(),
            sizes: StepSizes::default(),
        }
    }

    /// The best fit to the steps of a whole run, all with equal weight.
    pub fn fitted(steps: &[(StepWork, Micros)]) -> Self {
        let mut cost = Self::new(0.0);
        for (work, time) in steps {
            let micros = time.0.max(1) as f64;
            cost.fit.add(&work.terms(), micros, micros, 1.0);
        }
        cost.fit.solve(OFFLINE_RIDGE);
        cost
    }

    /// Expected microseconds of `work`.
    pub fn estimate(&self, work: &StepWork) -> f64 {
        self.estimate_as(work, work.kind())
    }

    /// Expected microseconds of `work` if more joins it that makes it a step of `kind`.
    pub(crate) fn estimate_as(&self, work: &StepWork, kind: WorkKind) -> f64 {
        self.on_fit(work, kind) * self.sizes.ratio(work)
    }

    /// The same if its size did not matter.
    fn on_fit(&self, work: &StepWork, kind: WorkKind) -> f64 {
        self.fit.value(&work.terms()) * self.kinds[kind as usize].level
    }

    /// Expected microseconds of a step that only decodes; None if no step with decode rows was measured.
    pub(crate) fn estimate_decoding(&self, work: &StepWork) -> Option<f64> {
        let kinds = [WorkKind::Decode, WorkKind::Mixed];
        let kind = kinds.into_iter().find(|kind| self.has_seen(*kind))?;
        (work.num_decode_rows > 0).then(|| self.estimate_as(work, kind))
    }

    /// Microseconds of a step, a prefill token, a prefill pair, a decode row and a KV token of one.
    pub fn coefficients(&self) -> [f64; NUM_TERMS] {
        *self.fit.coefficients()
    }

    /// Microseconds of a step apart from its work.
    pub(crate) fn of_step(&self) -> f64 {
        self.fit.value(&StepWork::default().terms())
    }

    /// Microseconds that `work` adds to a step of any kind.
    pub(crate) fn of_work(&self, work: &StepWork) -> f64 {
        self.fit.value(&work.terms()) - self.of_step()
    }

    /// Whether steps with prefill rows and steps with decode rows were measured.
    pub(crate) fn has_seen_all_rows(&self) -> bool {
        let has_seen = |kind| self.has_seen(kind);
        has_seen(WorkKind::Mixed) || (has_seen(WorkKind::Prefill) && has_seen(WorkKind::Decode))
    }

    /// Whether steps of this kind were measured.
    pub(crate) fn has_seen(&self, kind: WorkKind) -> bool {
        self.kinds[kind as usize].len > 0
    }

    /// Whether a step of the size of `work` was measured.
    pub(crate) fn has_seen_size(&self, work: &StepWork) -> bool {
        self.sizes.has_seen(work)
    }

    /// Whether recent steps of its kind did at least half as much of everything that `work` does.
    pub(crate) fn has_seen_alike(&self, work: &StepWork) -> bool {
        let kind = &self.kinds[work.kind() as usize];
        let most = kind.largest();
        let terms = work.terms();
        let is_alike = terms
            .iter()
            .zip(most)
            .all(|(term, most)| *term <= ALIKE * most);
        kind.len >= NUM_KNOWN && is_alike
    }

    /// Adds a measured step that took `micros`. True if it shows a lasting change.
    pub fn observe(&mut self, work: &StepWork, micros: f64) -> bool {
        let (terms, kind) = (work.terms(), work.kind());
        let micros = micros.clamp(1.0, MAX_MICROS);
        let has_seen = self.has_seen(kind);
        let expected = if has_seen {
            self.estimate(work)
        } else {
            micros
        };
        if has_seen {
            let on_fit = self.on_fit(work, kind).max(f64::MIN_POSITIVE);
            self.sizes.observe(work, micros / on_fit);
        }
        let has_changed = self.kinds[kind as usize].push(terms, micros, expected);
        if has_changed {
            self.start_again();
        } else {
            // A step far below the estimate must not outweigh all others.
            self.fit.add(&terms, micros, micros.max(expected), DECAY);
            self.num_steps = self.num_steps * DECAY + 1.0;
        }
        self.fit.solve(RIDGE / self.num_steps);
        for kind in &mut self.kinds {
            kind.set_level(&self.fit);
        }
        has_changed
    }

    /// Tokens of a chunk from `start` on that fit into `micros` of a mixed step.
    ///
    /// Solves `a n + b (n start + n (n + 1) / 2) = micros` for n.
    pub fn num_tokens_within(&self, micros: f64, start: u32) -> u32 {
        if micros <= 0.0 {
            return 0;
        }
        let micros = micros / self.kinds[WorkKind::Mixed as usize].level;
        let [_, token, pair, ..] = *self.fit.coefficients();
        let linear = token + pair * (f64::from(start) + 0.5);
        let root = (linear * linear + 2.0 * pair * micros).sqrt();
        #[expect(
            clippy::cast_sign_loss,
            reason = "it is positive, and the cast saturates"
        )]
        let num_tokens = (2.0 * micros / (linear + root)) as u32;
        num_tokens
    }

    /// Fits to the recent steps alone. Those of the changed kind from before the change are gone.
    fn start_again(&mut self) {
        self.fit.clear();
        self.sizes = StepSizes::default();
        self.num_steps = 0.0;
        for (terms, micros) in self.kinds.iter().flat_map(RecentSteps::iter) {
            self.fit.add(terms, *micros, *micros, 1.0);
            self.num_steps += 1.0;
        }
    }
}

/// The last steps of a kind.
#[derive(Clone, Debug, PartialEq)]
struct RecentSteps {
    steps: [(Terms, f64); NUM_RECENT],
    len: usize,
    next: usize,
    /// Steps in a row that missed the estimate: from above if positive, from below if negative.
    num_missed: isize,
    /// Median of measured time to the fit's value.
    level: f64,
}

impl Default for RecentSteps {
    fn default() -> Self {
        Self {
            steps: [([0.0; NUM_TERMS], 0.0); NUM_RECENT],
            len: 0,
            next: 0,
            num_missed: 0,
            level: 1.0,
        }
    }
}

impl RecentSteps {
    fn iter(&self) -> impl Iterator<Item = &(Terms, f64)> {
        self.steps[..self.len].iter()
    }

    /// Adds a step. True if it is the last of so many misses that a change is lasting: those before are dropped.
    fn push(&mut self, terms: Terms, micros: f64, expected: f64) -> bool {
        self.steps[self.next] = (terms, micros);
        self.next = (self.next + 1) % NUM_RECENT;
        self.len = NUM_RECENT.min(self.len + 1);
        self.num_missed = if micros > MISS * expected {
            self.num_missed.max(0) + 1
        } else if MISS * micros < expected {
            self.num_missed.min(0) - 1
        } else {
            0
        };
        let is_lasting = self.num_missed.unsigned_abs() >= LASTING;
        if is_lasting {
            self.keep_last(LASTING);
            self.num_missed = 0;
        }
        is_lasting
    }

    fn keep_last(&mut self, num: usize) {
        let num = num.min(self.len);
        self.steps
            .rotate_left((self.next + NUM_RECENT - num) % NUM_RECENT);
        self.len = num;
        self.next = num % NUM_RECENT;
    }

    fn set_level(&mut self, fit: &LeastSquares) {
        if self.len == 0 {
            return;
        }
        let mut ratios = [0.0; NUM_RECENT];
        for (ratio, (terms, micros)) in ratios.iter_mut().zip(self.iter()) {
            *ratio = micros / fit.value(terms).max(f64::MIN_POSITIVE);
        }
        let ratios = &mut ratios[..self.len];
        let (_, median, _) = ratios.select_nth_unstable_by(self.len / 2, f64::total_cmp);
        self.level = median.clamp(1.0 / MAX_LEVEL, MAX_LEVEL);
    }

    fn largest(&self) -> Terms {
        let mut most = [0.0; NUM_TERMS];
        for (terms, _) in self.iter() {
            for (most, term) in most.iter_mut().zip(terms) {
                *most = term.max(*most);
            }
        }
        most
    }
}
