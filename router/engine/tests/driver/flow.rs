//! Plans in flight, aborts, queues, the end.

use std::time::Duration;

use plait_engine::Timeouts;
use plait_proto::PageKind;
use serde_json::json;

use crate::harness::Harness;

#[test]
fn overlap_keeps_two_plans_in_flight_and_never_three() {
    for (overlap, most) in [(true, 2), (false, 1)] {
        let mut harness = Harness::ready(&json!({"overlap": overlap}), |rank| {
            rank.step = Duration::from_millis(2);
        });
        for stream in 0..4 {
            harness.submit(stream, "abc", &json!({"max_tokens": 30}));
        }
        for stream in 0..4 {
            harness.answer(stream);
        }
        let log = harness.workers[0].log();
        assert_eq!(log.most_in_flight, most);
        assert_eq!(log.welcome.unwrap().credit as usize, most);
    }
}

#[test]
fn drafts_reach_the_rank_and_their_tokens_come_back() {
    let change = json!({"draft_tokens": 2, "page_size": 1, "max_batch_tokens": 48});
    let mut harness = Harness::ready(&change, |_| {});
    for stream in 0..4 {
        harness.submit(stream, "abc", &json!({"max_tokens": 9}));
    }
    for stream in 0..4 {
        assert_eq!(harness.answer(stream).text(), "defghijkl");
    }
    let plans = harness.workers[0].log().plans;
    let lengths = plans
        .iter()
        .flat_map(|plan| &plan.decode)
        .map(|row| row.length);
    assert!(lengths.clone().any(|length| length == 3) && lengths.max() == Some(3));
    assert!(plans.iter().any(|plan| !plan.trimmed_slots.is_empty()));
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.submit(1, "abc", &json!({"max_tokens": 9}));
    assert_eq!(harness.answer(1).text(), "defghijkl");
    for plan in harness.workers[0].log().plans {
        assert!(plan.decode.iter().all(|row| row.length == 1) && plan.trimmed_slots.is_empty());
    }
}

#[test]
fn a_rank_of_two_page_kinds_gets_pages_of_each() {
    let kind = |num_pages| PageKind {
        page_size: 4,
        num_pages,
        page_bytes: 512,
    };
    let mut harness = Harness::alone(&json!({"num_ranks": 2}), Timeouts::default());
    for (rank, num_pages) in [(0, 40), (1, 30)] {
        harness.dial(|it| {
            (it.rank, it.world, it.other_kinds) = (rank, 2, vec![kind(num_pages)]);
            it.answers = rank == 0;
        });
    }
    harness.wait_for_phase("ready");
    harness.submit(1, "abcabcabc", &json!({"max_tokens": 9}));
    assert_eq!(harness.answer(1).text(), "defghijkl");
    let log = harness.workers[0].log();
    assert_eq!(log.welcome.unwrap().other_kinds, [kind(30)]);
    assert_eq!(
        log.plans[0].other_pages.len(),
        1,
        "the warm-up has a page of each"
    );
    let pages = log.plans[1..].iter().flat_map(|plan| &plan.other_pages);
    let num_tokens = 9 + 8_usize;
    assert_eq!(pages.clone().count(), num_tokens.div_ceil(4));
    assert!(pages.clone().all(|page| page.kind == 1 && page.page < 30));
    let num_plans = log.plans.len();
    harness.wait_until("the other rank has the plans", |harness| {
        harness.workers[1].log().plans.len() >= num_plans
    });
    assert_eq!(log.plans, harness.workers[1].log().plans[..num_plans]);
}

