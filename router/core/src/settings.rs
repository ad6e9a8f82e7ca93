//! What a replica's scheduler is given once, at start-up.

use crate::ids::Micros;
use crate::prefix_hasher::HashSeed;

/// What comes first in the order by which requests are admitted, prefilled and, from its end, preempted.
/// The decode queue never depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Arrival alone.
    Fcfs,
    /// The request's priority, then arrival.
    Priority,
    /// The tenant that was served fewer tokens, then priority and arrival within it.
    Fair,
}

// budget: one field a setting of the command line, with nothing behind them to group them by
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
    pub long_prefill_token_threshold: u32,
    /// P: tokens in one page.
    pub page_size: u32,
    /// Pages in the pool.
    pub num_pages: u32,
    /// Longest prompt plus output, in tokens.
    pub max_model_len: u32,
    /// k: draft tokens that a decode row computes beside the last sampled one, and may have accepted.
    pub draft_width: u32,
    /// Who goes first.
    pub policy: Policy,
    /// Prefill and decode rows share a step; off is the baseline that mixing is measured against.
    pub mixed: bool,
    /// Prompts find the pages that earlier ones computed; nothing keeps none.
    pub prefix_cache: Option<HashSeed>,
    /// Pages kept free at admission for the decoders' next pages.
    pub watermark: u32,
    /// Plans without a row after which the oldest prefill under way is served first.
    pub prefill_starvation_steps: u32,
    /// How long a step that decodes should take; prefill joins as far as that leaves time. Without it
    /// only tokens and rows bound a step. Needs `mixed`.
    pub itl_target: Option<Micros>,
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

impl Settings {
    /// Tokens that the whole pool holds.
    pub(crate) fn pool_tokens(&self) -> u64 {
        u64::from(self.num_pages) * u64::from(self.page_size)
    }

    /// Finds the first setting with which no request could ever run.
    pub(crate) fn check(&self) -> Result<(), SettingsError> {
        self.check_at_least_one()?;
        if self.max_batch_tokens <= self.draft_width {
            let allowed = format!(
                "a row with {} draft tokens and the one before them must fit a step",
                self.draft_width
            );
            return Err(SettingsError {
                setting: "max-batch-tokens",
                given: self.max_batch_tokens.into(),
                allowed,
            });
        }
        at_least(
            "max-model-len",
            self.max_model_len,
            2,
            "one prompt token and one for the answer",
        )?;
        if self.pool_tokens() < 2 {
            let allowed = "at least 2 tokens must fit the pool".to_owned();
            return Err(SettingsError {
                setting: "num-pages",
                given: self.num_pages.into(),
                allowed,
            });
        }
        self.check_itl_target()?;
        if self.watermark >= self.num_pages {
            let allowed = format!(
                "it must leave a page of the pool's {} to admit requests",
                self.num_pages
            );
            return Err(SettingsError {
                setting: "watermark",
                given: self.watermark.into(),
                allowed,
            });
        }
        Ok(())
    }

    fn check_itl_target(&self) -> Result<(), SettingsError> {
        let allowed = match self.itl_target {
            Some(Micros(0)) => "a step takes time",
            Some(_) if !self.mixed => {
                "without mixed steps prefill never joins a step that decodes: leave it out, or mix"
            }
            _ => return Ok(()),
        };
        Err(SettingsError {
            setting: "itl-target-ms",
            given: self.itl_target.map_or(0, |target| target.0 / 1000),
            allowed: allowed.to_owned(),
        })
    }

    fn check_at_least_one(&self) -> Result<(), SettingsError> {
        at_least(
            "max-batch-tokens",
            self.max_batch_tokens,
            1,
            "a step computes at least one token",
        )?;
        at_least("max-rows", self.max_rows, 1, "a step has at least one row")?;
        at_least("max-seqs", self.max_seqs, 1, "a request needs a slot")?;
        at_least(
            "long-prefill-token-threshold",
            self.long_prefill_token_threshold,
            1,
            "a chunk has at least one token",
        )?;
        at_least(
            "page-size",
            self.page_size,
            1,
            "a page holds at least one token",
        )?;
        at_least("num-pages", self.num_pages, 1, "a request needs a page")?;
        at_least(
            "prefill-starvation-steps",
            self.prefill_starvation_steps,
            1,
            "0 would put every prefill before the decoders",
        )?;
        at_least(
            "max-queue",
            self.max_queue,
            1,
            "a request waits until the next plan",
        )
    }
}

fn at_least(setting: &'static str, given: u32, least: u32, why: &str) -> Result<(), SettingsError> {
    if given >= least {
        return Ok(());
    }
    Err(SettingsError {
        setting,
        given: given.into(),
        allowed: format!("at least {least} is needed: {why}"),
    })
}
