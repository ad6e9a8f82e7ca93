//! Settings of a replica's scheduler: the user's, and what its ranks report.
//!
//! `plait/settings.py` declares each user setting with its bounds and help. The structs here mirror it,
//! and pass whole from the command line to [`crate::Scheduler::new`]. `tests/contract/settings.json`
//! checks names, types and defaults of both.

use serde::{Deserialize, Serialize};

use crate::ids::Micros;
use crate::prefix_hasher::HashSeed;

/// The order in which requests are admitted and prefilled. Preemption takes them from its end. Decode
/// rows are served round-robin instead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Arrival alone.
    #[default]
    Fcfs,
    /// The request's priority, then arrival.
    Priority,
    /// The tenant that was served fewest tokens, then priority and arrival within it.
    Fair,
    /// Of those that waited longest, the one with the longest cached prefix.
    CacheAware,
}

impl Policy {
    /// Whether requests of smaller priority go first.
    pub fn is_by_priority(self) -> bool {
        matches!(self, Self::Priority | Self::Fair)
    }
}

/// `plait.settings.SchedulerSettings`, field for field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulerSettings {
    /// T: tokens of one plan at most. The default depends on the device, so the launch fills it in.
    pub max_batch_tokens: Option<u32>,
    /// S: requests that hold a slot and pages at a time. Its default depends on the device too.
    pub max_seqs: Option<u32>,
    /// L: tokens of one request's chunk at most; None means T.
    pub long_prefill_token_threshold: Option<u32>,
    /// Prefill and decode rows in one step. Off runs prefill first.
    pub mixed: bool,
    /// Target time of a decoding step. Prefill joins as far as it fits. Needs `mixed`.
    pub itl_target_ms: Option<f64>,
    /// Plan a step while the one before it runs.
    pub overlap: bool,
    /// Who goes first.
    pub policy: Policy,
    /// Plans without a row after which the oldest prefill goes first.
    pub prefill_starvation_steps: u32,
    /// Requests that may wait.
    pub max_queue: u32,
    /// Prompt tokens that may wait.
    pub max_queue_tokens: u64,
    /// Longest wait of a request that has not run yet; None means for ever.
    pub max_queue_seconds: Option<f64>,
    /// Requests that may be admitted before a head whose pages are not free.
    pub max_skip_ahead: u32,
    /// Least difference of priorities for which a waiting request preempts running ones; None never does.
    pub priority_preemption_threshold: Option<u32>,
    /// Waiting time that makes up for one step of priority.
    pub priority_aging_seconds: f64,
}

impl Default for SchedulerSettings {
    fn default() -> Self {
        Self {
            max_batch_tokens: None,
            max_seqs: None,
            long_prefill_token_threshold: None,
            mixed: true,
            itl_target_ms: None,
            overlap: true,
            policy: Policy::Fcfs,
            prefill_starvation_steps: 8,
            max_queue: 1024,
            max_queue_tokens: 1 << 22,
            max_queue_seconds: None,
            max_skip_ahead: 8,
            priority_preemption_threshold: None,
            priority_aging_seconds: 60.0,
        }
    }
}

impl SchedulerSettings {
    /// Slots on the workers, one for each request that runs; 0 if the launch gave none.
    pub fn num_slots(&self) -> u32 {
        self.max_seqs.unwrap_or_default()
    }

    /// Plans that may be in flight.
    pub fn max_in_flight(&self) -> usize {
        if self.overlap { 2 } else { 1 }
    }
}

/// `plait.settings.PageSettings`, field for field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageSettings {
    /// P: tokens in one page.
    pub page_size: u32,
    /// Pages that the user asked for. The ranks report how many there are.
    pub num_pages: Option<u32>,
    /// Keep computed pages for later prompts with the same prefix.
    pub prefix_cache: bool,
    /// Pages kept free at admission for the decoders' next pages; None means 1% of the pool.
    pub watermark: Option<u32>,
    /// Snapshots of slot state that the user asked for. The ranks report how many there are.
    pub num_snapshots: Option<u32>,
    /// Tokens in which one page boundary's slot state is kept as a snapshot.
    pub snapshot_interval: u32,
    /// Share of the free memory for weights and pages. The ranks read it, the scheduler does not.
    pub memory_fraction: Option<f64>,
}

impl Default for PageSettings {
    fn default() -> Self {
        Self {
            page_size: 64,
            num_pages: None,
            prefix_cache: true,
            watermark: None,
            num_snapshots: None,
            snapshot_interval: 4096,
            memory_fraction: None,
        }
    }
}

