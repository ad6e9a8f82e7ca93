//! An idle engine does nothing. Alone in its process, so that its threads have unique names.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "driver/fake_worker.rs"]
#[allow(dead_code, reason = "one test needs little of what the others share")]
mod fake_worker;
#[path = "driver/harness.rs"]
#[allow(dead_code, reason = "one test needs little of what the others share")]
mod harness;
#[path = "driver/manual_clock.rs"]
#[allow(dead_code, reason = "one test needs little of what the others share")]
mod manual_clock;
#[path = "driver/model.rs"]
mod model;

use std::fs;

use serde_json::json;

/// Processor time, in clock ticks, and waits of this process's thread of that name.
fn cost_of(thread_name: &str) -> (u64, u64) {
    let tasks = fs::read_dir("/proc/self/task")
        .unwrap()
        .map(|task| task.unwrap().path());
    let is_named = |task: &std::path::PathBuf| {
        fs::read_to_string(task.join("comm")).unwrap().trim() == thread_name
    };
    let task = tasks.into_iter().find(is_named).unwrap();
    let stat = fs::read_to_string(task.join("stat")).unwrap();
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    let ticks = [11, 12]
        .map(|field| fields[field].parse::<u64>().unwrap())
        .iter()
        .sum();
    let status = fs::read_to_string(task.join("status")).unwrap();
    let waits = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
        .unwrap();
    (ticks, waits.trim().parse().unwrap())
}

#[test]
fn an_idle_engine_makes_no_step_and_burns_no_processor_time() {
    let mut harness = harness::Harness::ready(&json!({}), |rank| rank.heartbeats = false);
    harness.submit(1, "abc", &json!({"max_tokens": 5}));
    assert_eq!(harness.answer(1).text(), "defgh");
    harness.wait_until("it is idle", |harness| harness.status()["idle"] == true);
    let (step, before) = (harness.status()["step"].clone(), cost_of("plait-driver"));
    let mut event = [zmq::PollItem::from_fd(
        harness.engine.event_fd(),
        zmq::POLLIN,
    )];
    assert_eq!(zmq::poll(&mut event, 2000), Ok(0), "something happened");
    let after = cost_of("plait-driver");
    assert_eq!(harness.status()["step"], step);
    assert!(
        after.0 - before.0 <= 2,
        "{} clock ticks in two idle seconds",
        after.0 - before.0
    );
    assert!(
        after.1 - before.1 <= 4,
        "woke {} times in two idle seconds",
        after.1 - before.1
    );
}
