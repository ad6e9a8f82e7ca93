//! Claims about streams of a replica that lost its ranks: they go on in another one, and wait for nobody.

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{CONFIG, Harness};
use crate::recovery::{LONG, asked, letters};

fn of(name: &str, replica: u32) -> String {
    format!("{name}{{replica=\"{replica}\"}}")
}

/// Two replicas that answer their first steps and then wait for `release`, with stream 1 under way in the first and
/// stream 2 in the second, which has a page less: memory is never free to the same byte.
fn both_held(first: &Value) -> Harness {
    let mut harness = Harness::replicas(2, &json!({"restarts_ranks": true}), |rank| {
        rank.step = Duration::from_millis(1);
        rank.num_pages -= rank.rank;
    });
    (0..2).for_each(|rank| harness.hold(rank, 12));
    for (replica, prompt, asked) in [(0, "abc", first), (1, "klm", &asked())] {
        harness.submit(u64::from(replica) + 1, prompt, asked);
        harness.wait_until("it works", |harness| {
            harness.metric(&of("plait_generated_tokens_total", replica)) > 2.0
        });
    }
    harness
}

fn lose(harness: &mut Harness, replica: u32) {
    harness.engine.worker_lost(replica, "killed by signal 9");
    harness.wait_until("the replica is down", |harness| {
        harness.metric(&of("plait_replica_down", replica)) == 1.0
    });
}

fn start_again(harness: &mut Harness, replica: u32) {
    let endpoint = harness.engine.restart_ranks(replica, CONFIG).unwrap();
    harness.dial_at(&endpoint, |rank| {
        (rank.rank, rank.world) = (replica, 2);
        rank.fault = std::sync::Arc::default();
    });
}

fn assert_told(harness: &mut Harness, stream: u64, first: u8) {
    let answer = harness.answer(stream);
    assert_eq!((answer.error, answer.text()), (None, letters(first)));
    assert_eq!(answer.finish_reason().as_deref(), Some("length"));
}

fn wait_for_pages(harness: &mut Harness, replica: u32) {
    harness.wait_until("no request holds a page", |harness| {
        let pages = ["leased", "parked"].map(|state| {
            let name = format!("plait_kv_pages{{replica=\"{replica}\",state=\"{state}\"}}");
            harness.metric(&name)
        });
        pages == [0.0; 2]
    });
}

#[test]
fn streams_go_on_in_another_replica_without_new_ranks() {
    let mut harness = both_held(&asked());
    lose(&mut harness, 0);
    harness.release(1);
    assert_told(&mut harness, 1, b'd');
    assert_told(&mut harness, 2, b'n');
    assert_eq!(harness.num_used(1), Some(3 + u64::from(LONG)));
    harness.assert_metrics(&[
        (&of("plait_requests_moved_total", 0), 1.0),
        (&of("plait_requests_moved_total", 1), 0.0),
        (&of("plait_requests_waiting", 0), 0.0),
        (&of("plait_replica_down", 0), 1.0),
    ]);
    wait_for_pages(&mut harness, 1);
    start_again(&mut harness, 0);
    harness.wait_until("it is back", |it| {
        it.metric(&of("plait_replica_down", 0)) == 0.0
    });
    for stream in 3..7 {
        harness.submit(stream, "abc", &json!({"max_tokens": 3}));
        assert_eq!(harness.answer(stream).text(), "def");
    }
}

#[test]
fn choices_masks_and_logprobs_go_with_them() {
    let mut first = asked();
    first["n"] = 3.into();
    first["logprobs"] = 2.into();
    first["constraint"] = json!({
        "param": "structured_outputs.regex", "constraint": "regex", "text": "[a-z]+",
    });
    let mut harness = both_held(&first);
    lose(&mut harness, 0);
    harness.release(1);
    let chunks = harness.answer(1).chunks();
    for index in 0..3 {
        let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
        let own: Vec<&Value> = choices.filter(|it| it["index"] == index).collect();
        let text: String = own.iter().filter_map(|it| it["text"].as_str()).collect();
        let tokens = own
            .iter()
            .filter_map(|it| it["logprobs"]["tokens"].as_array());
        let num_told: usize = tokens.map(Vec::len).sum();
        assert_eq!((text, num_told), (letters(b'd'), LONG as usize));
        let ends = own.iter().filter(|it| it["finish_reason"] == "length");
        assert_eq!(ends.count(), 1);
    }
    harness.assert_metrics(&[(&of("plait_requests_moved_total", 0), 3.0)]);
    assert_told(&mut harness, 2, b'n');
}

