//! How a request or a model's authors want tokens sampled: ranges, defaults, and what the worker gets.

use std::fmt::Display;

use plait_proto::SamplingParams;
use serde::{Deserialize, Serialize};

/// Sampling fields of a request's body or of a generation_config.json; `None` is "not given".
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default)]
pub struct SamplingFields {
    /// 0 is greedy.
    pub temperature: Option<f64>,
    /// 1 keeps the whole vocabulary.
    pub top_p: Option<f64>,
    /// -1 and 0 keep the whole vocabulary.
    pub top_k: Option<i64>,
    /// 0 keeps the whole vocabulary.
    pub min_p: Option<f64>,
    /// Subtracted once from each token of the output.
    pub presence_penalty: Option<f64>,
    /// Subtracted from a token for each time that the output has it.
    pub frequency_penalty: Option<f64>,
    /// Divides the positive logits of tokens in prompt or output, and multiplies the others.
    pub repetition_penalty: Option<f64>,
}

/// Penalties of tokens that were there before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Once for each token of the output.
    pub presence: f32,
    /// For each time that the output has it.
    pub frequency: f32,
    /// A factor, for tokens of prompt and output.
    pub repetition: f32,
}

impl Penalties {
    /// They change nothing.
    pub const NONE: Self = Self {
        presence: 0.0,
        frequency: 0.0,
        repetition: 1.0,
    };
}

/// A field that is out of range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfRange {
    /// Its name.
    pub field: &'static str,
    /// What was given.
    pub given: String,
    /// What is allowed.
    pub allowed: &'static str,
}

impl SamplingFields {
    /// The first field that is out of range.
    pub fn check(&self) -> Result<(), OutOfRange> {
        check("temperature", self.temperature, "0 to 100", |it| {
            (0.0..=100.0).contains(&it)
        })?;
        for (field, given) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            check(field, given, "-2 to 2", |it| (-2.0..=2.0).contains(&it))?;
        }
        check(
            "repetition_penalty",
            self.repetition_penalty,
            "0.01 to 100",
            |it| (0.01..=100.0).contains(&it),
        )?;
        check("top_p", self.top_p, "over 0 to 1", |it| {
            it > 0.0 && it <= 1.0
        })?;
        check("top_k", self.top_k, "-1 to 2147483647", |it| {
            (-1..=i64::from(i32::MAX)).contains(&it)
        })?;
        check("min_p", self.min_p, "0 to 1", |it| {
            (0.0..=1.0).contains(&it)
        })
    }

    /// These fields, and of `others` those that are not given here.
    #[must_use]
    pub fn filled_from(self, others: &Self) -> Self {
        Self {
            temperature: self.temperature.or(others.temperature),
            top_p: self.top_p.or(others.top_p),
            top_k: self.top_k.or(others.top_k),
            min_p: self.min_p.or(others.min_p),
            presence_penalty: self.presence_penalty.or(others.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(others.frequency_penalty),
            repetition_penalty: self.repetition_penalty.or(others.repetition_penalty),
        }
    }

    /// What the worker gets: these fields, else the model's, else OpenAI's defaults. The caller sets the
    /// seed and the log-probabilities.
    pub fn or(&self, model: &Self) -> SamplingParams {
        let default = SamplingParams::default();
        let float = |asked: Option<f64>, of_model: Option<f64>, default: f64| {
            asked.or(of_model).map_or(default, round_to_f32)
        };
        let top_k = self.top_k.or(model.top_k);
        SamplingParams {
            temperature: float(self.temperature, model.temperature, default.temperature),
            top_p: float(self.top_p, model.top_p, default.top_p),
            top_k: top_k.map_or(default.top_k, |it| u32::try_from(it).unwrap_or(0)),
            min_p: float(self.min_p, model.min_p, default.min_p),
            ..default
        }
    }
}

impl SamplingFields {
    /// The penalties: these fields', else the model's, else none.
    pub fn penalties(&self, model: &Self) -> Penalties {
        let float = |asked: Option<f64>, of_model: Option<f64>, none: f32| {
            asked.or(of_model).map_or(none, |it| it as f32)
        };
        let none = Penalties::NONE;
        Penalties {
            presence: float(self.presence_penalty, model.presence_penalty, none.presence),
            frequency: float(
                self.frequency_penalty,
                model.frequency_penalty,
                none.frequency,
            ),
            repetition: float(
                self.repetition_penalty,
                model.repetition_penalty,
                none.repetition,
            ),
        }
    }
}

/// The value as the device has it, an `f32`.
fn round_to_f32(value: f64) -> f64 {
    f64::from(value as f32)
}

fn check<T: Copy + Display>(
    field: &'static str,
    given: Option<T>,
    allowed: &'static str,
    is_allowed: impl Fn(T) -> bool,
) -> Result<(), OutOfRange> {
    match given {
        Some(given) if !is_allowed(given) => Err(OutOfRange {
            field,
            given: given.to_string(),
            allowed,
        }),
        _ => Ok(()),
    }
}