#[test]
fn under_a_target_the_next_step_is_decided_shortly_before_the_last_should_end() {
    for (target, said_micros, num_in_flight) in [
        (json!(1000), 60_000_000, 1), // an end that never comes near: the result is there first
        (json!(1000), 1, 2),
        (json!(null), 60_000_000, 2),
    ] {
        let mut harness = Harness::ready(&json!({"itl_target_ms": target}), |rank| {
            rank.step = Duration::from_millis(5);
            rank.said_micros = said_micros;
        });
        harness.submit(1, "abc", &json!({"max_tokens": 60}));
        harness.answer(1);
        let log = harness.workers[0].log();
        let learned = &log.num_in_flight[30..55];
        assert!(learned.contains(&num_in_flight), "{log:?}");
        assert_eq!(learned.iter().max(), Some(&num_in_flight), "{log:?}");
    }
}

#[test]
fn under_a_target_that_decoding_alone_misses_prefill_lives_on_grants() {
    for (target, is_starved) in [(json!(null), false), (json!(0.5), true)] {
        let mut harness = Harness::ready(&json!({"itl_target_ms": target}), |rank| {
            rank.step = Duration::from_millis(2);
        });
        // The warm-up step and nine tokens: the second request meets a rank that waits.
        harness.hold(0, 1 + 9);
        harness.submit(1, "abc", &json!({"max_tokens": 200}));
        harness.wait_until("it decodes", |harness| {
            harness.metric("plait_generated_tokens_total") >= 9.0
        });
        harness.submit(2, &"abc".repeat(16), &json!({"max_tokens": 2}));
        harness.wait_until_taken(2);
        harness.release(0);
        harness.answer(2);
        let num_grants = harness.metric("plait_starvation_grants_total");
        assert_eq!(num_grants > 0.0, is_starved, "{num_grants} grants");
    }
}

#[test]
fn an_aborted_requests_pages_are_free_when_the_steps_in_flight_are_in() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.hold(0, 4);
    harness.submit(1, "abc", &json!({"max_tokens": 400}));
    let num_plans = 4 + 2;
    harness.wait_until("it decodes, with two steps in flight", |harness| {
        harness.workers[0].log().plans.len() == num_plans
    });
    harness.engine.abort(1);
    harness.wait_until("it has ended", |harness| {
        harness.metric("plait_requests_running") == 0.0
    });
    harness.release(0);
    harness.wait_until("its pages are free", |harness| {
        harness.metric("plait_kv_pages{state=\"leased\"}") == 0.0
            && harness.metric("plait_kv_pages{state=\"parked\"}") == 0.0
    });
    assert_eq!(harness.workers[0].log().plans.len(), num_plans);
    assert_eq!(
        harness.metric("plait_requests_finished_total{reason=\"abort\"}"),
        1.0
    );
    assert!(
        !harness.so_far(1).is_over,
        "nobody reads the end of an aborted stream"
    );
}

#[test]
fn aborting_what_is_unknown_or_over_is_fine() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.submit(1, "abc", &json!({"max_tokens": 2}));
    harness.answer(1);
    harness.engine.abort(1);
    harness.engine.abort(77);
    harness.submit(2, "abc", &json!({"max_tokens": 2}));
    assert_eq!(harness.answer(2).text(), "de");
}

#[test]
fn a_full_queue_answers_429_with_retry_after() {
    let mut harness = Harness::ready(&json!({"max_seqs": 1, "max_queue": 2}), |_| {});
    harness.hold(0, 1);
    for stream in 0..20 {
        harness.submit(stream, "abc", &json!({"max_tokens": 50}));
    }
    harness.wait_until("all are taken or refused", |harness| {
        let count = |name: &str| harness.metric(&format!("plait_requests_{name}"));
        let refused = count("rejected_total{reason=\"queue_full\"}");
        count("running") + count("waiting") + refused == 20.0
    });
    harness.release(0);
    let answers: Vec<_> = (0..20).map(|stream| harness.answer(stream)).collect();
    let refused: Vec<_> = answers
        .iter()
        .filter(|answer| answer.error.is_some())
        .collect();
    assert!(refused.iter().all(|answer| answer.error == Some((429, 1))));
    assert!(
        refused
            .iter()
            .all(|answer| answer.message().contains("the queue is full"))
    );
    // Two wait; one runs, if it was taken from the queue before the others came.
    assert!((17..=18).contains(&refused.len()), "{}", refused.len());
    assert_eq!(
        harness.metric("plait_requests_rejected_total{reason=\"queue_full\"}"),
        refused.len() as f64
    );
}

