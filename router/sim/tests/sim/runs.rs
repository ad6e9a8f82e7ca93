//! What happens to requests in virtual time.

use plait_sim::{SimError, simulate};
use serde_json::{Value, json};

use crate::descriptions::constant_hardware;
use crate::setup::{file, poisson, report, set_up, summary, trace};

/// Two requests at once, and a third one minute later.
const TRACE: &str = r#"{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [0]}
{"timestamp": 0, "input_length": 300, "output_length": 7, "hash_ids": [1]}
{"timestamp": 60000, "input_length": 900, "output_length": 1, "hash_ids": [2, 3]}
"#;

fn on_constant_hardware(scheduler: &Value) -> plait_sim::Summary {
    let folder = tempfile::tempdir().unwrap();
    summary(json!({
        "load": trace(&file(&folder, "t.jsonl", TRACE)),
        "cluster": constant_hardware(&folder),
        "scheduler": scheduler,
    }))
}

#[test]
fn times_are_sums_of_step_times() {
    let found = on_constant_hardware(&json!({}));
    assert_eq!(
        (found.ttft_seconds.p50, found.ttft_seconds.max),
        (0.001, 0.001)
    );
    assert_eq!(
        (found.itl_seconds.p50, found.itl_seconds.max),
        (0.001, 0.001)
    );
    assert_eq!(
        (found.e2e_seconds.p50, found.e2e_seconds.max),
        (0.005, 0.007)
    );
    assert_eq!((found.num_output_tokens, found.num_steps), (13, 8));
    assert_eq!(found.duration_seconds, 60.001);
}

#[test]
fn steps_are_separate_without_mixing() {
    let chunked = json!({"max_batch_tokens": 50});
    let separate = json!({"max_batch_tokens": 50, "mixed": false});
    assert!(on_constant_hardware(&chunked).mixed_share > 0.0);
    assert_eq!(on_constant_hardware(&separate).mixed_share, 0.0);
}

/// Prompts of 1,024 tokens, one after another; the first 512 are the same.
fn branching(num: u64) -> String {
    let line = |number: u64| json!({"timestamp": number * 60_000, "input_length": 1024, "output_length": 1, "hash_ids": [0, number + 1]});
    (0..num)
        .map(|number| format!("{}\n", line(number)))
        .collect()
}

#[test]
fn with_slot_state_prompts_find_what_a_snapshot_has() {
    let folder = tempfile::tempdir().unwrap();
    let hit_ratio = |num_snapshots: Option<u32>| {
        let found = summary(json!({
            "load": trace(&file(&folder, "t.jsonl", &branching(10))),
            "cluster": constant_hardware(&folder),
            "pages": {"page_size": 256, "num_snapshots": num_snapshots},
        }));
        found.prefix_hit_ratio
    };
    assert_eq!(hit_ratio(None), 9.0 * 512.0 / 10_240.0);
    let learnt = 8.0 * 512.0 / 10_240.0;
    assert_eq!(
        hit_ratio(Some(40)),
        learnt,
        "the second learns where they part"
    );
    assert_eq!(hit_ratio(Some(0)), 0.0);
}

/// One long answer, a short one beside it, and later one more.
const UNEVEN: &str = r#"{"timestamp": 0, "input_length": 10, "output_length": 1000, "hash_ids": [0]}
{"timestamp": 1, "input_length": 10, "output_length": 1, "hash_ids": [1]}
{"timestamp": 10, "input_length": 10, "output_length": 1, "hash_ids": [2]}
"#;

#[test]
fn by_load_a_request_goes_where_fewer_are_unanswered() {
    let folder = tempfile::tempdir().unwrap();
    let longest_wait = |routing| {
        let mut cluster = constant_hardware(&folder);
        let fields = json!({"replicas": 2, "routing": routing});
        let fields = fields.as_object().unwrap().clone();
        cluster.as_object_mut().unwrap().extend(fields);
        let found = summary(json!({
            "load": trace(&file(&folder, "uneven.jsonl", UNEVEN)),
            "cluster": cluster,
            "scheduler": {"max_seqs": 1},
        }));
        assert_eq!(found.num_output_tokens, 1002);
        found.ttft_seconds.max
    };
    assert!(longest_wait("in-turn") > 0.9, "behind the long answer");
    assert_eq!(longest_wait("least-loaded"), 0.001);
}

#[test]
fn of_equally_loaded_replicas_the_one_that_got_fewer_is_next() {
    let found = |routing| {
        let change = json!({
            "load": {"source": poisson(1e6, 8, 4096, 2)},
            "cluster": {"replicas": 8, "routing": routing},
            "scheduler": {"max_batch_tokens": 4096},
        });
        summary(change).ttft_seconds
    };
    assert_eq!(found("least-loaded"), found("in-turn"));
}

#[test]
fn requests_go_to_the_replicas_round_robin() {
    let found = |replicas: u32| {
        let change = json!({
            "load": {"source": poisson(1e6, 8, 4096, 2)},
            "cluster": {"replicas": replicas},
            "scheduler": {"max_batch_tokens": 4096},
        });
        summary(change).ttft_seconds
    };
    let (one, eight) = (found(1), found(8));
    assert!((one.max / eight.max - 8.0).abs() < 0.5, "{one:?} {eight:?}");
    assert!(eight.max < 1.01 * eight.p50);
}

#[test]
fn threads_change_nothing() {
    let told = |threads: u32| {
        let change = json!({
            "load": {"source": poisson(60.0, 400, 500, 40)},
            "cluster": {"replicas": 5, "threads": threads},
        });
        report(change).to_json()
    };
    assert_eq!(told(1), told(3));
}

