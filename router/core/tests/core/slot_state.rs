//! Claims about models that keep state of a fixed size for each slot, and snapshots of it at page boundaries.

use plait_core::{Plan, RequestId, SavedSlot, Settings, SlotId, SnapshotCounts};
use proptest::option;
use proptest::prelude::*;

use crate::fixtures::{chunks, harness, settings, step, with};
use crate::harness::{Harness, Spec};
use crate::properties::{any_case, in_proportion, run_case};

/// Pages of four tokens, and eight snapshots.
fn with_slot_state() -> Settings {
    with(settings(), |it| {
        it.pages.page_size = 4;
        it.pages.prefix_cache = true;
        it.runtime.num_snapshots = Some(8);
    })
}

/// The boundaries that a plan saves.
fn saved(plan: &Plan) -> Vec<u32> {
    plan.saved_slots.iter().map(|it| it.position).collect()
}

fn snapshots(harness: &Harness) -> SnapshotCounts {
    harness.scheduler.stats().snapshots
}

/// Tokens that a prompt finds in the cache. It runs to its end.
fn num_found(harness: &mut Harness, prompt: Vec<u32>) -> u32 {
    let spec = Spec {
        prompt,
        ..Spec::new(1, 1)
    };
    harness.submit(spec).unwrap();
    let plan = step(harness);
    harness.run_to_the_end(2);
    plan.new_slots[0].num_cached
}

/// The first `num` tokens of a text, and then others up to `length`.
fn prompt(num: u32, length: u32, own: u32) -> Vec<u32> {
    let text = (0..num).map(|i| i * 5 % 61);
    text.chain((num..length).map(|i| (i * 7 + own * 11 + 3) % 61))
        .collect()
}

#[test]
fn a_prompt_saves_its_last_boundary_within_its_row() {
    let mut harness = harness(with_slot_state(), [(10, 2)]);
    let plan = step(&mut harness);
    assert_eq!(chunks(&plan), [(0, 0, 10)], "no chunk is cut for it");
    assert_eq!(saved(&plan), [8]);
    harness.run_to_the_end(1);
}

#[test]
fn a_hit_restores_the_snapshot_at_its_end() {
    let mut harness = harness(with_slot_state(), [(10, 2)]);
    let first = step(&mut harness);
    harness.run_to_the_end(1);
    harness.submit(Spec::new(15, 2)).unwrap();
    let plan = step(&mut harness);
    assert_eq!(plan.restored_slots.len(), 1);
    assert_eq!(
        plan.restored_slots[0].snapshot,
        first.saved_slots[0].snapshot
    );
    assert_eq!(chunks(&plan), [(1, 8, 7)]);
    harness.run_to_the_end(1);
}

#[test]
fn a_snapshot_is_found_once_the_result_of_its_step_is_in() {
    let mut harness = harness(with_slot_state(), [(10, 2)]);
    harness.plan();
    assert_eq!(snapshots(&harness).writing, 1);
    harness.submit(Spec::new(10, 2)).unwrap();
    assert_eq!(harness.plan().unwrap().new_slots[0].num_cached, 0);
    harness.complete();
    assert_eq!(snapshots(&harness).findable, 1);
    harness.submit(Spec::new(10, 2)).unwrap();
    assert_eq!(harness.plan().unwrap().new_slots[0].num_cached, 8);
    harness.run_to_the_end(2);
}

#[test]
fn a_prompt_that_ends_with_a_page_is_found_by_the_same_prompt_and_by_a_longer_one() {
    let mut harness = harness(with_slot_state(), [(12, 1)]);
    assert_eq!(saved(&step(&mut harness)), [8, 12]);
    let prompt = Spec::new(16, 1).prompt;
    assert_eq!(num_found(&mut harness, prompt[..12].to_vec()), 8);
    assert_eq!(num_found(&mut harness, prompt), 12);
}