#[test]
fn a_stream_whose_last_choice_does_not_fit_is_refused_whole() {
    let mut harness = Harness::ready(&json!({"max_seqs": 1, "max_queue": 2}), |_| {});
    harness.hold(0, 20);
    harness.submit(1, "abc", &json!({"max_tokens": 200}));
    harness.wait_until("one runs", |harness| {
        harness.metric("plait_requests_running") == 1.0
    });
    harness.submit(2, "abc", &json!({"max_tokens": 2}));
    harness.wait_until("one waits", |harness| {
        harness.metric("plait_requests_waiting") == 1.0
    });
    harness.submit(
        3,
        "",
        &json!({"prompts": ["abc", "abc", "abc"], "max_tokens": 2}),
    );
    assert_eq!(harness.answer(3).error, Some((429, 1)));
    harness.engine.abort(1);
    harness.release(0);
    assert_eq!(harness.answer(2).text(), "de");
    assert_eq!(harness.metric("plait_requests_waiting"), 0.0);
    harness.assert_metrics(&[
        ("plait_requests_rejected_total{reason=\"queue_full\"}", 1.0),
        ("plait_requests_finished_total{reason=\"abort\"}", 1.0),
        ("plait_requests_finished_total{reason=\"length\"}", 1.0),
        ("plait_prompt_tokens_total", 6.0),
    ]);
}

#[test]
fn an_empty_queue_takes_any_one_requests_choices() {
    let mut harness = Harness::ready(&json!({"max_seqs": 1, "max_queue": 2}), |_| {});
    let prompts = ["abc"; 5];
    harness.submit(1, "", &json!({"prompts": prompts, "max_tokens": 2}));
    let ends = harness.answer(1).chunks();
    let ends = ends
        .iter()
        .filter(|it| it["choices"][0]["finish_reason"] == "length");
    assert_eq!(ends.count(), 5);
}

#[test]
fn the_usage_says_what_the_prefix_cache_had() {
    let prompt = "a".repeat(40);
    for (prefix_cache, num_cached) in [(true, 32), (false, 0)] {
        let mut harness = Harness::ready(&json!({"prefix_cache": prefix_cache}), |_| {});
        let cached = |harness: &mut Harness, stream, change| {
            harness.submit(stream, &prompt, &change);
            let last = harness.answer(stream).chunks().pop().unwrap();
            last["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
        };
        let asks = json!({"max_tokens": 2, "include_usage": true, "prompt_tokens_details": true});
        assert_eq!(cached(&mut harness, 1, asks.clone()), Some(0));
        assert_eq!(cached(&mut harness, 2, asks.clone()), Some(num_cached));
        let mut other = asks.clone();
        other["salt"] = json!(5);
        assert_eq!(cached(&mut harness, 3, other), Some(0), "of another salt");
        let hits = harness.metric("plait_prefix_hit_tokens_total");
        assert_eq!(hits, num_cached as f64);
    }
}

#[test]
fn a_priority_is_refused_where_nobody_would_look_at_it() {
    let refused = Some((400, 0));
    for (policy, error) in [
        ("fcfs", refused),
        ("cache-aware", refused),
        ("priority", None),
        ("fair", None),
    ] {
        let mut harness = Harness::ready(&json!({"policy": policy}), |_| {});
        harness.submit(1, "abc", &json!({"max_tokens": 2, "priority": -3}));
        let answer = harness.answer(1);
        assert_eq!(answer.error, error, "{policy}");
        assert!(error.is_none() || answer.message().contains("--policy priority"));
    }
}

#[test]
fn fair_share_lets_the_tenant_that_was_served_less_go_first() {
    let mut harness = Harness::ready(&json!({"policy": "fair", "max_seqs": 1}), |_| {});
    harness.hold(0, 10);
    for stream in 0..6 {
        harness.submit(stream, "abc", &json!({"max_tokens": 20, "tenant": 1}));
    }
    harness.wait_until_taken(6);
    harness.submit(6, "abc", &json!({"max_tokens": 2, "tenant": 2}));
    harness.wait_until_taken(7);
    harness.release(0);
    harness.answer(5);
    let ended = harness.ended();
    let place = |stream| ended.iter().position(|it| *it == stream);
    assert!(place(6) < place(5), "{ended:?}");
}

#[test]
fn a_broken_request_is_a_400_that_says_why() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.engine.submit(1, 0, b"{\"kind\":");
    assert_eq!(harness.answer(1).error, Some((400, 0)));
    harness.submit(2, &"a".repeat(600), &json!({"max_tokens": 2}));
    let answer = harness.answer(2);
    assert_eq!(answer.error, Some((400, 0)));
    assert!(answer.message().contains("512"), "{}", answer.message());
    assert_eq!(
        harness.metric("plait_requests_rejected_total{reason=\"too_long\"}"),
        1.0
    );
}

