//! Claims about the prefix cache: who finds which pages, and what is evicted.

use plait_core::{HashSeed, RequestId, Settings, StepResult};

use crate::rules::{chunks, decoded, settings, step, world};
use crate::world::{Spec, World};

/// Pages of four tokens, found again by later prompts.
fn cached() -> Settings {
    Settings {
        page_size: 4,
        prefix_cache: Some(HashSeed([1, 2])),
        ..settings()
    }
}

fn prompt(num: u32, salt: u64) -> Spec {
    Spec {
        salt,
        ..Spec::new(num, 2)
    }
}

#[test]
fn a_prompt_begins_behind_the_pages_that_an_earlier_one_computed() {
    let mut world = world(cached(), [(10, 2)]);
    world.run_to_the_end(1);
    world.submit(Spec::new(15, 2)).unwrap();
    let plan = step(&mut world);
    assert_eq!(plan.new_slots[0].num_cached, 8, "two pages are full");
    assert_eq!(chunks(&plan), [(1, 8, 7)]);
    assert_eq!(plan.token_ids.len(), 7, "cached tokens are not sent");
    assert_eq!(world.scheduler.stats().counts.num_hit_tokens, 8);
    world.run_to_the_end(1);
}

#[test]
fn the_last_token_of_a_prompt_is_never_taken_from_the_cache() {
    let mut world = world(cached(), [(12, 2)]);
    world.run_to_the_end(1);
    world.submit(Spec::new(12, 2)).unwrap();
    assert_eq!(chunks(&step(&mut world)), [(1, 8, 4)]);
    world.run_to_the_end(1);
}

#[test]
fn pages_that_decoding_filled_are_found_by_the_next_turn_of_a_dialogue() {
    let mut world = world(cached(), [(6, 9)]);
    world.run_to_the_end(2);
    let mut prompt = world.clients[&RequestId(0)].spec.prompt.clone();
    prompt.extend(&world.clients[&RequestId(0)].emitted);
    prompt.extend([1, 2, 3]);
    world
        .submit(Spec {
            prompt,
            ..Spec::new(1, 2)
        })
        .unwrap();
    // 6 + 9 tokens, of which the last sampled one has no KV.
    assert_eq!(step(&mut world).new_slots[0].num_cached, 12);
    world.run_to_the_end(2);
}

#[test]
fn a_page_is_found_only_when_its_result_is_in() {
    let mut world = world(cached(), [(10, 2)]);
    world.plan();
    world.submit(Spec::new(10, 2)).unwrap();
    let plan = world.plan().unwrap();
    assert_eq!(plan.new_slots[0].num_cached, 0);
    world.land();
    world.submit(Spec::new(10, 2)).unwrap();
    assert_eq!(world.plan().unwrap().new_slots[0].num_cached, 8);
    world.run_to_the_end(3);
}

#[test]
fn two_requests_that_run_share_pages_which_count_once() {
    let mut world = world(cached(), [(9, 20)]);
    step(&mut world);
    world.submit(Spec::new(9, 20)).unwrap();
    step(&mut world);
    assert_eq!(world.scheduler.stats().pages.leased, 4, "2 shared, 1 each");
    world.abort(RequestId(0));
    assert_eq!(world.scheduler.stats().pages.leased, 3);
    world.run_to_the_end(2);
}

#[test]
fn other_salts_share_nothing() {
    let mut world = World::new(cached());
    world.submit(prompt(10, 1)).unwrap();
    world.run_to_the_end(1);
    world.submit(prompt(10, 2)).unwrap();
    assert_eq!(step(&mut world).new_slots[0].num_cached, 0);
    world.submit(prompt(10, 1)).unwrap();
    assert_eq!(step(&mut world).new_slots[0].num_cached, 8);
    world.run_to_the_end(1);
}

#[test]
fn without_the_cache_nothing_is_kept() {
    let mut world = world(
        Settings {
            prefix_cache: None,
            ..cached()
        },
        [(10, 2)],
    );
    world.run_to_the_end(1);
    assert_eq!(world.scheduler.stats().pages.cached, 0);
}

#[test]
fn the_pages_released_first_are_evicted_first_and_of_one_prompt_the_last() {
    let settings = Settings {
        num_pages: 8,
        ..cached()
    };
    let mut world = World::new(settings);
    for salt in [1, 2] {
        world.submit(prompt(13, salt)).unwrap();
        world.run_to_the_end(1);
    }
    assert_eq!(world.scheduler.stats().pages.cached, 6);
    world.submit(prompt(13, 3)).unwrap();
    world.run_to_the_end(1);
    assert_eq!(world.scheduler.stats().counts.num_evictions, 2);
    for (salt, num_cached) in [(2, 12), (1, 4)] {
        world.submit(prompt(13, salt)).unwrap();
        assert_eq!(
            step(&mut world).new_slots[0].num_cached,
            num_cached,
            "of salt {salt}"
        );
        world.run_to_the_end(1);
    }
}

