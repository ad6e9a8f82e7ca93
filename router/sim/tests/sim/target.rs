//! The ITL target: held if decoding alone leaves time, and never starving prefill.

use serde_json::{Value, json};

use crate::setup::{file, poisson, summary, trace};

/// Prompts of 2,000 tokens, at some three quarters of what the replica can take.
fn under_load(scheduler: &Value) -> plait_sim::Summary {
    summary(json!({"load": {"source": poisson(12.0, 600, 2000, 200)}, "scheduler": scheduler}))
}

#[test]
fn gaps_between_tokens_keep_the_target() {
    let free = under_load(&json!({})).itl_seconds;
    for target in [20.0, 40.0, 60.0] {
        let found = under_load(&json!({"itl_target_ms": target})).itl_seconds;
        let target = target / 1e3;
        assert!(free.p99 > 1.2 * target, "{free:?} needs no target");
        assert!(found.p99 <= 1.02 * target, "{target}: {found:?}");
        assert!(found.max <= 1.5 * target, "{target}: {found:?}");
        assert!(
            found.p99 >= 0.9 * target,
            "prefill takes what is left: {found:?}"
        );
    }
}

#[test]
fn the_target_costs_little_throughput() {
    let (free, bound) = (
        under_load(&json!({})),
        under_load(&json!({"itl_target_ms": 40.0})),
    );
    assert!(bound.output_tokens_per_second > 0.98 * free.output_tokens_per_second);
}

/// A long answer that is under way when a prompt of 16 pages comes.
const TRACE: &str = r#"{"timestamp": 0, "input_length": 512, "output_length": 2000, "hash_ids": [0]}
{"timestamp": 1000, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
"#;

#[test]
fn a_target_below_the_time_of_decoding_starves_no_prefill() {
    let folder = tempfile::tempdir().unwrap();
    let load = trace(&file(&folder, "t.jsonl", TRACE));
    let found = |prefill_starvation_steps: u32| {
        let scheduler =
            json!({"itl_target_ms": 1.0, "prefill_starvation_steps": prefill_starvation_steps});
        summary(json!({"load": load, "scheduler": scheduler}))
    };
    let (granted, starved) = (found(8), found(u32::MAX));
    assert_eq!(
        (granted.num_starvation_grants, starved.num_starvation_grants),
        (15, 0)
    );
    let bound = 16.0 * 9.0 * granted.itl_seconds.max + 0.1;
    assert!(granted.ttft_seconds.max < bound, "{granted:?}");
    assert!(starved.ttft_seconds.max > 5.0, "{starved:?}");
}
