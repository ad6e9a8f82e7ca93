//! Claims about ranks that are lost and started again: every stream goes on behind its last token.

use plait_engine::Timeouts;
use plait_proto::{ExitCode, Fail};
use serde_json::{Value, json};

use crate::fake_worker::{Behavior, Fault};
use crate::harness::Harness;

pub(crate) const LONG: u32 = 40;

/// Streams 1 and 2 of a rank that stops after some steps, on a server that starts ranks again.
fn two_streams_held() -> Harness {
    let mut harness = Harness::alone(&json!({"restarts_ranks": true}), Timeouts::default());
    harness.dial(|_| {});
    harness.wait_for_phase("ready");
    harness.hold(0, 1);
    for (stream, prompt) in [(1, "abc"), (2, "klm")] {
        harness.submit(stream, prompt, &asked());
    }
    harness.wait_until_taken(2);
    harness.hold(0, 12);
    harness.wait_until("the rank has stopped with both under way", |harness| {
        harness.workers[0].log().plans.len() > 12
    });
    harness
}

pub(crate) fn asked() -> Value {
    json!({"max_tokens": LONG, "ignore_eos": true})
}

/// What a stream of so many letters says.
pub(crate) fn letters(first: u8) -> String {
    let letter = |index: u32| {
        char::from(b'a' + u8::try_from((u32::from(first - b'a') + index) % 26).unwrap())
    };
    (0..LONG).map(letter).collect()
}

fn is_down(harness: &Harness) -> bool {
    harness.status()["down"] == true
}

/// The fake rank's fingerprint, as if the launcher had written another configuration.
const OTHER_CONFIG: [u8; 16] = [4; 16];

fn start_again(harness: &mut Harness, behavior: impl FnOnce(&mut Behavior)) {
    harness.wait_until("the replica is down", is_down);
    let endpoint = harness.engine.restart_ranks(0, OTHER_CONFIG).unwrap();
    harness.dial_at(&endpoint, |rank| {
        rank.config = OTHER_CONFIG;
        rank.fault = std::sync::Arc::default();
        behavior(rank);
    });
}

fn assert_all_told(mut harness: Harness) {
    for (stream, first) in [(1, b'd'), (2, b'n')] {
        let answer = harness.answer(stream);
        assert_eq!((answer.error, answer.text()), (None, letters(first)));
        assert_eq!(answer.finish_reason().as_deref(), Some("length"));
    }
    assert_eq!(harness.status()["phase"], "ready");
    assert!(!is_down(&harness));
}

#[test]
fn streams_go_on_with_new_ranks_behind_their_last_token() {
    let mut harness = two_streams_held();
    harness.engine.worker_lost(0, "killed by signal 9");
    start_again(&mut harness, |_| {});
    let told = [1, 2].map(|stream| harness.answer(stream).text());
    assert_eq!(told, [letters(b'd'), letters(b'n')]);
    harness.assert_metrics(&[
        ("plait_rank_losses_total", 1.0),
        ("plait_requests_replayed_total", 2.0),
        ("plait_replica_down", 0.0),
    ]);
    assert_all_told(harness);
}

#[test]
fn any_way_to_lose_a_rank_while_it_serves_is_survived() {
    let out_of_memory = Fail {
        rank: 0,
        code: ExitCode::Hardware,
        reason: "out of memory".to_owned(),
    };
    let faults = [
        Fault::Say(out_of_memory.into()),
        Fault::SayFrames(vec![vec![4], vec![0xC1]]),
        Fault::WrongToken,
    ];
    for fault in faults {
        let mut harness = two_streams_held();
        harness.inject(fault);
        start_again(&mut harness, |_| {});
        assert_all_told(harness);
    }
}

#[test]
fn requests_that_come_meanwhile_wait_and_are_answered() {
    let mut harness = two_streams_held();
    harness.engine.worker_lost(0, "killed by signal 9");
    harness.wait_until("the replica is down", is_down);
    harness.submit(3, "xyz", &asked());
    harness.wait_until_taken(3);
    let reason = harness.status()["reason"].clone();
    assert!(reason.as_str().unwrap().contains("killed by signal 9"));
    start_again(&mut harness, |_| {});
    assert_eq!(harness.answer(3).text(), letters(b'a'));
    assert_all_told(harness);
}

#[test]
fn a_client_that_leaves_meanwhile_is_forgotten() {
    let mut harness = two_streams_held();
    harness.engine.worker_lost(0, "killed by signal 9");
    harness.wait_until("the replica is down", is_down);
    harness.engine.abort(2);
    harness.wait_until_taken(1);
    start_again(&mut harness, |_| {});
    assert_eq!(harness.answer(1).text(), letters(b'd'));
}

#[test]
fn ranks_that_are_lost_while_they_start_again_are_started_once_more() {
    let mut harness = two_streams_held();
    harness.engine.worker_lost(0, "killed by signal 9");
    harness.wait_until("the replica is down", is_down);
    harness.engine.restart_ranks(0, OTHER_CONFIG).unwrap();
    harness.engine.worker_lost(0, "killed again");
    harness.wait_until("it is lost again", |it| it.status()["losses"] == 2);
    start_again(&mut harness, |_| {});
    assert_all_told(harness);
}

#[test]
fn without_new_ranks_the_streams_end_with_the_first_reason() {
    let mut harness = two_streams_held();
    harness.engine.worker_lost(0, "killed by signal 9");
    harness.wait_until("the replica is down", is_down);
    harness.engine.give_up(0, "the restarts are spent");
    assert_eq!(harness.answer(1).error, Some((503, 0)));
    let status = harness.status();
    let told = (&status["phase"], &status["exit_code"], &status["reason"]);
    let reason = "rank 0 was lost: killed by signal 9; the restarts are spent";
    assert_eq!(told, (&"failed".into(), &5.into(), &reason.into()));
}

#[test]
fn streams_do_not_wait_for_ranks_of_which_some_cannot_start() {
    let mut harness = two_streams_held();
    harness.engine.worker_lost(0, "killed by signal 9");
    harness.wait_until("the replica is down", is_down);
    harness.engine.restart_ranks(0, OTHER_CONFIG).unwrap();
    harness
        .engine
        .give_up(0, "its ranks cannot be started again");
    assert_eq!(harness.answer(1).error, Some((503, 0)));
    let status = harness.status();
    let told = (&status["phase"], &status["exit_code"], &status["reason"]);
    let reason = "its ranks cannot be started again";
    assert_eq!(told, (&"failed".into(), &5.into(), &reason.into()));
}

#[test]
fn new_ranks_with_fewer_pages_end_the_streams() {
    let mut harness = two_streams_held();
    harness.engine.worker_lost(0, "killed by signal 9");
    start_again(&mut harness, |rank| rank.num_pages = 63);
    assert_eq!(harness.answer(1).error, Some((503, 0)));
    let status = harness.status();
    assert_eq!(status["exit_code"], 3);
    assert!(status["reason"].as_str().unwrap().contains("[63] pages"));
}

#[test]
fn a_drain_waits_for_the_new_ranks_and_the_streams() {
    let mut harness = two_streams_held();
    harness.engine.worker_lost(0, "killed by signal 9");
    harness.wait_until("the replica is down", is_down);
    harness.engine.drain();
    harness.wait_for_phase("draining");
    start_again(&mut harness, |_| {});
    assert_eq!(harness.answer(1).text(), letters(b'd'));
    harness.wait_for_phase("stopped");
}