#[test]
fn a_drain_finishes_what_is_under_way_and_takes_nothing_new() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.hold(0, 20);
    harness.submit(1, "abc", &json!({"max_tokens": 40}));
    harness.wait_until("it decodes", |harness| {
        harness.metric("plait_generated_tokens_total") >= 1.0
    });
    harness.engine.drain();
    harness.submit(2, "abc", &json!({"max_tokens": 2}));
    assert_eq!(harness.answer(2).error, Some((503, 0)));
    harness.release(0);
    assert_eq!(harness.answer(1).text().len(), 40);
    harness.wait_for_phase("stopped");
    assert!(harness.workers[0].log().was_drained);
    assert_eq!(harness.status()["exit_code"], 0);
}

#[test]
fn a_drain_before_anyone_has_joined_stops_at_once() {
    let mut harness = Harness::alone(&json!({}), Timeouts::default());
    harness.engine.drain();
    harness.wait_for_phase("stopped");
}

#[test]
fn the_pool_is_as_large_as_the_smallest_rank_and_all_ranks_warm_up() {
    let mut harness = Harness::alone(&json!({"num_ranks": 2}), Timeouts::default());
    harness.dial(|rank| rank.world = 2);
    harness.dial(|rank| {
        (rank.rank, rank.world, rank.num_pages) = (1, 2, 40);
        rank.answers = false;
    });
    harness.wait_for_phase("ready");
    assert_eq!(harness.status()["num_pages"], 40);
    assert_eq!(harness.status()["ranks"], 2);
    harness.submit(1, "abc", &json!({"max_tokens": 5}));
    assert_eq!(harness.answer(1).text(), "defgh");
    let [first, second] = [harness.workers[0].log(), harness.workers[1].log()];
    assert_eq!(first.welcome.unwrap().num_pages, 40);
    assert!(first.plans.starts_with(&second.plans) || second.plans.starts_with(&first.plans));
}

#[test]
fn no_request_is_taken_before_the_ranks_are_ready() {
    let mut harness = Harness::alone(&json!({}), Timeouts::default());
    harness.submit(1, "abc", &json!({}));
    let answer = harness.answer(1);
    assert_eq!(answer.error, Some((503, 0)));
    assert!(answer.message().contains("being loaded"));
}

#[test]
fn closing_ends_open_streams_with_an_error_and_can_be_repeated() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.hold(0, 20);
    harness.submit(1, "abc", &json!({"max_tokens": 400}));
    harness.wait_until("it decodes", |harness| {
        harness.metric("plait_generated_tokens_total") >= 1.0
    });
    harness.engine.close();
    assert_eq!(harness.answer(1).error, Some((503, 0)));
    harness.engine.close();
    assert_eq!(harness.status()["phase"], "stopped");
}