/// Of ten prompts of 1,000 tokens with 600 in common, the first leaves pages, the second learns where they part.
#[test]
fn a_branching_point_is_learnt_by_its_first_miss() {
    let large = with(with_slot_state(), |it| {
        it.pages.page_size = 256;
        it.runtime.max_model_len = 2_000;
        it.scheduler.max_batch_tokens = Some(700);
        it.scheduler.long_prefill_token_threshold = Some(300);
    });
    let mut harness = Harness::new(large);
    let found: Vec<u32> = (0..10)
        .map(|own| num_found(&mut harness, prompt(600, 1_000, own)))
        .collect();
    assert_eq!(found, [0, 0, 512, 512, 512, 512, 512, 512, 512, 512]);
}

#[test]
fn prompts_that_part_in_their_last_page_are_found_at_once() {
    let large = with(with_slot_state(), |it| {
        it.pages.page_size = 256;
        it.runtime.max_model_len = 2_000;
    });
    let mut harness = Harness::new(large);
    let found: Vec<u32> = (0..10)
        .map(|own| num_found(&mut harness, prompt(600, 700, own)))
        .collect();
    assert_eq!(found, [0, 512, 512, 512, 512, 512, 512, 512, 512, 512]);
}

#[test]
fn a_second_turn_computes_less_than_a_page_and_its_new_tokens() {
    for num_output in 1..20 {
        let mut harness = harness(with_slot_state(), [(6, num_output)]);
        harness.run_to_the_end(2);
        let client = &harness.clients[&RequestId(0)];
        let mut prompt = client.spec.prompt.clone();
        prompt.extend(&client.emitted);
        // The last token of the answer has no KV yet: it is new.
        let num_old = u32::try_from(prompt.len()).unwrap() - 1;
        prompt.extend([1, 2, 3]);
        assert!(
            num_old - num_found(&mut harness, prompt) < 4,
            "{num_output}"
        );
    }
}

#[test]
fn while_decoding_the_newest_boundary_takes_the_place_of_the_one_before() {
    let mut harness = harness(with_slot_state(), [(3, 20)]);
    let mut positions = Vec::new();
    while !harness.scheduler.is_idle() {
        positions.extend(saved(&step(&mut harness)));
        assert!(snapshots(&harness).findable <= 1);
    }
    assert_eq!(positions, [4, 8, 12, 16, 20]);
    assert_eq!(snapshots(&harness).findable, 1);
    harness.check_the_end();
}

#[test]
fn one_boundary_of_each_interval_stays() {
    let often = with(with_slot_state(), |it| it.pages.snapshot_interval = 8);
    let mut harness = harness(often, [(27, 10)]);
    let positions: Vec<u32> = std::iter::from_fn(|| {
        harness.plan().map(|plan| {
            harness.complete();
            saved(&plan)
        })
    })
    .flatten()
    .collect();
    assert_eq!(positions, [8, 16, 24, 28, 32, 36]);
    // 28 was replaced by 32, which stays; 36 is the newest.
    assert_eq!(snapshots(&harness).findable, 5);
    harness.check_the_end();
}

#[test]
fn a_snapshot_that_another_request_restored_is_not_replaced() {
    let mut harness = harness(with_slot_state(), [(3, 30)]);
    while harness.clients[&RequestId(0)].emitted.len() < 6 {
        step(&mut harness);
    }
    let client = &harness.clients[&RequestId(0)];
    let prompt = [&client.spec.prompt[..], &client.emitted[..6]].concat();
    harness
        .submit(Spec {
            prompt: prompt.clone(),
            ..Spec::new(1, 1)
        })
        .unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 8);
    harness.run_to_the_end(2);
    assert_eq!(num_found(&mut harness, prompt), 8);
}

#[test]
fn what_was_computed_beyond_an_end_is_dropped() {
    let mut harness = harness(with_slot_state(), [(3, 20)]);
    let plan = step(&mut harness);
    assert_eq!(saved(&plan), Vec::<u32>::new());
    let plan = harness.plan().unwrap();
    assert_eq!(saved(&plan), [4]);
    harness.abort(RequestId(0));
    assert_eq!(snapshots(&harness).parked, 1);
    harness.complete();
    assert_eq!(snapshots(&harness).free, 8);
    harness.check_the_end();
}

#[test]
fn with_a_pool_in_use_prompts_run_and_save_nothing() {
    let none = with(with_slot_state(), |it| it.runtime.num_snapshots = Some(0));
    let mut harness = harness(none, [(10, 9), (10, 9)]);
    let plan = step(&mut harness);
    assert_eq!(plan.saved_slots, []);
    harness.run_to_the_end(2);
    assert_eq!(num_found(&mut harness, Spec::new(10, 1).prompt), 0);
}

