//! How fast the queue is served.

use crate::ids::Micros;

/// Time after which tokens count half or less.
const HALF_LIFE: f64 = 10e6;
/// Admissions or answers after which older ones count a third.
const NUM_ADMISSIONS: f64 = 256.0;

/// Computed tokens over time, and the share of prompts that is computed. Idle time does not count.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServedRate {
    tokens: f64,
    micros: f64,
    /// Of the plan before, if nothing was idle since.
    last_plan: Option<Micros>,
    num_prompt: f64,
    num_computed: f64,
    /// Tokens of recent answers, and their number.
    num_output: f64,
    num_answers: f64,
}

impl ServedRate {
    /// A plan of so many tokens is made.
    pub(crate) fn observe_plan(&mut self, num_tokens: u32, now: Micros) {
        if let Some(last) = self.last_plan {
            let elapsed = now.0.saturating_sub(last.0) as f64;
            let kept = HALF_LIFE / (HALF_LIFE + elapsed);
            self.micros = (self.micros + elapsed) * kept;
            self.tokens = (self.tokens + f64::from(num_tokens)) * kept;
        }
        self.last_plan = Some(now);
    }

    /// Nothing runs or waits.
    pub(crate) fn observe_idle(&mut self) {
        self.last_plan = None;
    }

    /// A prompt is admitted, of which so many tokens are cached.
    pub(crate) fn observe_admission(&mut self, num_prompt: u32, num_cached: u32) {
        let kept = 1.0 - 1.0 / NUM_ADMISSIONS;
        self.num_prompt = self.num_prompt * kept + f64::from(num_prompt);
        self.num_computed =
            self.num_computed * kept + f64::from(num_prompt.saturating_sub(num_cached));
    }

    /// An answer has ended.
    pub(crate) fn observe_end(&mut self, num_output: u32) {
        let kept = 1.0 - 1.0 / NUM_ADMISSIONS;
        self.num_output = self.num_output * kept + f64::from(num_output);
        self.num_answers = self.num_answers * kept + 1.0;
    }

    /// Tokens of an answer in the mean; None until one has ended.
    pub(crate) fn mean_output(&self) -> Option<f64> {
        (self.num_answers > 0.0).then(|| self.num_output / self.num_answers)
    }

    /// The share of prompt tokens that is not cached.
    pub(crate) fn computed_share(&self) -> f64 {
        if self.num_prompt > 0.0 {
            self.num_computed / self.num_prompt
        } else {
            1.0
        }
    }

    /// How long so many tokens take; None before any were served.
    pub(crate) fn time_of(&self, num_tokens: f64) -> Option<Micros> {
        #[expect(
            clippy::cast_sign_loss,
            reason = "no term is negative, and the cast saturates"
        )]
        let micros = (num_tokens * self.micros / self.tokens) as u64;
        (self.tokens > 0.0 && self.micros > 0.0).then_some(Micros(micros))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_does_not_count() {
        let mut rate = ServedRate::default();
        assert_eq!(rate.time_of(1.0), None);
        for second in 0..10 {
            rate.observe_plan(1000, Micros(second * 1_000_000));
        }
        rate.observe_idle();
        rate.observe_plan(1000, Micros(1_000_000_000_000));
        assert_eq!(rate.time_of(5000.0), Some(Micros(5_000_000)));
    }

    #[test]
    fn a_slower_rate_is_followed() {
        let mut rate = ServedRate::default();
        for second in 0..100 {
            rate.observe_plan(1000, Micros(second * 1_000_000));
        }
        for second in 100..200 {
            rate.observe_plan(100, Micros(second * 1_000_000));
        }
        let time = rate.time_of(100.0).unwrap().0;
        assert!((900_000..1_001_000).contains(&time), "{time}");
    }
}