#[test]
fn a_choice_that_a_stop_string_has_ended_stays_ended() {
    let mut first = asked();
    first["prompts"] = json!(["abc", "qrs"]);
    first["stop"] = json!(["xyz"]);
    let mut harness = both_held(&first);
    harness.wait_until("one choice has ended", |harness| {
        harness.metric(&of("plait_requests_running", 0)) == 1.0
    });
    lose(&mut harness, 0);
    harness.release(1);
    let chunks = harness.answer(1).chunks();
    for (index, right) in ["defghijklmnopqrstuvw", "tuvw"].into_iter().enumerate() {
        let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
        let own = choices.filter(|it| it["index"] == index);
        let ends = own.clone().filter(|it| it["finish_reason"] == "stop");
        let text: String = own.filter_map(|it| it["text"].as_str()).collect();
        assert_eq!((text.as_str(), ends.count()), (right, 1));
    }
    assert_told(&mut harness, 2, b'n');
    wait_for_pages(&mut harness, 1);
}

#[test]
fn a_client_that_leaves_is_forgotten_wherever_its_stream_is() {
    for leaves_first in [true, false] {
        let mut harness = both_held(&asked());
        if leaves_first {
            harness.engine.worker_lost(0, "killed by signal 9");
        } else {
            lose(&mut harness, 0);
        }
        harness.engine.abort(1);
        harness.release(1);
        assert_told(&mut harness, 2, b'n');
        harness.wait_until("both have nothing", |harness| {
            let waits = [0, 1].map(|it| {
                harness.metric(&of("plait_requests_waiting", it))
                    + harness.metric(&of("plait_requests_running", it))
            });
            waits == [0.0; 2]
        });
        harness.wait_until("its tokens are told", |it| it.num_used(1).is_some());
        assert!(harness.so_far(1).text().len() < LONG as usize);
    }
}

#[test]
fn an_operator_ends_a_stream_wherever_it_is_and_its_client_reads_that() {
    for round in 0..6 {
        let mut harness = both_held(&asked());
        if round % 2 == 0 {
            harness.engine.worker_lost(0, "killed by signal 9");
        } else {
            lose(&mut harness, 0);
        }
        harness.engine.end_stream(1);
        let ended = harness.answer(1);
        assert_eq!(ended.error, Some((410, 0)));
        assert!(ended.text().len() < LONG as usize);
        harness.wait_until("its tokens are told", |it| it.num_used(1).is_some());
        harness.release(1);
        assert_told(&mut harness, 2, b'n');
        wait_for_pages(&mut harness, 1);
    }
}

#[test]
fn a_drain_waits_for_streams_that_move_and_not_for_ranks() {
    let mut harness = both_held(&asked());
    harness.engine.worker_lost(0, "killed by signal 9");
    harness.engine.drain();
    harness.wait_until("it is down or has moved its stream", |harness| {
        harness.metric(&of("plait_requests_moved_total", 0)) == 1.0
    });
    harness.release(1);
    assert_told(&mut harness, 1, b'd');
    assert_told(&mut harness, 2, b'n');
    harness.wait_for_phase("stopped");
}

#[test]
fn without_another_replica_they_wait_and_go_to_the_first_that_is_back() {
    let mut harness = both_held(&asked());
    lose(&mut harness, 1);
    harness.assert_metrics(&[(&of("plait_requests_moved_total", 1), 1.0)]);
    lose(&mut harness, 0);
    harness.submit(3, "abc", &asked());
    start_again(&mut harness, 1);
    assert_told(&mut harness, 1, b'd');
    assert_told(&mut harness, 2, b'n');
    assert_told(&mut harness, 3, b'd');
    harness.assert_metrics(&[(&of("plait_replica_down", 0), 1.0)]);
}

