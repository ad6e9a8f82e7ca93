//! A request enters a slot. The sampling parameters are declared once, for the struct, its defaults and the wire.

use serde::{Deserialize, Serialize};

/// A request enters a slot; what the slot held is forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "FlatNewSlot", into = "FlatNewSlot")]
pub struct NewSlot {
    /// Which slot.
    pub slot: u32,
    /// Index of the next output token.
    pub next_output: u32,
    /// How the request's tokens are sampled.
    pub sampling: SamplingParams,
}

/// The value of a field that must be finite.
trait Field {
    fn float(&self) -> Option<f64> {
        None
    }
}

impl Field for f64 {
    fn float(&self) -> Option<f64> {
        Some(*self)
    }
}

impl Field for u32 {}
impl Field for u64 {}
impl Field for Option<u32> {}

macro_rules! sampling_params {
    ($($(#[$doc:meta])* $name:ident: $kind:ty = $default:expr,)*) => {
        /// How a request's tokens are sampled. Only the worker reads it.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct SamplingParams {
            $($(#[$doc])* pub $name: $kind,)*
        }

        impl Default for SamplingParams {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        impl SamplingParams {
            /// A bit for each field that is not at its default, in order.
            pub fn fields_in_use(&self) -> u64 {
                let default = Self::default();
                [$(self.$name != default.$name,)*].into_iter().rev().fold(0, |bits, bit| bits << 1 | u64::from(bit))
            }

            /// The first field that is not a finite number.
            pub(crate) fn not_finite(&self) -> Option<(&'static str, f64)> {
                let floats = [$((stringify!($name), self.$name.float()),)*];
                let mut floats = floats.into_iter().filter_map(|(name, float)| Some((name, float?)));
                floats.find(|(_, float)| !float.is_finite())
            }
        }

        /// A [`NewSlot`] as the wire has it: one array.
        #[derive(Deserialize, Serialize)]
        struct FlatNewSlot {
            slot: u32,
            next_output: u32,
            $($name: $kind,)*
        }

        impl From<FlatNewSlot> for NewSlot {
            fn from(flat: FlatNewSlot) -> Self {
                let sampling = SamplingParams { $($name: flat.$name,)* };
                Self { slot: flat.slot, next_output: flat.next_output, sampling }
            }
        }

        impl From<NewSlot> for FlatNewSlot {
            fn from(new: NewSlot) -> Self {
                let (slot, next_output) = (new.slot, new.next_output);
                Self { slot, next_output, $($name: new.sampling.$name,)* }
            }
        }
    };
}

sampling_params! {
    /// 0 is greedy.
    temperature: f64 = 1.0,
    /// 0 keeps the whole vocabulary.
    top_k: u32 = 0,
    /// 1 keeps the whole vocabulary.
    top_p: f64 = 1.0,
    /// 0 keeps the whole vocabulary.
    min_p: f64 = 0.0,
    /// The random number of output token i is Philox(seed, i).
    seed: u64 = 0,
    /// K of the records that each output token gets.
    logprobs: Option<u32> = None,
    /// K of the records that each prompt token but the first gets.
    prompt_logprobs: Option<u32> = None,
}
