//! Claims about the prefix cache: which pages are found, and which are evicted.

use plait_core::{Event, RequestId, Settings, StepResult};

use crate::fixtures::{chunks, decoded, harness, settings, step, with};
use crate::harness::{Harness, Spec};

/// Pages of four tokens, found again by later prompts.
fn cached() -> Settings {
    with(settings(), |it| {
        it.pages.page_size = 4;
        it.pages.prefix_cache = true;
    })
}

fn prompt(num: u32, salt: u64) -> Spec {
    Spec {
        salt,
        ..Spec::new(num, 2)
    }
}

#[test]
fn a_prompt_begins_after_the_pages_that_an_earlier_one_computed() {
    let mut harness = harness(cached(), [(10, 2)]);
    harness.run_to_the_end(1);
    harness.submit(Spec::new(15, 2)).unwrap();
    let plan = step(&mut harness);
    assert_eq!(plan.new_slots[0].num_cached, 8, "two pages are full");
    assert_eq!(chunks(&plan), [(1, 8, 7)]);
    assert_eq!(plan.token_ids.len(), 7, "cached tokens are not sent");
    let counts = harness.scheduler.stats().counts;
    assert_eq!(
        (counts.num_hit_tokens, counts.num_query_tokens),
        (8, 10 + 15)
    );
    harness.run_to_the_end(1);
}

#[test]
fn after_a_flush_prompts_find_nothing_and_running_requests_keep_their_pages() {
    let mut harness = harness(cached(), [(10, 2)]);
    harness.run_to_the_end(1);
    harness.submit(Spec::new(15, 6)).unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 8);
    let flushed = harness.scheduler.advance(Event::FlushCache, &mut vec![]);
    flushed.unwrap();
    assert_eq!(harness.scheduler.page_counts(0).cached, 0);
    harness.run_to_the_end(1);
    harness.submit(Spec::new(15, 2)).unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 0);
    harness.run_to_the_end(1);
}

#[test]
fn the_last_token_of_a_prompt_is_never_taken_from_the_cache() {
    let mut harness = harness(cached(), [(12, 2)]);
    harness.run_to_the_end(1);
    harness.submit(Spec::new(12, 2)).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(1, 8, 4)]);
    harness.run_to_the_end(1);
}

#[test]
fn pages_that_decoding_filled_are_found_by_the_next_turn_of_a_conversation() {
    let mut harness = harness(cached(), [(6, 9)]);
    harness.run_to_the_end(2);
    let mut prompt = harness.clients[&RequestId(0)].spec.prompt.clone();
    prompt.extend(&harness.clients[&RequestId(0)].emitted);
    prompt.extend([1, 2, 3]);
    harness
        .submit(Spec {
            prompt,
            ..Spec::new(1, 2)
        })
        .unwrap();
    // 6 + 9 tokens, of which the last sampled one has no KV.
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 12);
    harness.run_to_the_end(2);
}

#[test]
fn a_prompts_pages_are_found_once_their_step_is_launched() {
    let mut harness = harness(cached(), [(10, 2)]);
    harness.plan();
    harness.submit(Spec::new(10, 2)).unwrap();
    assert_eq!(harness.plan().unwrap().new_slots[0].num_cached, 8);
    harness.run_to_the_end(3);
}

#[test]
fn two_requests_that_run_share_pages_which_count_once() {
    let mut harness = harness(cached(), [(9, 20)]);
    step(&mut harness);
    harness.submit(Spec::new(9, 20)).unwrap();
    step(&mut harness);
    assert_eq!(
        harness.scheduler.stats().pages.leased,
        4,
        "2 shared, 1 each"
    );
    harness.abort(RequestId(0));
    assert_eq!(harness.scheduler.stats().pages.leased, 3);
    harness.run_to_the_end(2);
}

#[test]
fn other_salts_share_nothing() {
    let mut harness = Harness::new(cached());
    harness.submit(prompt(10, 1)).unwrap();
    harness.run_to_the_end(1);
    harness.submit(prompt(10, 2)).unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 0);
    harness.submit(prompt(10, 1)).unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 8);
    harness.run_to_the_end(1);
}

#[test]
fn without_the_cache_nothing_is_kept() {
    let mut harness = harness(
        with(cached(), |it| it.pages.prefix_cache = false),
        [(10, 2)],
    );
    harness.run_to_the_end(1);
    assert_eq!(harness.scheduler.stats().pages.cached, 0);
}

#[test]
fn the_pages_released_first_are_evicted_first_and_of_one_prompt_the_last() {
    let settings = with(cached(), |it| it.runtime.num_pages = 8);
    let mut harness = Harness::new(settings);
    for salt in [1, 2] {
        harness.submit(prompt(13, salt)).unwrap();
        harness.run_to_the_end(1);
    }
    assert_eq!(harness.scheduler.stats().pages.cached, 6);
    harness.submit(prompt(13, 3)).unwrap();
    harness.run_to_the_end(1);
    assert_eq!(harness.scheduler.stats().counts.num_evictions, 2);
    for (salt, num_cached) in [(2, 12), (1, 4)] {
        harness.submit(prompt(13, salt)).unwrap();
        assert_eq!(
            step(&mut harness).new_slots[0].num_cached,
            num_cached,
            "of salt {salt}"
        );
        harness.run_to_the_end(1);
    }
}

