//! Claims about steps of a group that have no result.

use std::sync::Arc;
use std::time::Duration;

use plait_engine::Timeouts;
use serde_json::json;
use tempfile::TempDir;

use crate::fake_worker::Fault;
use crate::groups::{group_of, plans};
use crate::harness::Harness;

/// Two engines on one clock, of which the second one's rank has two steps that it does not answer, and the first
/// one's has answered its own. No vote is missing.
fn waiting_for_engine_1(timeouts: Timeouts) -> (TempDir, Vec<Harness>) {
    let (directory, mut engines) = on_one_clock(timeouts);
    engines[1].inject(Fault::Silence);
    engines[0].submit(1, "abc", &json!({"max_tokens": 40}));
    engines[1].wait_until("its rank has two steps", |harness| {
        plans(harness).len() == 2
    });
    engines[0].wait_until("its own steps are done", |harness| {
        let steps = plans(harness);
        steps.len() == 2 && harness.status()["step"] == steps[1].step
    });
    (directory, engines)
}

fn on_one_clock(timeouts: Timeouts) -> (TempDir, Vec<Harness>) {
    let clock = Arc::default();
    group_of(2, |change| {
        let mut harness = Harness::on_clock(change, timeouts, &clock);
        harness.dial(|_| {});
        harness
    })
}

fn short_steps() -> Timeouts {
    Timeouts {
        step: Duration::from_millis(200),
        step_token: Duration::ZERO,
        stuck_grace: Duration::from_millis(300),
        ..Timeouts::default()
    }
}

#[test]
fn a_rank_that_hangs_ends_every_engine_where_no_vote_is_missing() {
    let timeouts = short_steps();
    let (_directory, mut engines) = waiting_for_engine_1(timeouts);
    engines[0].advance(timeouts.step + timeouts.stuck_grace);
    engines[1].engine.wake();
    assert_eq!(engines[0].answer(1).error, Some((503, 0)));
    engines[0].wait_for_phase("failed");
    let status = engines[0].status();
    let reason = status["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("engine 1 gave up: a step has had no result in time"),
        "{reason}"
    );
    assert_eq!(status["exit_code"], 5);
}

#[test]
fn a_step_that_another_engine_takes_long_for_ends_no_group() {
    let timeouts = short_steps();
    let (_directory, mut engines) = waiting_for_engine_1(timeouts);
    engines[0].advance(timeouts.step);
    engines[1].engine.wake();
    engines[1].wait_until("a step is overdue", |harness| {
        harness.status()["stuck"] == true
    });
    engines[1].clear_fault();
    engines[1].wait_until("it was answered", |harness| {
        harness.status()["stuck"] == false
    });
    assert_eq!(engines[0].answer(1).text().len(), 40);
    assert_eq!(engines[0].status()["phase"], "ready");
}

/// The usual limits: a step unlike those measured has a minute and more, one that is known ten seconds.
#[test]
fn a_hang_is_seen_in_ten_seconds_once_the_group_has_measured_steps() {
    let (_directory, mut engines) = on_one_clock(Timeouts::default());
    for stream in 0..5 {
        engines[0].submit(stream, "abc", &json!({"max_tokens": 5}));
        engines[0].answer(stream);
    }
    engines[1].inject(Fault::Silence);
    let num_plans = plans(&engines[1]).len();
    engines[0].submit(5, "abc", &json!({"max_tokens": 5}));
    engines[1].wait_until("its rank has the step", |harness| {
        plans(harness).len() > num_plans
    });
    engines[1].advance(Duration::from_secs(9));
    assert_eq!(engines[1].status()["stuck"], false);
    engines[1].advance(Duration::from_secs(1));
    engines[1].wait_until("it is stuck", |harness| harness.status()["stuck"] == true);
    assert_eq!(engines[1].status()["phase"], "ready");
}
