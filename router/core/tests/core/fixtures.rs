//! Settings and short verbs that the tests share.

use plait_core::{
    HashSeed, PageSettings, Plan, Policy, RuntimeSettings, SchedulerSettings, Settings,
};

use crate::harness::{Harness, Spec};

pub fn settings() -> Settings {
    Settings {
        scheduler: SchedulerSettings {
            max_batch_tokens: Some(64),
            max_seqs: Some(8),
            long_prefill_token_threshold: Some(32),
            policy: Policy::Priority,
            max_queue: 16,
            max_queue_tokens: 4096,
            max_skip_ahead: 0,
            ..SchedulerSettings::default()
        },
        pages: PageSettings {
            page_size: 16,
            prefix_cache: false,
            watermark: Some(0),
            ..PageSettings::default()
        },
        runtime: RuntimeSettings {
            max_rows: Some(8),
            ..RuntimeSettings::new(64, 256, HashSeed([1, 2]))
        },
    }
}

/// The settings after a change.
pub fn with(mut settings: Settings, change: impl FnOnce(&mut Settings)) -> Settings {
    change(&mut settings);
    settings
}

/// A harness with these requests in its queue, given as prompt length and output.
pub fn harness<const N: usize>(settings: Settings, requests: [(u32, u32); N]) -> Harness {
    let mut harness = Harness::new(settings);
    for (num_prompt, max_tokens) in requests {
        harness.submit(Spec::new(num_prompt, max_tokens)).unwrap();
    }
    harness
}

/// Plans one step and completes it.
pub fn step(harness: &mut Harness) -> Plan {
    let plan = harness.plan().expect("there is something to do");
    harness.complete();
    plan
}

pub fn decoded(plan: &Plan) -> Vec<u64> {
    plan.decode.iter().map(|row| row.request.0).collect()
}

/// Request, start and length of each prefill row.
pub fn chunks(plan: &Plan) -> Vec<(u64, u32, u32)> {
    plan.prefill
        .iter()
        .map(|row| (row.request.0, row.start, row.length))
        .collect()
}
