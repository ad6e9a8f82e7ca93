//! What clients read, and what is counted.

use serde_json::json;

use crate::fake_worker::Fault;
use crate::harness::Harness;

/// What the ranks' model says after `prompt`.
fn continuation(prompt: &str, num_tokens: usize) -> String {
    let last = prompt.bytes().last().unwrap() - b'a';
    (1..=num_tokens)
        .map(|step| char::from(b'a' + ((usize::from(last) + step) % 26) as u8))
        .collect()
}

#[test]
fn a_greedy_answer_streams_to_its_end() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.submit(1, "abc", &json!({"max_tokens": 5}));
    let answer = harness.answer(1);
    assert_eq!(answer.text(), "defgh");
    assert_eq!(answer.finish_reason().as_deref(), Some("length"));
    assert!(answer.body.ends_with("data: [DONE]\n\n"));
}

#[test]
fn a_whole_answer_is_one_body_with_usage() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.submit(1, "abc", &json!({"max_tokens": 5, "stream": false}));
    let body: serde_json::Value = serde_json::from_str(&harness.answer(1).body).unwrap();
    assert_eq!(body["choices"][0]["text"], "defgh");
    assert_eq!(body["usage"]["prompt_tokens"], 3);
    assert_eq!(body["usage"]["completion_tokens"], 5);
}

#[test]
fn sixteen_streams_join_while_others_decode_and_none_disturbs_another() {
    let mut harness = Harness::ready(&json!({"long_prefill_token_threshold": 16}), |rank| {
        rank.step = std::time::Duration::from_millis(1);
    });
    let prompts: Vec<String> = (0..16)
        .map(|stream| continuation("z", 1 + 9 * stream))
        .collect();
    for (stream, prompt) in (0..).zip(&prompts) {
        harness.submit(stream, prompt, &json!({"max_tokens": 60}));
        harness.wait_until("it has begun", |harness| {
            harness.metric("plait_generated_tokens_total") >= stream as f64
        });
    }
    for (stream, prompt) in (0..).zip(&prompts) {
        assert_eq!(
            harness.answer(stream).text(),
            continuation(prompt, 60),
            "stream {stream}"
        );
    }
    assert!(harness.metric("plait_steps_total{kind=\"mixed\"}") > 0.0);
}

#[test]
fn several_prompts_are_choices_of_one_stream() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.submit(
        1,
        "",
        &json!({"prompts": ["abc", [120, 121]], "max_tokens": 3, "stream": false}),
    );
    let body: serde_json::Value = serde_json::from_str(&harness.answer(1).body).unwrap();
    assert_eq!(body["choices"][0]["text"], "def");
    assert_eq!(body["choices"][1]["text"], "zab");
}

#[test]
fn the_tokens_of_a_stream_are_told_at_its_end() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    let prompts = json!({"prompts": ["abc", [120, 121]], "max_tokens": 4});
    harness.submit(1, "", &prompts);
    harness.wait_until("its tokens are told", |harness| {
        harness.num_used(1) == Some(3 + 2 + 2 * 4)
    });
}

#[test]
fn the_tokens_of_a_stream_are_told_when_its_client_leaves() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.submit(1, "abc", &json!({"max_tokens": 400}));
    harness.wait_until("it decodes", |harness| {
        harness.metric("plait_generated_tokens_total") >= 2.0
    });
    harness.engine.abort(1);
    harness.wait_until("its tokens are told", |harness| {
        harness.num_used(1).is_some_and(|num| num > 3)
    });
}

#[test]
fn a_stop_string_ends_the_request_on_the_device_too() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.submit(1, "abc", &json!({"max_tokens": 400, "stop": ["gh"]}));
    let answer = harness.answer(1);
    assert_eq!(answer.text(), "def");
    assert_eq!(answer.finish_reason().as_deref(), Some("stop"));
    harness.wait_until("its pages are free", |harness| {
        harness.metric("plait_kv_pages{state=\"leased\"}") == 0.0
    });
    assert!(harness.metric("plait_generated_tokens_total") < 400.0);
    assert_eq!(
        harness.metric("plait_requests_finished_total{reason=\"stop\"}"),
        1.0
    );
}

