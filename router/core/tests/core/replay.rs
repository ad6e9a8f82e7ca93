//! Claims about the loss of all ranks: requests go on where they were, and one that kills ranks ends alone.

use plait_core::{KvEvent, Micros, RequestId, Settings};

use crate::fixtures::{chunks, decoded, harness, settings, step, with};
use crate::harness::{Harness, Spec};

fn num_emitted(harness: &Harness) -> Vec<usize> {
    let clients = harness.clients.values();
    clients.map(|client| client.emitted.len()).collect()
}

/// Three decoders, the second of which kills the ranks with every row.
fn poisoned() -> Harness {
    let mut harness = harness(settings(), [(5, 30), (6, 30), (7, 30)]);
    (0..4).for_each(|_| drop(step(&mut harness)));
    harness
}

#[test]
fn every_request_goes_on_behind_its_last_token() {
    let mut harness = harness(settings(), [(5, 20), (9, 20)]);
    (0..7).for_each(|_| drop(step(&mut harness)));
    harness.plan().unwrap();
    harness.plan().unwrap();
    assert_eq!(harness.lose(), []);
    assert_eq!(num_emitted(&harness), [7, 7]);
    assert_eq!(chunks(&step(&mut harness)), [(0, 0, 12)]);
    let second = step(&mut harness);
    assert_eq!(chunks(&second), [(1, 0, 16)]);
    assert_eq!(second.new_slots[0].next_output, 7, "seeds go by the index");
    assert_eq!(decoded(&step(&mut harness)), [0, 1]);
    harness.run_to_the_end(2);
}

#[test]
fn a_long_answer_is_computed_again_in_chunks_of_the_same_budget() {
    let mut harness = harness(settings(), [(50, 60)]);
    (0..35).for_each(|_| drop(step(&mut harness)));
    harness.plan().unwrap();
    harness.lose();
    let plans: Vec<_> = (0..3).flat_map(|_| chunks(&step(&mut harness))).collect();
    assert_eq!(plans, [(0, 0, 32), (0, 32, 32), (0, 64, 20)]);
    harness.run_to_the_end(2);
}

#[test]
fn requests_wait_in_their_old_order_and_newcomers_behind_them() {
    let one_slot = with(settings(), |it| it.scheduler.max_seqs = Some(2));
    let mut harness = harness(one_slot, [(5, 9), (5, 9), (5, 9)]);
    (0..3).for_each(|_| drop(step(&mut harness)));
    harness.lose();
    harness.submit(Spec::new(5, 9)).unwrap();
    let plan = step(&mut harness);
    let order: Vec<u64> = chunks(&plan).iter().map(|(request, ..)| *request).collect();
    assert_eq!(order, [0, 1]);
    harness.run_to_the_end(2);
}

#[test]
fn prompt_positions_whose_results_were_lost_are_reported_again_and_no_others() {
    let mut harness = Harness::new(settings());
    let spec = Spec {
        prompt_logprobs: true,
        ..Spec::new(90, 4)
    };
    harness.submit(spec).unwrap();
    step(&mut harness);
    let lost = harness.plan().unwrap();
    assert_eq!(lost.prefill[0].prompt_logprobs, 33..65);
    harness.lose();
    let again: Vec<_> = (0..3).map(|_| step(&mut harness)).collect();
    let reported = |it: usize| again[it].prefill[0].prompt_logprobs.clone();
    assert_eq!((reported(0).is_empty(), reported(1)), (true, 33..65));
    harness.run_to_the_end(2);
}

#[test]
fn a_request_in_flight_runs_alone_until_it_has_sampled() {
    let mut harness = poisoned();
    harness.submit(Spec::new(3, 9)).unwrap();
    harness.plan().unwrap();
    harness.lose();
    for suspect in 0..4 {
        let plan = harness.plan().unwrap();
        assert_eq!(chunks(&plan)[0].0, suspect);
        assert_eq!(plan.prefill.len() + plan.decode.len(), 1);
        assert!(
            harness.plan().is_none(),
            "the next one waits for its result"
        );
        harness.complete();
    }
    assert_eq!(decoded(&step(&mut harness)), [0, 1, 2, 3]);
    harness.run_to_the_end(2);
}

#[test]
fn a_request_that_takes_the_ranks_down_twice_ends_and_the_others_go_on() {
    let mut harness = poisoned();
    harness.plan().unwrap();
    assert_eq!(harness.lose(), []);
    step(&mut harness);
    let alone = harness.plan().unwrap();
    assert_eq!(chunks(&alone)[0].0, 1);
    assert_eq!(harness.lose(), [RequestId(1)]);
    harness.run_to_the_end(2);
    let lengths = num_emitted(&harness);
    assert_eq!((lengths[0], lengths[2]), (30, 30));
    assert_eq!(lengths[1], 4, "what came before stays");
}

#[test]
fn the_other_suspects_run_alone_behind_a_second_loss() {
    let mut harness = poisoned();
    harness.plan().unwrap();
    harness.lose();
    step(&mut harness);
    harness.plan().unwrap();
    assert_eq!(harness.lose(), [RequestId(1)]);
    let next = harness.plan().unwrap();
    let requests: Vec<u64> = chunks(&next).iter().map(|it| it.0).collect();
    assert_eq!((requests, next.decode.len()), (vec![2], 0));
    harness.run_to_the_end(2);
}

#[test]
fn losses_apart_by_a_token_end_nobody() {
    let mut harness = poisoned();
    for _ in 0..5 {
        harness.plan().unwrap();
        assert_eq!(harness.lose(), []);
        (0..3).for_each(|_| drop(step(&mut harness)));
    }
    harness.run_to_the_end(2);
}

#[test]
fn suspects_without_room_to_run_alone_run_together() {
    let tight = with(settings(), |it| {
        it.pages.page_size = 4;
        it.runtime.num_pages = 6;
        it.pages.watermark = Some(2);
    });
    let mut harness = harness(tight, [(4, 8), (4, 8), (4, 8)]);
    (0..3).for_each(|_| drop(step(&mut harness)));
    harness.plan().unwrap();
    harness.lose();
    harness.run_to_the_end(2);
    assert!(harness.clients.values().all(|it| it.emitted.len() == 8));
}

fn with_prefixes() -> Settings {
    with(settings(), |it| it.pages.prefix_cache = true)
}

#[test]
fn no_prefix_of_the_lost_ranks_is_found_and_listeners_hear_it() {
    let mut harness = Harness::new(with_prefixes());
    harness.scheduler.record_kv_events();
    harness.submit(Spec::new(40, 1)).unwrap();
    step(&mut harness);
    harness.lose();
    let mut events = Vec::new();
    harness.scheduler.take_kv_events(&mut events);
    let removed = events
        .iter()
        .filter(|it| matches!(it, KvEvent::Removed { .. }));
    assert_eq!((events.len(), removed.count()), (4, 2));
    harness.submit(Spec::new(40, 1)).unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 0);
}

#[test]
fn what_steps_take_stays_known() {
    let mut harness = poisoned();
    let before = harness.scheduler.step_time_stats();
    let plan = harness.plan().unwrap();
    harness.lose();
    assert_eq!(harness.scheduler.step_time_stats(), before);
    assert_eq!(harness.scheduler.expected(plan.step), None::<Micros>);
    harness.run_to_the_end(2);
}