#[test]
fn cached_pages_count_as_room_and_hits_are_not_counted_twice() {
    let settings = Settings {
        num_pages: 4,
        ..cached()
    };
    let mut world = world(settings, [(12, 1)]);
    world.run_to_the_end(1);
    assert_eq!(world.scheduler.stats().pages.cached, 3);
    world.submit(Spec::new(14, 2)).unwrap();
    assert_eq!(chunks(&step(&mut world)), [(1, 12, 2)], "all four pages");
    world.submit(Spec::new(14, 2)).unwrap();
    assert_eq!(
        step(&mut world).new_slots.len(),
        0,
        "its hits are there, the page behind them is not"
    );
    world.run_to_the_end(1);
}

#[test]
fn a_preempted_request_finds_its_own_pages() {
    let settings = Settings {
        num_pages: 6,
        ..cached()
    };
    let mut world = World::new(settings);
    world.submit(Spec::new(4, 11)).unwrap();
    let other = Spec {
        salt: 1,
        ..Spec::new(9, 11)
    };
    world.submit(other).unwrap();
    while world.scheduler.stats().counts.num_preemptions == 0 {
        step(&mut world);
    }
    while world.clients[&RequestId(0)].ended.is_none() {
        step(&mut world);
    }
    let back = step(&mut world);
    assert!(back.new_slots[0].next_output > 0);
    assert!(back.new_slots[0].num_cached > 0, "{back:?}");
    world.run_to_the_end(1);
}

#[test]
fn a_request_for_prompt_logprobs_takes_no_position_that_it_has_to_report() {
    let mut world = world(cached(), [(10, 2)]);
    world.run_to_the_end(1);
    world
        .submit(Spec {
            prompt_logprobs: true,
            ..Spec::new(10, 2)
        })
        .unwrap();
    assert_eq!(step(&mut world).new_slots[0].num_cached, 0);
    world.run_to_the_end(1);
}

#[test]
fn hits_of_an_aborted_request_stay_while_a_step_names_them() {
    let mut world = world(cached(), [(10, 1)]);
    world.run_to_the_end(1);
    world.submit(Spec::new(10, 5)).unwrap();
    world.plan();
    world.abort(RequestId(1));
    let pages = world.scheduler.stats().pages;
    assert_eq!((pages.parked, pages.cached), (3, 0));
    world.submit(Spec::new(10, 5)).unwrap();
    assert_eq!(world.plan().unwrap().new_slots[0].num_cached, 8);
    assert_eq!(world.scheduler.stats().pages.parked, 1);
    world.run_to_the_end(2);
}

#[test]
fn a_shared_page_that_two_aborts_park_counts_once() {
    let mut world = world(cached(), [(10, 1)]);
    world.run_to_the_end(1);
    for _ in 0..2 {
        world.submit(Spec::new(10, 5)).unwrap();
    }
    world.plan();
    world.abort(RequestId(1));
    world.abort(RequestId(2));
    assert_eq!(world.scheduler.stats().pages.parked, 4, "2 shared, 1 each");
    world.run_to_the_end(1);
}

#[test]
fn a_fully_cached_batch_still_computes_one_token_of_each() {
    let mut world = world(cached(), [(9, 2)]);
    world.run_to_the_end(1);
    for _ in 0..4 {
        world.submit(Spec::new(9, 2)).unwrap();
    }
    let plan = step(&mut world);
    assert!(plan.prefill.iter().all(|row| row.length == 1) && plan.prefill.len() == 4);
    assert!(decoded(&plan).is_empty());
    world.run_to_the_end(1);
}

#[test]
fn a_result_that_does_not_fit_publishes_nothing() {
    let mut world = world(cached(), [(10, 2)]);
    let plan = world.plan().unwrap();
    let result = StepResult {
        step: plan.step,
        num_accepted: &[1, 1],
        token_ids: &[1, 2],
    };
    let event = plait_core::Event::Result(result);
    assert!(world.scheduler.advance(event, &mut Vec::new()).is_err());
    world.submit(Spec::new(10, 2)).unwrap();
    assert_eq!(world.plan().unwrap().new_slots[0].num_cached, 0);
    world.run_to_the_end(2);
}