#[test]
fn the_snapshot_that_was_used_longest_ago_goes_first() {
    let two = with(with_slot_state(), |it| it.runtime.num_snapshots = Some(2));
    let mut harness = Harness::new(two);
    for own in [1, 2] {
        assert_eq!(num_found(&mut harness, prompt(0, 6, own)), 0);
    }
    assert_eq!(num_found(&mut harness, prompt(0, 6, 1)), 4);
    assert_eq!(num_found(&mut harness, prompt(0, 6, 3)), 0);
    assert_eq!(num_found(&mut harness, prompt(0, 6, 1)), 4);
    assert_eq!(num_found(&mut harness, prompt(0, 6, 2)), 0);
}

#[test]
fn a_snapshot_goes_with_the_page_before_it() {
    let few = with(with_slot_state(), |it| it.runtime.num_pages = 4);
    let mut harness = Harness::new(few);
    num_found(&mut harness, prompt(0, 9, 1));
    assert_eq!(snapshots(&harness).findable, 1);
    num_found(&mut harness, prompt(0, 14, 2));
    let counts = snapshots(&harness);
    assert_eq!(counts.findable, 1, "of the second prompt");
}

#[test]
fn without_a_prefix_cache_nothing_is_saved() {
    let without = with(with_slot_state(), |it| it.pages.prefix_cache = false);
    let mut harness = Harness::new(without);
    let choices = Spec {
        num_choices: 3,
        ..Spec::new(9, 8)
    };
    harness.submit(choices).unwrap();
    while !harness.scheduler.is_idle() {
        let plan = step(&mut harness);
        assert_eq!((plan.saved_slots, plan.restored_slots), (vec![], vec![]));
    }
    harness.check_the_end();
}

#[test]
fn a_row_that_fails_publishes_no_snapshot() {
    for depth in [1, 2] {
        let mut harness = harness(with_slot_state(), [(10, 9)]);
        harness.failing.insert(RequestId(0));
        harness.run_to_the_end(depth);
        assert_eq!(snapshots(&harness).free, 8);
    }
}

/// The device has seen the token whose row was left out, and its state cannot be taken back.
#[test]
fn a_late_mask_begins_a_request_anew_from_its_last_snapshot() {
    let mut harness = Harness::new(with_slot_state());
    harness
        .submit(Spec {
            is_masked: true,
            ..Spec::new(9, 6)
        })
        .unwrap();
    harness.masks.lateness = crate::masks::Lateness::Always;
    step(&mut harness);
    assert!(harness.plan().is_none(), "it waits for its mask");
    assert!(harness.any_mask_ready());
    harness.masks.lateness = crate::masks::Lateness::Never;
    let plan = step(&mut harness);
    assert_eq!(plan.freed_slots, [SlotId(0)]);
    assert_eq!(chunks(&plan), [(0, 8, 1)]);
    harness.run_to_the_end(2);
}

#[test]
fn a_row_may_save_several_boundaries() {
    let often = with(with_slot_state(), |it| it.pages.snapshot_interval = 8);
    let mut harness = harness(often, [(30, 1)]);
    let plan = step(&mut harness);
    let slots: Vec<SlotId> = plan
        .saved_slots
        .iter()
        .map(|SavedSlot { slot, .. }| *slot)
        .collect();
    assert_eq!(
        (saved(&plan), slots),
        (vec![8, 16, 24, 28], vec![SlotId(0); 4])
    );
    harness.run_to_the_end(1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: in_proportion(3_000), ..ProptestConfig::default() })]

    #[test]
    fn every_invariant_holds_with_slot_state(
        (mut settings, depth, actions) in any_case(),
        num_snapshots in 0..7u32,
        interval in 1..20u32,
        prefix_cache in option::weighted(0.7, Just(true)),
    ) {
        settings.runtime.num_snapshots = Some(num_snapshots);
        settings.pages.snapshot_interval = interval;
        settings.pages.prefix_cache = prefix_cache.unwrap_or(settings.pages.prefix_cache);
        run_case((settings, depth, actions));
    }
}