/// What is known only once the replica's ranks are up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeSettings {
    /// Pages in the pool.
    pub num_pages: u32,
    /// Longest prompt plus output, in tokens.
    pub max_model_len: u32,
    /// Rows of one plan at most; None means `max_seqs`.
    pub max_rows: Option<u32>,
    /// k: draft tokens that a decode row computes and may accept beside the last sampled one.
    pub draft_width: u32,
    /// Key of the prefix cache's hashes. Each process draws its own.
    pub hash_seed: HashSeed,
    /// Cache kinds after the first, which the other fields describe; empty for one kind.
    pub other_kinds: Vec<PoolSize>,
    /// Snapshots of slot state; None for a model that keeps none.
    pub num_snapshots: Option<u32>,
}

impl RuntimeSettings {
    /// One cache kind, no draft tokens, and as many rows as requests.
    pub fn new(num_pages: u32, max_model_len: u32, hash_seed: HashSeed) -> Self {
        Self {
            num_pages,
            max_model_len,
            max_rows: None,
            draft_width: 0,
            hash_seed,
            other_kinds: Vec::new(),
            num_snapshots: None,
        }
    }
}

/// Pages of one cache kind, such as full or sliding-window KV. Each kind has a pool of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSize {
    /// Tokens in one page.
    pub page_size: u32,
    /// Pages in the pool.
    pub num_pages: u32,
}

/// Everything that a scheduler is given.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The user's, for the scheduler.
    pub scheduler: SchedulerSettings,
    /// The user's, for the KV pages.
    pub pages: PageSettings,
    /// What the ranks report.
    pub runtime: RuntimeSettings,
}

/// Settings that follow from several others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// T: tokens of one plan at most.
    pub max_batch_tokens: u32,
    /// Rows of one plan at most.
    pub max_rows: u32,
    /// L: tokens of one chunk at most.
    pub long_prefill_token_threshold: u32,
    /// Pages kept free at admission.
    pub watermark: u32,
    /// Target time of a step that decodes.
    pub itl_target: Option<Micros>,
    /// Longest wait of a request that has not run yet.
    pub max_wait: Option<Micros>,
    /// Waiting time that makes up for one step of priority.
    pub priority_aging: Micros,
    /// Tokens that the whole pool holds; of several cache kinds the smallest.
    pub pool_tokens: u64,
}

/// A combination of settings with which no request could run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--{setting} is {given}; {allowed}")]
pub struct SettingsError {
    /// The setting's name as users write it, without the dashes.
    pub setting: &'static str,
    /// What was given.
    pub given: u64,
    /// What is allowed, why, and what to do.
    pub allowed: String,
}

impl Settings {
    /// The limits that follow, or the first setting with which no request could run.
    pub fn limits(&self) -> Result<Limits, SettingsError> {
        let limits = self.resolve();
        self.check_counts(&limits)?;
        self.check_step(&limits)?;
        self.check_pool(&limits)?;
        self.check_priority()?;
        Ok(limits)
    }

    fn resolve(&self) -> Limits {
        let max_batch_tokens = self.scheduler.max_batch_tokens.unwrap_or_default();
        let num_pages = self.runtime.num_pages;
        Limits {
            max_batch_tokens,
            max_rows: self.runtime.max_rows.unwrap_or(self.scheduler.num_slots()),
            long_prefill_token_threshold: self
                .scheduler
                .long_prefill_token_threshold
                .unwrap_or(max_batch_tokens),
            watermark: self
                .pages
                .watermark
                .unwrap_or_else(|| default_watermark(num_pages)),
            itl_target: self.scheduler.itl_target_ms.map(micros),
            max_wait: self.scheduler.max_queue_seconds.map(|it| micros(it * 1e3)),
            priority_aging: micros(self.scheduler.priority_aging_seconds * 1e3),
            pool_tokens: self.pool_tokens(),
        }
    }

    /// Tokens that the smallest pool holds.
    fn pool_tokens(&self) -> u64 {
        let tokens = |num_pages: u32, page_size: u32| u64::from(num_pages) * u64::from(page_size);
        let others = self.runtime.other_kinds.iter();
        let others = others.map(|kind| tokens(kind.num_pages, kind.page_size));
        let first = tokens(self.runtime.num_pages, self.pages.page_size);
        others.fold(first, u64::min)
    }

