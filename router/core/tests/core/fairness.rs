//! Claims about fair share between tenants.

use plait_core::{Policy, Settings};

use crate::fixtures::{settings, step, with};
use crate::harness::{Harness, Spec};

fn fair() -> Settings {
    with(settings(), |it| {
        it.scheduler.policy = Policy::Fair;
        it.scheduler.max_seqs = Some(1);
        it.runtime.max_rows = Some(1);
    })
}

fn of(tenant: u64, num_prompt: u32, max_tokens: u32) -> Spec {
    Spec {
        tenant,
        ..Spec::new(num_prompt, max_tokens)
    }
}

/// The tenants in the order of their admissions.
fn admissions(harness: &mut Harness) -> Vec<u64> {
    let mut tenants = Vec::new();
    while !harness.scheduler.is_idle() {
        let plan = step(harness);
        let new = plan.new_slots.iter().filter(|new| new.waited.is_some());
        tenants.extend(new.map(|new| harness.clients[&new.request].spec.tenant));
    }
    tenants
}

#[test]
fn a_tenant_with_one_request_does_not_wait_for_anothers_ten() {
    let mut harness = Harness::new(fair());
    for _ in 0..10 {
        harness.submit(of(1, 5, 5)).unwrap();
    }
    harness.submit(of(2, 5, 5)).unwrap();
    assert_eq!(admissions(&mut harness)[..3], [1, 2, 1]);
}

#[test]
fn shares_are_counted_in_tokens_of_prompts_and_answers() {
    let mut harness = Harness::new(fair());
    for _ in 0..3 {
        harness.submit(of(1, 20, 10)).unwrap();
    }
    for _ in 0..9 {
        harness.submit(of(2, 5, 5)).unwrap();
    }
    assert_eq!(
        admissions(&mut harness),
        [1, 2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2],
        "30 tokens a request against 10"
    );
}

#[test]
fn a_tenant_that_stayed_away_saves_nothing_up() {
    let mut harness = Harness::new(fair());
    harness.submit(of(1, 20, 50)).unwrap();
    harness.run_to_the_end(1);
    for _ in 0..2 {
        harness.submit(of(1, 5, 5)).unwrap();
        harness.submit(of(2, 5, 5)).unwrap();
    }
    assert_eq!(admissions(&mut harness), [1, 2, 1, 2]);
}

#[test]
fn a_newcomer_is_not_level_with_a_tenant_that_left_long_ago() {
    let mut harness = Harness::new(fair());
    harness.submit(of(1, 5, 5)).unwrap();
    harness.run_to_the_end(1);
    harness.submit(of(2, 20, 30)).unwrap();
    harness.submit(of(2, 5, 5)).unwrap();
    (0..29).for_each(|_| drop(step(&mut harness)));
    for _ in 0..4 {
        harness.submit(of(3, 5, 5)).unwrap();
    }
    assert_eq!(admissions(&mut harness), [3, 2, 3, 3, 3]);
}

#[test]
fn priority_orders_the_requests_of_one_tenant_only() {
    let mut harness = Harness::new(fair());
    harness.submit(of(1, 5, 5)).unwrap();
    for (tenant, priority) in [(2, 5), (1, 0), (1, -1)] {
        harness
            .submit(Spec {
                priority,
                ..of(tenant, 5, 5)
            })
            .unwrap();
    }
    let mut order = Vec::new();
    while !harness.scheduler.is_idle() {
        order.extend(step(&mut harness).new_slots.iter().map(|new| new.request.0));
    }
    assert_eq!(order, [3, 1, 0, 2]);
}
