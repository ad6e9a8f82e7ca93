//! The step trace.

use std::fs;

use plait_engine::{Engine, Timeouts};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{Harness, settings};
use crate::{fake_worker::STEP_MICROS, model};

#[test]
fn every_step_is_recorded_with_its_work_and_its_time() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("steps.jsonl");
    let mut harness = Harness::ready(&json!({"step_trace": path}), |_| {});
    harness.submit(1, "abc", &json!({"max_tokens": 3}));
    harness.answer(1);
    harness.engine.close();
    let records: Vec<Value> = fs::read_to_string(&path)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let record = |prefill_tokens, prefill_pairs, decode_rows, decode_kv_tokens| {
        json!({
            "prefill_tokens": prefill_tokens, "prefill_pairs": prefill_pairs, "decode_rows": decode_rows,
            "decode_kv_tokens": decode_kv_tokens, "seconds": STEP_MICROS as f64 / 1e6,
        })
    };
    let expected = [record(3, 6, 0, 0), record(0, 0, 1, 4), record(0, 0, 1, 5)];
    assert_eq!(records, expected);
}

/// Why an engine does not start with these settings.
fn refusal(folder: &TempDir, change: &Value) -> String {
    model::write(folder.path());
    let settings = settings(folder, change).to_string();
    let error = Engine::start(settings.as_bytes()).err();
    error.expect("it cannot start").to_string()
}

#[test]
fn a_file_that_cannot_be_written_is_told_at_the_start() {
    let folder = TempDir::new().unwrap();
    let told = refusal(&folder, &json!({"step_trace": "/dev/null/steps.jsonl"}));
    assert!(
        told.starts_with("--step-trace /dev/null/steps.jsonl: Not a directory"),
        "{told}"
    );
}

#[test]
fn a_file_that_is_there_already_is_refused_and_left_as_it_is() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("thesis.txt");
    fs::write(&path, "all my work").unwrap();
    let told = refusal(&folder, &json!({"step_trace": path}));
    assert!(told.contains("File exists"), "{told}");
    assert!(told.contains("name a new file"), "{told}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "all my work");
}

#[test]
fn a_start_that_fails_leaves_no_file() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("steps.jsonl");
    let too_long = folder.path().join("x".repeat(107));
    let told = refusal(&folder, &json!({"step_trace": path, "run_dir": too_long}));
    assert!(told.contains("choose a shorter directory"), "{told}");
    assert!(!path.exists());
}

#[test]
fn a_server_that_ends_before_its_first_step_leaves_no_file() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("steps.jsonl");
    let harness = Harness::alone(&json!({"step_trace": path}), Timeouts::default());
    assert!(path.exists());
    harness.engine.close();
    assert!(!path.exists());
}
