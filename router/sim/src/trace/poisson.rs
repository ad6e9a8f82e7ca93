//! Synthetic arrivals: exponential gaps, prompts and answers of fixed length.

use plait_core::Micros;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::Deserialize;

use super::{Arrival, Content, MAX_REQUESTS, num_tokens};
use crate::error::SimError;
use crate::time_units::micros;

/// A Poisson process of requests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Poisson {
    /// Mean requests per second.
    pub rate: f64,
    /// Number of requests.
    pub num_prompts: u32,
    /// Tokens of each prompt.
    pub input_len: u32,
    /// Tokens of each answer.
    pub output_len: u32,
    /// The same seed gives the same arrivals.
    pub seed: u64,
}

impl Poisson {
    /// The arrivals, in the order of their times.
    pub fn arrivals(&self) -> Result<Vec<Arrival>, SimError> {
        self.check()?;
        let mut generator = ChaCha8Rng::seed_from_u64(self.seed);
        let mut now = 0.0;
        let arrivals = (0..self.num_prompts).map(|index| {
            let at = micros(now * 1e6);
            now += exponential(&mut generator) / self.rate;
            self.arrival(index, at)
        });
        Ok(arrivals.collect())
    }

    fn arrival(&self, index: u32, at: Micros) -> Arrival {
        Arrival {
            at,
            num_prompt: self.input_len,
            num_output: self.output_len,
            tenant: 0,
            priority: 0,
            content: Content::Unique(index),
        }
    }

    fn check(&self) -> Result<(), SimError> {
        check_load(self.rate, self.num_prompts)?;
        for (setting, length) in [
            ("--input-len", self.input_len),
            ("--output-len", self.output_len),
        ] {
            num_tokens(setting, length.into())
                .map_err(|allowed| SimError::setting(setting, &length, allowed))?;
        }
        Ok(())
    }
}

/// Checks the mean requests per second and their number.
pub(super) fn check_load(rate: f64, num_prompts: u32) -> Result<(), SimError> {
    if !(rate.is_finite() && rate > 0.0) {
        let allowed = "a number of requests a second over 0 is needed";
        return Err(SimError::setting("--rate", &rate, allowed));
    }
    if !(1..=MAX_REQUESTS).contains(&(num_prompts as usize)) {
        let allowed = format!("1 to {MAX_REQUESTS} are allowed");
        return Err(SimError::setting("--num-prompts", &num_prompts, allowed));
    }
    Ok(())
}

/// An exponentially distributed number with mean 1.
pub(super) fn exponential(generator: &mut ChaCha8Rng) -> f64 {
    const UNIT: f64 = 1.0 / (1_u64 << 53) as f64;
    let uniform = (generator.next_u64() >> 11) as f64 * UNIT;
    -(1.0 - uniform).ln()
}
