//! Several replicas in one engine: one front door, streams of their own.

use std::time::Duration;

use serde_json::json;

use crate::harness::Harness;

const LONG: &str = "a prompt of a hundred tokens and some more, so that whoever has it has more to do than others, z";

fn slow(num_replicas: u32) -> Harness {
    Harness::replicas(num_replicas, &json!({}), |rank| {
        rank.step = Duration::from_millis(1);
    })
}

/// Two replicas that answer their first steps and then wait for `release`.
fn held() -> Harness {
    let harness = slow(2);
    (0..2).for_each(|rank| harness.hold(rank, 20));
    harness
}

fn of(name: &str, replica: u32) -> String {
    format!("{name}{{replica=\"{replica}\"}}")
}

#[test]
fn requests_are_dealt_out_and_every_answer_is_right() {
    let mut harness = slow(3);
    for stream in 0..9 {
        harness.submit(stream, "abc", &json!({"max_tokens": 20}));
    }
    for stream in 0..9 {
        assert_eq!(harness.answer(stream).text(), "defghijklmnopqrstuvw");
    }
    for replica in 0..3 {
        assert!(harness.metric(&of("plait_prompt_tokens_total", replica)) >= 3.0);
    }
    assert_eq!(harness.status()["ranks"], 3);
    assert_eq!(harness.status()["replicas"].as_array().unwrap().len(), 3);
}

#[test]
fn an_abort_and_a_stop_string_reach_the_replica_that_has_the_stream() {
    let mut harness = slow(2);
    let endless = json!({"max_tokens": 400, "ignore_eos": true});
    harness.submit(1, "abc", &endless);
    harness.submit(2, "abc", &endless);
    harness.submit(3, "abc", &json!({"max_tokens": 400, "stop": ["klm"]}));
    assert_eq!(harness.answer(3).text(), "defghij");
    for replica in [0, 1] {
        harness.wait_until("both work", |harness| {
            harness.metric(&of("plait_generated_tokens_total", replica)) > 2.0
        });
    }
    harness.engine.abort(1);
    harness.engine.abort(2);
    for replica in [0, 1] {
        harness.wait_until("its requests have ended", |harness| {
            harness.metric(&of("plait_requests_running", replica)) == 0.0
        });
    }
}

#[test]
fn a_conversation_stays_where_its_prefix_is() {
    let mut harness = slow(2);
    harness.submit(1, LONG, &json!({"max_tokens": 2}));
    harness.answer(1);
    harness.submit(2, "x", &json!({"max_tokens": 2}));
    harness.answer(2);
    let turn = format!("{LONG} and another turn");
    harness.submit(3, &turn, &json!({"max_tokens": 2}));
    harness.answer(3);
    assert_eq!(
        harness.metric(&of("plait_prefix_hit_tokens_total", 0)),
        96.0
    );
    assert_eq!(harness.metric(&of("plait_prompt_tokens_total", 1)), 1.0);
}

#[test]
fn a_replica_that_fails_takes_its_own_streams_and_no_others() {
    let mut harness = held();
    let endless = json!({"max_tokens": 400, "ignore_eos": true});
    // One after the other: the text threads may overtake each other.
    for (replica, prompt) in [(0, LONG), (1, "abc")] {
        harness.submit(u64::from(replica) + 1, prompt, &endless);
        harness.wait_until("it works", |harness| {
            harness.metric(&of("plait_generated_tokens_total", replica)) > 2.0
        });
    }
    harness
        .engine
        .worker_lost(0, "worker 0 was killed by SIGKILL");
    let lost = harness.answer(1);
    assert_eq!(lost.error, Some((503, 0)));
    assert!(
        lost.message().contains("replica 0 was lost"),
        "{}",
        lost.message()
    );
    harness.release(1);
    let answer = harness.answer(2);
    assert_eq!((answer.text().len(), answer.error), (400, None));
    let status = harness.status();
    assert_eq!(
        (&status["phase"], &status["exit_code"]),
        (&"ready".into(), &0.into())
    );
    assert_eq!(status["replicas"][0]["phase"], "failed");
    let reason = status["replicas"][0]["reason"].as_str().unwrap();
    assert!(
        reason.contains("rank 0 was lost: worker 0 was killed"),
        "{reason}"
    );
    assert!(harness.workers[1].log().refusal.is_none());
    for stream in 3..7 {
        harness.submit(stream, "abc", &json!({"max_tokens": 3}));
        assert_eq!(harness.answer(stream).text(), "def");
    }
    harness.engine.drain();
    harness.wait_for_phase("stopped");
    assert!(harness.workers[1].log().was_drained);
}

#[test]
fn with_none_left_the_engine_fails_and_names_all() {
    let mut harness = slow(2);
    harness.engine.worker_lost(1, "killed by signal 9");
    harness.wait_until("one is lost", |harness| {
        harness.status()["replicas"][1]["phase"] == "failed"
    });
    harness.engine.worker_lost(0, "killed by signal 9");
    harness.wait_for_phase("failed");
    let status = harness.status();
    assert_eq!(status["exit_code"], 5);
    assert_eq!(
        status["reason"],
        "replica 0: rank 0 was lost: killed by signal 9; replica 1: rank 1 was lost: killed by signal 9"
    );
    harness.submit(1, "abc", &json!({}));
    assert_eq!(harness.answer(1).error, Some((503, 0)));
}

