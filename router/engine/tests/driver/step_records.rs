//! The file of step records.

use std::fs;

use plait_engine::{Engine, Patience};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::rig::{Rig, settings};
use crate::{model, worker::STEP_MICROS};

#[test]
fn every_step_is_recorded_with_its_work_and_its_time() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("steps.jsonl");
    let mut rig = Rig::ready(&json!({"step_records": path}), |_| {});
    rig.submit(1, "abc", &json!({"max_tokens": 3}));
    rig.answer(1);
    rig.engine.close();
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

#[test]
fn a_file_that_cannot_be_written_is_told_at_the_start() {
    let folder = TempDir::new().unwrap();
    model::write(folder.path());
    let nowhere = json!({"step_records": "/dev/null/steps.jsonl"});
    let settings = settings(&folder, &nowhere).to_string();
    let error = Engine::start_with(settings.as_bytes(), Patience::default()).err();
    let told = error.expect("nothing can be written there").to_string();
    assert!(
        told.starts_with("--step-records /dev/null/steps.jsonl: Not a directory"),
        "{told}"
    );
}
