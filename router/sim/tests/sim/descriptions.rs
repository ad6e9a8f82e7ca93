//! Hardware, models and step traces of the user's own.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::setup::{file, poisson, set_up, summary};

/// Each step takes a millisecond, whatever it does.
pub fn constant_hardware(folder: &TempDir) -> Value {
    let hardware = json!({
        "name": "constant", "source": "made up", "flops_per_second": {"bfloat16": 1e30, "float8": 1e30},
        "attention_flops_per_second": 1e30, "bytes_per_second": 1e30, "memory_bytes": 1e12,
        "step_overhead_seconds": 0.001, "link_latency_seconds": 0.0, "link_bytes_per_second": 1e30,
    });
    json!({"hardware": file(folder, "constant.json", &hardware.to_string())})
}

#[test]
fn a_replica_takes_the_fewest_gpus_that_hold_its_weights() {
    let tokens = |model: &str| {
        let limits = set_up(json!({"cluster": {"model": model}})).unwrap().limits;
        limits.pool_tokens
    };
    assert!((600_000..750_000).contains(&tokens("qwen3-8b")));
    // 141 GB of weights on two GPUs, and what is left by 328 kB a token.
    assert!((280_000..310_000).contains(&tokens("llama-3.1-70b")));
    assert!(set_up(json!({"cluster": {"model": "deepseek-v3"}})).is_ok());
}

#[test]
fn what_does_not_fit_is_refused_with_the_reason() {
    for (cluster, expected) in [
        (
            json!({"model": "deepseek-v3", "tp": 2}),
            "--tp is 2; the weights take",
        ),
        (json!({"model": "gpt"}), "--model is gpt; allowed: qwen3-8b"),
        (
            json!({"hardware": "abacus"}),
            "--hardware is abacus; allowed: h200, b200, or a file",
        ),
        (
            json!({"replicas": 0}),
            "--replicas is 0; allowed: 1 to 1024",
        ),
    ] {
        let error = set_up(json!({"cluster": cluster})).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let error = set_up(json!({"load": {"tenants": 0}})).unwrap_err();
    assert_eq!(error.to_string(), "--tenants is 0; allowed: 1 to 10000");
    let error = set_up(json!({"scheduler": {"mixed": false, "itl_target_ms": 5.0}})).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("--itl-target-ms is 5; without mixed steps"),
        "{error}"
    );
}

#[test]
fn a_file_of_rates_that_cannot_be_is_named() {
    let folder = tempfile::tempdir().unwrap();
    constant_hardware(&folder);
    let path = folder.path().join("constant.json");
    let broken = std::fs::read_to_string(&path)
        .unwrap()
        .replace("1000000000000.0", "-1");
    std::fs::write(&path, broken).unwrap();
    let error = set_up(json!({"cluster": {"hardware": path}}))
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("constant.json: memory_bytes is -1; a number over 0 is needed"),
        "{error}"
    );
}

/// A step trace of a worker that takes 2 ms a step, 10 us a prefill token and 50 us a decode row.
fn records(num: u64) -> String {
    let record = |i: u64| {
        let (prefill, rows) = (i * 7 % 100, i * 13 % 32);
        let seconds = 0.002 + 1e-5 * prefill as f64 + 5e-5 * rows as f64;
        let record = json!({
            "prefill_tokens": prefill, "prefill_pairs": prefill * (prefill + 1) / 2 + i * 31 % 977, "decode_rows": rows,
            "decode_kv_tokens": rows * (200 + i * 17 % 301), "seconds": seconds,
        });
        format!("{record}\n")
    };
    (0..num).map(record).collect()
}

#[test]
fn a_runs_steps_stand_in_for_the_hardware() {
    let folder = tempfile::tempdir().unwrap();
    let hardware = file(&folder, "steps.jsonl", &records(500));
    let found = summary(json!({
        "load": {"source": poisson(0.1, 20, 100, 8)},
        "cluster": {"hardware": hardware},
        "scheduler": {"num_pages": 100, "max_model_len": 4096},
    }));
    assert!((found.ttft_seconds.p50 - 0.003).abs() < 1e-4, "{found:?}");
    assert!((found.itl_seconds.p50 - 0.00205).abs() < 1e-4, "{found:?}");
}

#[test]
fn step_records_ask_for_what_they_do_not_tell_and_name_broken_lines() {
    let folder = tempfile::tempdir().unwrap();
    let error = |name: &str, text: &str| {
        let hardware = file(&folder, name, text);
        set_up(json!({"cluster": {"hardware": hardware}}))
            .unwrap_err()
            .to_string()
    };
    assert!(
        error("whole.jsonl", &records(50))
            .starts_with("--num-pages is not given; a step trace does not")
    );
    assert!(error("few.jsonl", &records(9)).ends_with("it holds 9 steps; at least 10 are needed"));
    let broken = records(20) + &records(1).replace("0.002", "0");
    assert!(error("zero.jsonl", &broken).contains("zero.jsonl:21: seconds is 0; allowed: over 0"));
}