#[test]
fn cached_pages_count_as_room_and_hits_are_not_counted_twice() {
    let settings = with(cached(), |it| it.runtime.num_pages = 4);
    let mut harness = harness(settings, [(12, 1)]);
    harness.run_to_the_end(1);
    assert_eq!(harness.scheduler.stats().pages.cached, 3);
    harness.submit(Spec::new(14, 2)).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(1, 12, 2)], "all four pages");
    harness.submit(Spec::new(14, 2)).unwrap();
    assert_eq!(
        step(&mut harness).new_slots.len(),
        0,
        "its hits are there, the page behind them is not"
    );
    harness.run_to_the_end(1);
}

#[test]
fn a_preempted_request_finds_its_own_pages() {
    let settings = with(cached(), |it| it.runtime.num_pages = 6);
    let mut harness = Harness::new(settings);
    harness.submit(Spec::new(4, 11)).unwrap();
    let other = Spec {
        salt: 1,
        ..Spec::new(9, 11)
    };
    harness.submit(other).unwrap();
    while harness.scheduler.stats().counts.num_preemptions == 0 {
        step(&mut harness);
    }
    while harness.clients[&RequestId(0)].ended.is_none() {
        step(&mut harness);
    }
    let back = step(&mut harness);
    assert!(back.new_slots[0].next_output > 0);
    assert!(back.new_slots[0].num_cached > 0, "{back:?}");
    harness.run_to_the_end(1);
}

#[test]
fn a_request_for_prompt_logprobs_takes_no_position_that_it_has_to_report() {
    let mut harness = harness(cached(), [(10, 2)]);
    harness.run_to_the_end(1);
    harness
        .submit(Spec {
            prompt_logprobs: true,
            ..Spec::new(10, 2)
        })
        .unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 0);
    harness.run_to_the_end(1);
}

#[test]
fn hits_of_an_aborted_request_stay_while_a_step_names_them() {
    let mut harness = harness(cached(), [(10, 1)]);
    harness.run_to_the_end(1);
    harness.submit(Spec::new(10, 5)).unwrap();
    harness.plan();
    harness.abort(RequestId(1));
    let pages = harness.scheduler.stats().pages;
    assert_eq!((pages.parked, pages.cached), (3, 0));
    harness.submit(Spec::new(10, 5)).unwrap();
    assert_eq!(harness.plan().unwrap().new_slots[0].num_cached, 8);
    assert_eq!(harness.scheduler.stats().pages.parked, 1);
    harness.run_to_the_end(2);
}

#[test]
fn a_shared_page_that_two_aborts_park_counts_once() {
    let mut harness = harness(cached(), [(10, 1)]);
    harness.run_to_the_end(1);
    for _ in 0..2 {
        harness.submit(Spec::new(10, 5)).unwrap();
    }
    harness.plan();
    harness.abort(RequestId(1));
    harness.abort(RequestId(2));
    assert_eq!(
        harness.scheduler.stats().pages.parked,
        4,
        "2 shared, 1 each"
    );
    harness.run_to_the_end(1);
}

#[test]
fn a_fully_cached_batch_still_computes_one_token_of_each() {
    let mut harness = harness(cached(), [(9, 2)]);
    harness.run_to_the_end(1);
    for _ in 0..4 {
        harness.submit(Spec::new(9, 2)).unwrap();
    }
    let plan = step(&mut harness);
    assert!(plan.prefill.iter().all(|row| row.length == 1) && plan.prefill.len() == 4);
    assert!(decoded(&plan).is_empty());
    harness.run_to_the_end(1);
}

#[test]
fn a_result_that_does_not_fit_publishes_nothing() {
    let mut harness = harness(cached(), [(7, 3)]);
    step(&mut harness);
    let plan = harness.plan().unwrap();
    let result = StepResult {
        step: plan.step,
        num_accepted: &[1, 1],
        token_ids: &[1, 2],
    };
    let event = plait_core::Event::Result(result);
    assert!(harness.scheduler.advance(event, &mut Vec::new()).is_err());
    let mut prompt = harness.clients[&RequestId(0)].spec.prompt.clone();
    prompt.extend(&harness.clients[&RequestId(0)].emitted);
    prompt.push(1);
    harness
        .submit(Spec {
            prompt,
            ..Spec::new(1, 2)
        })
        .unwrap();
    assert_eq!(harness.plan().unwrap().new_slots[0].num_cached, 4);
    harness.run_to_the_end(2);
}

#[test]
fn a_flood_of_one_tenant_leaves_another_its_floor_in_the_cache() {
    let settings = with(cached(), |it| it.runtime.num_pages = 32);
    let mut harness = Harness::new(settings);
    let of_tenant = |tenant, salt| Spec {
        tenant,
        ..prompt(21, salt)
    };
    harness.submit(of_tenant(1, 1)).unwrap();
    harness.run_to_the_end(1);
    for salt in 2..30 {
        harness.submit(of_tenant(2, salt)).unwrap();
        harness.run_to_the_end(2);
    }
    harness.submit(of_tenant(1, 1)).unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 20);
    harness.run_to_the_end(1);
}
