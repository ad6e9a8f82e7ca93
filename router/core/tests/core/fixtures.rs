//! Settings and short verbs that the tests share.

use plait_core::{Plan, Policy, Settings};

use crate::harness::{Harness, Spec};

pub fn settings() -> Settings {
    Settings {
        max_batch_tokens: 64,
        max_rows: 8,
        max_seqs: 8,
        long_prefill_token_threshold: 32,
        page_size: 16,
        num_pages: 64,
        max_model_len: 256,
        draft_width: 0,
        policy: Policy::Priority,
        mixed: true,
        prefix_cache: None,
        watermark: 0,
        prefill_starvation_steps: 8,
        itl_target: None,
        max_queue: 16,
        max_queue_tokens: 4096,
    }
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