#[test]
fn a_stream_that_fits_no_other_replica_waits_for_its_own() {
    let mut harness = Harness::replicas(2, &json!({"restarts_ranks": true}), |rank| {
        rank.step = Duration::from_millis(1);
        rank.num_pages = [64, 2][rank.rank as usize];
    });
    harness.hold(0, 12);
    harness.submit(1, "abc", &asked());
    harness.wait_until("it works", |harness| {
        harness.metric(&of("plait_generated_tokens_total", 0)) > 2.0
    });
    lose(&mut harness, 0);
    harness.submit(2, "klm", &json!({"max_tokens": 3}));
    assert_eq!(harness.answer(2).text(), "nop");
    harness.assert_metrics(&[(&of("plait_requests_moved_total", 0), 0.0)]);
    start_again(&mut harness, 0);
    assert_told(&mut harness, 1, b'd');
}

#[test]
fn a_request_that_takes_two_replicas_down_is_refused_and_the_others_go_on() {
    let mut harness = both_held(&asked());
    lose(&mut harness, 0);
    harness.wait_until("the second replica has both", |harness| {
        let taken = ["running", "waiting"]
            .map(|state| harness.metric(&of(&format!("plait_requests_{state}"), 1)));
        taken.iter().sum::<f64>() == 2.0
    });
    // The suspect runs alone in the second replica, which answers what was in flight and then waits.
    harness.hold(1, 14);
    harness.wait_until("the suspect is in flight", |harness| {
        harness.metric(&of("plait_requests_running", 1)) == 2.0
            && harness.workers[1].log().plans.len() > 14
    });
    lose(&mut harness, 1);
    let refused = harness.answer(1);
    assert!(refused.body.contains("took_workers_down"), "{refused:?}");
    start_again(&mut harness, 0);
    assert_told(&mut harness, 2, b'n');
}

#[test]
fn a_replica_that_gets_no_new_ranks_takes_no_stream_with_it() {
    let mut harness = both_held(&asked());
    lose(&mut harness, 0);
    harness.engine.give_up(0, "the restarts are spent");
    harness.wait_until("it has failed", |harness| {
        harness.status()["replicas"][0]["phase"] == "failed"
    });
    harness.release(1);
    assert_told(&mut harness, 1, b'd');
    assert_told(&mut harness, 2, b'n');
}

#[test]
fn a_replica_that_is_given_up_at_once_takes_no_constrained_stream_with_it() {
    let mut first = asked();
    first["constraint"] = json!({
        "param": "structured_outputs.regex", "constraint": "regex", "text": "[a-z]+",
    });
    for _ in 0..2 {
        let mut harness = both_held(&first);
        harness.engine.worker_lost(0, "killed by signal 9");
        harness.wait_until("the replica is down", |harness| {
            harness.status()["replicas"][0]["losses"] == 1
        });
        harness.engine.give_up(0, "the restarts are spent");
        harness.release(1);
        assert_told(&mut harness, 1, b'd');
        assert_told(&mut harness, 2, b'n');
        harness.wait_until("it has failed", |harness| {
            harness.status()["replicas"][0]["phase"] == "failed"
        });
    }
}

#[test]
fn the_last_replica_ends_the_streams_that_came_to_it() {
    let mut harness = both_held(&asked());
    lose(&mut harness, 0);
    harness.engine.give_up(0, "the restarts are spent");
    lose(&mut harness, 1);
    harness.engine.give_up(1, "the restarts are spent");
    for stream in [1, 2] {
        assert_eq!(harness.answer(stream).error, Some((503, 0)));
    }
    harness.wait_for_phase("failed");
    for replica in 0..2 {
        wait_for_pages(&mut harness, replica);
        harness.assert_metrics(&[
            (&of("plait_requests_running", replica), 0.0),
            (&of("plait_requests_waiting", replica), 0.0),
        ]);
    }
}
