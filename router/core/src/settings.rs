//! What a replica's scheduler is given once, at start-up.

/// Limits and switches of one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// T: tokens that one plan may compute.
    pub max_batch_tokens: u32,
    /// S: rows that one plan may hold.
    pub max_rows: u32,
    /// Requests that may hold a lease at a time; each has a slot on the workers.
    pub max_seqs: u32,
    /// L: cap of one request's chunk in one plan.
    pub long_prefill: u32,
    /// P: tokens in one page.
    pub page_size: u32,
    /// Pages in the pool.
    pub num_pages: u32,
    /// Longest prompt plus output, in tokens.
    pub max_model_len: u32,
    /// Prefill and decode rows share a step; off is the baseline that mixing is measured against.
    pub mixed: bool,
    /// Pages kept free at admission for the decoders' next pages.
    pub watermark: u32,
    /// Plans without a row after which the oldest prefill under way is served first.
    pub starvation_steps: u32,
    /// Requests that may wait.
    pub max_queue: u32,
    /// Prompt tokens that may wait.
    pub max_queue_tokens: u64,
}

/// A combination of settings that no plan could satisfy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting} is {given}; {allowed}")]
pub struct SettingsError {
    /// The setting's name as users write it.
    pub setting: &'static str,
    /// What was given.
    pub given: u64,
    /// What is allowed, and why.
    pub allowed: String,
}
