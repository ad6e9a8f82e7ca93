//! Log-probabilities as the worker measured them.

use plait_core::TokenId;

/// One token's log-probability, its rank, and the best of the vocabulary at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token itself, before temperature and filters.
    pub logprob: f32,
    /// From 1, in the whole vocabulary.
    pub rank: u32,
    /// The best tokens with their log-probabilities, best first; as many as the request asked for.
    pub best: Vec<(TokenId, f32)>,
}