#[test]
fn threads_that_least_loaded_cannot_use_are_refused() {
    let cluster = json!({"replicas": 5, "threads": 3, "routing": "least-loaded"});
    let Err(refusal) = set_up(json!({ "cluster": cluster })) else {
        panic!("nothing is ignored")
    };
    let refusal = refusal.to_string();
    assert!(
        refusal.contains("--threads is 3; 1 with --routing least-loaded"),
        "{refusal}"
    );
}

#[test]
fn a_pool_that_is_too_small_preempts_and_still_answers_everything() {
    let found = summary(json!({
        "load": {"source": poisson(1000.0, 40, 200, 100)},
        "scheduler": {"num_pages": 40, "watermark": 0},
    }));
    assert!(found.num_preemptions > 0);
    assert_eq!(
        (
            found.num_requests,
            found.num_refused,
            found.num_output_tokens
        ),
        (40, 0, 4000)
    );
}

/// A prompt that begins with all 1,024 tokens of the first one, whose answer is long over.
const FOLLOWING: &str = r#"{"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [0, 1]}
{"timestamp": 60000, "input_length": 1536, "output_length": 2, "hash_ids": [0, 1, 2]}
"#;

#[test]
fn a_prompt_that_begins_like_an_earlier_one_hits_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let load = trace(&file(&folder, "t.jsonl", FOLLOWING));
    let found = |cache: bool| summary(json!({"load": load, "scheduler": {"prefix_cache": cache}}));
    let (hit, missed) = (found(true), found(false));
    assert_eq!(hit.prefix_hit_ratio, 1024.0 / 2560.0);
    assert_eq!(missed.prefix_hit_ratio, 0.0);
    assert!(
        hit.ttft_seconds.max < missed.ttft_seconds.max,
        "{hit:?} {missed:?}"
    );
}

#[test]
fn what_no_queue_takes_is_counted() {
    let found = summary(json!({
        "load": {"source": poisson(1e6, 40, 200, 10)},
        "scheduler": {"max_seqs": 1, "max_queue": 10},
    }));
    assert!(found.num_refused >= 29, "{found:?}");
    assert_eq!(found.num_output_tokens, 10 * (40 - found.num_refused));
}

/// The middle one fits neither a pool of 640 tokens nor, there, a context of 1,000.
#[test]
fn too_long_requests_are_counted_apart_from_those_that_find_a_full_queue() {
    for limits in [
        json!({"num_pages": 10, "watermark": 0}),
        json!({"max_model_len": 1000}),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let text = TRACE.replace("300", "1024").replace("[1]", "[1, 1]");
        let load = trace(&file(&folder, "t.jsonl", &text.replace("900", "600")));
        let found = summary(json!({"load": load, "scheduler": limits}));
        assert_eq!((found.num_refused, found.num_too_long), (1, 1), "{limits}");
    }
    let full = summary(json!({
        "load": {"source": poisson(1e6, 40, 200, 10)},
        "scheduler": {"max_seqs": 1, "max_queue": 10},
    }));
    assert!(full.num_refused > 0);
    assert_eq!(full.num_too_long, 0);
}

#[test]
fn mixing_bounds_the_longest_gap_between_tokens() {
    let found = |mixed: bool| {
        summary(json!({
            "load": {"source": poisson(20.0, 400, 2048, 64)},
            "scheduler": {"mixed": mixed, "max_batch_tokens": 2048},
        }))
    };
    let (mixed, separate) = (found(true), found(false));
    assert!(
        mixed.itl_seconds.max * 5.0 < separate.itl_seconds.max,
        "{mixed:?} {separate:?}"
    );
    assert!(mixed.output_tokens_per_second > separate.output_tokens_per_second);
}

#[test]
fn a_caller_can_end_it() {
    let setup = set_up(json!({})).unwrap();
    assert!(matches!(
        simulate(&setup, &mut |_| false),
        Err(SimError::Stopped)
    ));
}

fn v2_lite(replicas: u32, dp_attention: bool, load: &Value) -> plait_sim::Summary {
    summary(json!({
        "load": {"source": load},
        "cluster": {
            "replicas": replicas, "model": "deepseek-v2-lite", "tp": 1, "routing": "least-loaded",
            "dp_attention": dp_attention,
        },
    }))
}

#[test]
fn a_group_answers_everything_and_takes_as_long_for_many_as_its_shared_experts_need() {
    let load = poisson(2000.0, 200, 512, 32);
    let (free, grouped) = (v2_lite(2, false, &load), v2_lite(2, true, &load));
    assert_eq!(grouped.num_output_tokens, 200 * 32);
    assert_eq!(grouped.num_output_tokens, free.num_output_tokens);
    let alone = v2_lite(1, true, &load);
    assert!(alone.duration_seconds > grouped.duration_seconds);
}

#[test]
fn replicas_of_a_group_run_in_lockstep() {
    let one = v2_lite(4, true, &poisson(0.1, 1, 100, 9));
    assert_eq!((one.num_steps, one.num_output_tokens), (9, 9));
}

#[test]
fn a_model_without_experts_has_none_to_share() {
    let error = set_up(json!({"cluster": {"replicas": 2, "dp_attention": true}})).unwrap_err();
    let told = error.to_string();
    assert!(
        told.contains("--dp-attention is set; the model has no experts to share"),
        "{told}"
    );
}
