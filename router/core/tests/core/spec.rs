//! What clients ask for.

use std::num::NonZeroU32;

use plait_core::{PooledTokens, Request, TenantId, TokenId};

/// What a client asks for.
#[derive(Clone, Debug)]
pub struct Spec {
    pub prompt: Vec<TokenId>,
    pub max_tokens: u32,
    pub stop_ids: Vec<TokenId>,
    pub priority: i32,
    pub num_choices: u32,
    pub prompt_logprobs: bool,
    pub salt: u64,
    pub is_masked: bool,
    pub num_slot_words: u32,
    pub pooled: Option<PooledTokens>,
    pub tenant: u64,
    pub weight: u32,
}

impl Spec {
    pub fn new(num_prompt: u32, max_tokens: u32) -> Self {
        let prompt = (0..num_prompt).map(|i| i % 7).collect();
        Self {
            prompt,
            max_tokens,
            stop_ids: Vec::new(),
            priority: 0,
            num_choices: 1,
            prompt_logprobs: false,
            salt: 0,
            is_masked: false,
            num_slot_words: 0,
            pooled: None,
            tenant: 0,
            weight: 1,
        }
    }

    /// What each of its choices asks for.
    pub fn choices(self) -> impl Iterator<Item = Self> {
        (0..self.num_choices).map(move |index| Self {
            num_choices: 1,
            prompt_logprobs: self.prompt_logprobs && index == 0,
            ..self.clone()
        })
    }

    pub fn request(&self) -> Request {
        Request {
            prompt: self.prompt.clone().into(),
            max_tokens: self.max_tokens,
            stop_ids: self.stop_ids.clone().into(),
            num_choices: NonZeroU32::new(self.num_choices).unwrap(),
            prompt_logprobs: self.prompt_logprobs,
            is_masked: self.is_masked,
            num_slot_words: self.num_slot_words,
            pooled: self.pooled,
            priority: self.priority,
            salt: self.salt,
            tenant: TenantId(self.tenant),
            weight: NonZeroU32::new(self.weight).unwrap(),
        }
    }
}
