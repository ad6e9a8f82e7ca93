//! Several answers to one prompt, from the request to the ranks and back.

use serde_json::{Value, json};

use crate::harness::{Answer, Harness};

const PROMPT: &str =
    "a prompt of a hundred tokens and some more, whose full pages all of its choices share, z";

/// The text of each choice of a stream.
fn texts(answer: &Answer, num_choices: u64) -> Vec<String> {
    let chunks = answer.chunks();
    let of_choice = |index: u64| {
        let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
        let own = choices.filter(|choice| choice["index"] == index);
        own.filter_map(|choice| choice["text"].as_str()).collect()
    };
    (0..num_choices).map(of_choice).collect()
}

fn asked(n: u32) -> Value {
    json!({"n": n, "max_tokens": 3, "include_usage": true, "prompt_tokens_details": true})
}

#[test]
fn a_prompt_is_computed_once_for_all_choices_with_a_prefix_cache_and_without() {
    for prefix_cache in [true, false] {
        let mut harness = Harness::ready(&json!({"prefix_cache": prefix_cache}), |_| {});
        let num_before = harness.metric("plait_step_tokens_total{phase=\"prefill\"}");
        harness.submit(1, PROMPT, &asked(4));
        let answer = harness.answer(1);
        assert_eq!(texts(&answer, 4), ["abc"; 4]);
        let num_after = harness.metric("plait_step_tokens_total{phase=\"prefill\"}");
        let (num_prompt, tail) = (PROMPT.len() as f64, (PROMPT.len() % 16) as f64);
        assert_eq!(num_after - num_before, num_prompt + 3.0 * tail);
        let usage = &answer.chunks().pop().unwrap()["usage"];
        assert_eq!(usage["prompt_tokens"], PROMPT.len());
        assert_eq!(usage["completion_tokens"], 12);
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
        harness.assert_metrics(&[
            ("plait_prompt_tokens_total", num_prompt),
            ("plait_further_choices_total", 3.0),
            ("plait_prefix_hit_tokens_total", 0.0),
            ("plait_requests_finished_total{reason=\"length\"}", 4.0),
        ]);
    }
}

#[test]
fn a_client_that_leaves_ends_all_choices() {
    let mut harness = Harness::ready(&json!({"prefix_cache": false}), |_| {});
    harness.hold(0, 6);
    harness.submit(1, PROMPT, &json!({"n": 5, "max_tokens": 30}));
    harness.wait_until("all choices run", |harness| {
        harness.metric("plait_requests_running") == 5.0
    });
    harness.engine.abort(1);
    harness.release(0);
    harness.wait_until("all have ended and their pages are free", |harness| {
        let pages = ["leased", "parked", "cached"]
            .map(|state| harness.metric(&format!("plait_kv_pages{{state=\"{state}\"}}")));
        harness.metric("plait_requests_running") == 0.0 && pages == [0.0; 3]
    });
    let aborted = "plait_requests_finished_total{reason=\"abort\"}";
    assert_eq!(harness.metric(aborted), 5.0);
}

#[test]
fn the_choices_of_a_call_go_to_one_replica() {
    let mut harness = Harness::replicas(2, &json!({}), |_| {});
    harness.submit(1, PROMPT, &asked(6));
    assert_eq!(texts(&harness.answer(1), 6), ["abc"; 6]);
    let of = |harness: &Harness, replica: u32| {
        harness.metric(&format!(
            "plait_generated_tokens_total{{replica=\"{replica}\"}}"
        ))
    };
    assert_eq!([of(&harness, 0), of(&harness, 1)], [18.0, 0.0]);
}

#[test]
fn a_call_with_more_choices_than_the_queue_has_room_for_is_refused_whole() {
    let mut harness = Harness::ready(&json!({"max_seqs": 1, "max_queue": 3}), |_| {});
    harness.hold(0, 20);
    harness.submit(1, "abc", &json!({"max_tokens": 200}));
    harness.wait_until("one runs", |harness| {
        harness.metric("plait_requests_running") == 1.0
    });
    harness.submit(2, "abc", &json!({"max_tokens": 2}));
    harness.wait_until("one waits", |harness| {
        harness.metric("plait_requests_waiting") == 1.0
    });
    harness.submit(3, "abc", &json!({"n": 3, "max_tokens": 2}));
    assert_eq!(harness.answer(3).error.map(|it| it.0), Some(429));
    harness.submit(4, "abc", &json!({"n": 2, "max_tokens": 2}));
    harness.wait_until("three wait", |harness| {
        harness.metric("plait_requests_waiting") == 3.0
    });
    harness.engine.abort(1);
    harness.release(0);
    assert_eq!(texts(&harness.answer(4), 2), ["de"; 2]);
}