    fn check_step(&self, limits: &Limits) -> Result<(), SettingsError> {
        let draft_width = self.runtime.draft_width;
        if limits.max_batch_tokens <= draft_width {
            let allowed = format!(
                "a row with {draft_width} draft tokens and the one before them must fit a step: raise it"
            );
            return Err(out_of_range(
                "max-batch-tokens",
                limits.max_batch_tokens,
                allowed,
            ));
        }
        let allowed = match limits.itl_target {
            Some(Micros(0)) => "a step takes time: raise it",
            Some(_) if !self.scheduler.mixed => {
                "without mixed steps prefill never joins a step that decodes: leave it out, or mix"
            }
            _ => return Ok(()),
        };
        let millis = limits.itl_target.map_or(0, |target| target.0 / 1000);
        Err(out_of_range("itl-target-ms", millis, allowed))
    }

    fn check_pool(&self, limits: &Limits) -> Result<(), SettingsError> {
        let num_pages = self.runtime.num_pages;
        if limits.pool_tokens < 2 {
            let allowed = "at least 2 tokens must fit the pool: raise it, or --page-size";
            return Err(out_of_range("num-pages", num_pages, allowed));
        }
        if limits.watermark >= num_pages {
            let allowed = format!(
                "it must leave a page of the pool's {num_pages} to admit requests: lower it"
            );
            return Err(out_of_range("watermark", limits.watermark, allowed));
        }
        Ok(())
    }

    fn check_priority(&self) -> Result<(), SettingsError> {
        match self.scheduler.priority_preemption_threshold {
            Some(threshold) if self.scheduler.policy != Policy::Priority => Err(out_of_range(
                "priority-preemption-threshold",
                threshold,
                "requests have no order of priority: leave it out, or start with --policy priority",
            )),
            Some(0) => Err(out_of_range(
                "priority-preemption-threshold",
                0_u32,
                "equal priorities would preempt each other: give at least 1",
            )),
            _ => Ok(()),
        }
    }

    /// Rejects what would divide by zero or admit nothing.
    fn check_counts(&self, limits: &Limits) -> Result<(), SettingsError> {
        let least = [
            (
                "max-batch-tokens",
                limits.max_batch_tokens,
                1,
                "a step computes at least one token",
            ),
            (
                "max-rows",
                limits.max_rows,
                1,
                "a step has at least one row",
            ),
            (
                "max-seqs",
                self.scheduler.num_slots(),
                1,
                "a request needs a slot",
            ),
            (
                "long-prefill-token-threshold",
                limits.long_prefill_token_threshold,
                1,
                "a chunk has at least one token",
            ),
            (
                "page-size",
                self.pages.page_size,
                1,
                "a page holds at least one token",
            ),
            (
                "snapshot-interval",
                self.pages.snapshot_interval,
                1,
                "a snapshot is at the end of a page",
            ),
            (
                "num-pages",
                self.runtime.num_pages,
                1,
                "a request needs a page",
            ),
            (
                "prefill-starvation-steps",
                self.scheduler.prefill_starvation_steps,
                1,
                "0 would put every prefill before the decoders",
            ),
            (
                "max-queue",
                self.scheduler.max_queue,
                1,
                "a request waits until the next plan",
            ),
            (
                "max-model-len",
                self.runtime.max_model_len,
                2,
                "one prompt token and one for the answer",
            ),
        ];
        let missed = least.into_iter().find(|(_, given, least, _)| given < least);
        missed.map_or(Ok(()), |(setting, given, least, why)| {
            let allowed = format!("at least {least} is needed, because {why}: raise it");
            Err(out_of_range(setting, given, allowed))
        })
    }
}

fn out_of_range(
    setting: &'static str,
    given: impl Into<u64>,
    allowed: impl Into<String>,
) -> SettingsError {
    SettingsError {
        setting,
        given: given.into(),
        allowed: allowed.into(),
    }
}

/// A hundredth of a pool, but never all of it.
pub(crate) fn default_watermark(num_pages: u32) -> u32 {
    (num_pages / 100).max(1).min(num_pages.saturating_sub(1))
}

/// The nearest whole microseconds; a positive target never becomes 0.
fn micros(milliseconds: f64) -> Micros {
    let least = if milliseconds > 0.0 { 1.0 } else { 0.0 };
    #[expect(clippy::cast_sign_loss, reason = "the cast saturates")]
    Micros((milliseconds * 1000.0).round().max(least) as u64)
}
