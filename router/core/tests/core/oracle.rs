//! What a request's tokens must be, computed without a scheduler.
//!
//! The "model" is a hash: the KV of a position depends on its token and on every KV before it, and a
//! sampled token depends on every KV up to it, on the seed and on the index of the output token.

use plait_core::{FinishReason, Micros, StepId, TokenId};

/// Small, so that stop ids come up.
pub const VOCABULARY: u64 = 61;

/// SplitMix64's finaliser.
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0x2545_f491_4f6c_dd1d);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The KV of a token that sees `before`, the KV of every earlier position.
pub fn key_value(before: impl IntoIterator<Item = u64>, token: TokenId) -> u64 {
    mix(before.into_iter().fold(17, mix), u64::from(token))
}

/// The hash of no position.
pub const VISIBLE_SEED: u64 = 99;

/// The token that follows the positions whose KV is `visible`.
pub fn sample(visible: impl IntoIterator<Item = u64>, seed: u64, output: u32) -> TokenId {
    sample_from(visible.into_iter().fold(VISIBLE_SEED, mix), seed, output)
}

/// The same of the hash of these positions.
pub fn sample_from(visible: u64, seed: u64, output: u32) -> TokenId {
    let hash = mix(mix(visible, seed), u64::from(output));
    u32::try_from(hash % VOCABULARY).unwrap()
}

/// How long a step took on the device: anything, for no token may depend on it.
pub fn step_time(step: StepId) -> Micros {
    Micros(mix(step.0, 7) % 300)
}

/// The whole output of a request, and why it ends.
pub fn generate(
    prompt: &[TokenId],
    num_due: u32,
    stop_ids: &[TokenId],
    seed: u64,
) -> (Vec<TokenId>, FinishReason) {
    let mut kv: Vec<u64> = Vec::new();
    for token in prompt {
        kv.push(key_value(kv.iter().copied(), *token));
    }
    let mut output = Vec::new();
    for index in 0..num_due {
        let token = sample(kv.iter().copied(), seed, index);
        kv.push(key_value(kv.iter().copied(), token));
        output.push(token);
        if stop_ids.contains(&token) {
            return (output, FinishReason::Stop);
        }
    }
    (output, FinishReason::Length)
}