#[test]
fn a_replica_that_fails_before_it_is_ready_ends_the_start() {
    let mut harness = Harness::alone(
        &json!({"num_replicas": 2}),
        plait_engine::Timeouts::default(),
    );
    harness.dial_to(0, |rank| rank.world = 2);
    harness.engine.worker_lost(1, "exited with code 3");
    harness.wait_for_phase("failed");
    assert_eq!(
        harness.status()["reason"],
        "replica 1: rank 1 was lost: exited with code 3"
    );
}

#[test]
fn a_drain_lets_every_replica_finish() {
    let mut harness = slow(2);
    let endless = json!({"max_tokens": 200, "ignore_eos": true});
    for stream in 1..=4 {
        harness.submit(stream, "abc", &endless);
    }
    for replica in [0, 1] {
        harness.wait_until("both work", |harness| {
            harness.metric(&of("plait_generated_tokens_total", replica)) > 2.0
        });
    }
    harness.engine.drain();
    harness.submit(5, "abc", &json!({}));
    assert_eq!(harness.answer(5).error, Some((503, 0)));
    for stream in 1..=4 {
        assert_eq!(harness.answer(stream).text().len(), 200);
    }
    harness.wait_for_phase("stopped");
    assert!(harness.workers.iter().all(|rank| rank.log().was_drained));
}

#[test]
fn a_replica_that_is_lost_while_all_drain_leaves_the_other_to_finish() {
    let mut harness = held();
    let endless = json!({"max_tokens": 200, "ignore_eos": true});
    for (replica, prompt) in [(0, LONG), (1, "abc")] {
        harness.submit(u64::from(replica) + 1, prompt, &endless);
        harness.wait_until("it works", |harness| {
            harness.metric(&of("plait_generated_tokens_total", replica)) > 2.0
        });
    }
    harness.engine.drain();
    harness.wait_for_phase("draining");
    harness.engine.worker_lost(0, "killed by signal 9");
    assert_eq!(harness.answer(1).error, Some((503, 0)));
    harness.release(1);
    assert_eq!(harness.answer(2).text().len(), 200);
    harness.wait_for_phase("stopped");
    let status = harness.status();
    assert_eq!(status["replicas"][0]["phase"], "failed");
    assert!(harness.workers[1].log().was_drained);
}

#[test]
fn the_ranks_of_a_replica_are_numbered_after_those_before_it() {
    let change = json!({"num_replicas": 2, "num_ranks": 2});
    let mut harness = Harness::alone(&change, plait_engine::Timeouts::default());
    for rank in 0..4 {
        harness.dial_to(rank / 2, |behavior| {
            (behavior.rank, behavior.world, behavior.answers) = (rank, 4, rank % 2 == 0);
            behavior.fault = std::sync::Arc::default();
        });
    }
    harness.wait_for_phase("ready");
    let welcomed: Vec<(u32, u32)> = harness
        .workers
        .iter()
        .map(|rank| rank.log().welcome.unwrap())
        .map(|welcome| (welcome.replica, welcome.num_replicas))
        .collect();
    assert_eq!(welcomed, [(0, 2), (0, 2), (1, 2), (1, 2)]);
    for stream in 0..4 {
        harness.submit(stream, "abc", &json!({"max_tokens": 5}));
        assert_eq!(harness.answer(stream).text(), "defgh");
    }
    harness.engine.worker_lost(3, "killed by signal 9");
    harness.wait_until("its replica is lost", |harness| {
        harness.status()["replicas"][1]["phase"] == "failed"
    });
    harness.wait_until("the replica's other rank is told", |harness| {
        harness.workers[2].log().refusal.is_some()
    });
    harness.submit(9, "abc", &json!({"max_tokens": 5}));
    assert_eq!(harness.answer(9).text(), "defgh");
}

#[test]
fn a_rank_of_another_replica_is_no_peer_of_a_link() {
    let mut harness = Harness::alone(
        &json!({"num_replicas": 2}),
        plait_engine::Timeouts::default(),
    );
    harness.dial_to(0, |rank| (rank.rank, rank.world) = (1, 2));
    harness.wait_until("it is counted", |harness| {
        harness.metric(&of("plait_link_malformed_total", 0)) >= 1.0
    });
    assert_eq!(harness.status()["phase"], "loading");
}

#[test]
fn a_late_replica_gets_requests_only_for_want_of_others() {
    let mut harness = Harness::replicas(2, &json!({}), |rank| {
        rank.heartbeats = rank.rank == 1;
    });
    harness.wait_until("its heartbeat is late", |harness| {
        harness.status()["replicas"][0]["late"] == true
    });
    assert_eq!(harness.status()["late"], false);
    for stream in 0..4 {
        harness.submit(stream, "abc", &json!({"max_tokens": 3}));
        assert_eq!(harness.answer(stream).text(), "def");
    }
    assert_eq!(harness.metric(&of("plait_prompt_tokens_total", 0)), 0.0);
    harness.engine.worker_lost(1, "killed by signal 9");
    harness.wait_until("it is lost", |harness| {
        harness.status()["replicas"][1]["phase"] == "failed"
    });
    harness.submit(9, "abc", &json!({"max_tokens": 3}));
    assert_eq!(harness.answer(9).text(), "def");
}
