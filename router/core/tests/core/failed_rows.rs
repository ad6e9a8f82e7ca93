//! Claims about rows whose logits were NaN: each ends its request, and no other.

use plait_core::{Output, RequestId};

use crate::fixtures::{harness, settings, step, with};
use crate::harness::{Harness, Spec};

#[test]
fn a_failed_row_ends_its_request_and_the_others_go_on() {
    let mut harness = harness(settings(), [(5, 30), (6, 30), (7, 30)]);
    (0..4).for_each(|_| drop(step(&mut harness)));
    harness.failing.insert(RequestId(1));
    harness.plan().unwrap();
    harness.plan().unwrap();
    let outputs = harness.complete();
    let failed = outputs.iter().filter_map(|output| match output {
        Output::Failed { request } => Some(*request),
        _ => None,
    });
    assert_eq!(failed.collect::<Vec<_>>(), [RequestId(1)]);
    let of_second = harness.complete();
    assert_eq!(of_second.len(), 2, "its row in the next step is dropped");
    harness.run_to_the_end(2);
}

#[test]
fn a_prompt_that_fails_gives_no_token_and_frees_what_it_held() {
    let mut harness = harness(settings(), [(50, 9), (6, 9)]);
    harness.failing.insert(RequestId(0));
    harness.run_to_the_end(2);
    assert!(harness.clients[&RequestId(0)].emitted.is_empty());
    assert_eq!(harness.clients[&RequestId(1)].emitted.len(), 9);
    assert_eq!(harness.scheduler.stats().num_running, 0);
}

#[test]
fn a_request_that_fails_where_it_runs_alone_is_no_longer_waited_for() {
    let mut harness = harness(settings(), [(5, 30), (6, 30)]);
    (0..4).for_each(|_| drop(step(&mut harness)));
    harness.plan().unwrap();
    assert_eq!(harness.lose(), []);
    harness.failing.insert(RequestId(0));
    harness.run_to_the_end(2);
    assert_eq!(harness.clients[&RequestId(1)].emitted.len(), 30);
}

#[test]
fn pages_of_a_request_that_failed_are_not_found_again() {
    let settings = with(settings(), |it| it.pages.prefix_cache = true);
    let mut harness = harness(settings, [(50, 9)]);
    harness.run_to_the_end(1);
    let spec = harness.clients[&RequestId(0)].spec.clone();
    let num_cached = |harness: &mut Harness, spec: &Spec| {
        harness.submit(spec.clone()).unwrap();
        step(harness).new_slots[0].num_cached
    };
    assert_eq!(num_cached(&mut harness, &spec), 48);
    harness.failing.insert(RequestId(1));
    harness.run_to_the_end(1);
    assert_eq!(num_cached(&mut harness, &spec), 0);
    harness.run_to_the_end(1);
    assert_eq!(harness.clients[&RequestId(2)].emitted.len(), 9);
}