#[test]
fn an_answer_that_needs_more_pages_than_there_are_left_is_the_same() {
    // A given watermark reserves no pages for expected answers.
    let settings = json!({"page_size": 4, "watermark": 1});
    let mut harness = Harness::ready(&settings, |rank| rank.num_pages = 16);
    harness.hold(0, 1);
    for stream in 0..6 {
        harness.submit(stream, "abc", &json!({"max_tokens": 40}));
    }
    harness.wait_until_taken(6);
    harness.release(0);
    for stream in 0..6 {
        assert_eq!(
            harness.answer(stream).text(),
            continuation("abc", 40),
            "stream {stream}"
        );
    }
    assert!(harness.metric("plait_preemptions_total") > 0.0);
}

#[test]
fn log_probabilities_reach_the_client_that_asked() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.submit(1, "abc", &json!({"max_tokens": 2}));
    harness.submit(
        2,
        "abc",
        &json!({"max_tokens": 2, "logprobs": 1, "stream": false}),
    );
    assert_eq!(harness.answer(1).text(), "de");
    let body: serde_json::Value = serde_json::from_str(&harness.answer(2).body).unwrap();
    assert_eq!(
        body["choices"][0]["logprobs"]["token_logprobs"],
        json!([-100.0, -101.0])
    );
}

#[test]
fn prompt_log_probabilities_cross_chunks() {
    let mut harness = Harness::ready(&json!({"long_prefill_token_threshold": 16}), |_| {});
    let prompt = continuation("z", 40);
    harness.submit(
        1,
        &prompt,
        &json!({"max_tokens": 1, "prompt_logprobs": 0, "stream": false}),
    );
    let body: serde_json::Value = serde_json::from_str(&harness.answer(1).body).unwrap();
    let told = body["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!(told.len(), 40);
    for (byte, record) in prompt.bytes().zip(told).skip(1) {
        assert_eq!(record[byte.to_string()]["logprob"], -f64::from(byte));
    }
}

#[test]
fn missing_log_probabilities_end_the_rank() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.inject(Fault::NoLogprobs);
    harness.submit(1, "abc", &json!({"max_tokens": 2, "logprobs": 1}));
    assert_eq!(harness.answer(1).error, Some((503, 0)));
    assert!(
        harness.status()["reason"]
            .as_str()
            .unwrap()
            .contains("log-probabilities of step 1")
    );
}

#[test]
fn metrics_add_up() {
    let mut harness = Harness::ready(&json!({"long_prefill_token_threshold": 16}), |_| {});
    let prompts: Vec<String> = (1..=8)
        .map(|stream| continuation("z", 10 * stream))
        .collect();
    for (stream, prompt) in (0..).zip(&prompts) {
        harness.submit(stream, prompt, &json!({"max_tokens": 20}));
    }
    for stream in 0..8 {
        harness.answer(stream);
    }
    let num_prompt_tokens: usize = prompts.iter().map(String::len).sum();
    assert_eq!(
        harness.metric("plait_prompt_tokens_total"),
        num_prompt_tokens as f64
    );
    let num_prefilled = harness.metric("plait_step_tokens_total{phase=\"prefill\"}");
    let num_hits = harness.metric("plait_prefix_hit_tokens_total");
    assert_eq!(num_prefilled + num_hits, num_prompt_tokens as f64);
    assert_eq!(harness.metric("plait_generated_tokens_total"), 160.0);
    assert_eq!(
        harness.metric("plait_requests_finished_total{reason=\"length\"}"),
        8.0
    );
    assert_eq!(
        harness.metric("plait_time_to_first_token_seconds_count"),
        8.0
    );
    assert_eq!(harness.metric("plait_inter_token_seconds_count"), 152.0);
    assert_eq!(harness.metric("plait_e2e_seconds_count"), 8.0);
    assert_eq!(harness.metric("plait_queue_seconds_count"), 8.0);
    let kinds = ["prefill", "decode", "mixed"];
    let num_steps: f64 = kinds
        .iter()
        .map(|kind| harness.metric(&format!("plait_steps_total{{kind=\"{kind}\"}}")))
        .sum();
    assert_eq!(harness.status()["step"].as_f64(), Some(num_steps));
    let left = ["free", "cached"].map(|state| format!("plait_kv_pages{{state=\"{state}\"}}"));
    assert_eq!(
        left.iter().map(|name| harness.metric(name)).sum::<f64>(),
        64.0
    );
    assert_eq!(harness.metric("plait_requests_running"), 0.0);
}
