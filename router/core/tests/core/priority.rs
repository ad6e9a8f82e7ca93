//! Claims about priorities: who is admitted, who gives way, and that nobody waits for ever.

use plait_core::{Micros, Scheduler, Settings};

use crate::fixtures::{decoded, settings, step, with};
use crate::harness::{Harness, Spec};

fn of(priority: i32, num_prompt: u32, max_tokens: u32) -> Spec {
    Spec {
        priority,
        ..Spec::new(num_prompt, max_tokens)
    }
}

/// Eight pages of 16 tokens, and preemption for a priority that is better by 5.
fn preempting() -> Settings {
    with(settings(), |it| {
        it.runtime.num_pages = 8;
        it.scheduler.priority_preemption_threshold = Some(5);
    })
}

#[test]
fn an_urgent_request_preempts_who_runs_for_its_pages() {
    let mut harness = Harness::new(preempting());
    for _ in 0..4 {
        harness.submit(of(10, 20, 40)).unwrap();
    }
    (0..4).for_each(|_| drop(step(&mut harness)));
    harness.submit(of(0, 60, 4)).unwrap();
    let plan = step(&mut harness);
    let new: Vec<u64> = plan.new_slots.iter().map(|new| new.request.0).collect();
    assert_eq!(new, [4]);
    assert_eq!(plan.freed_slots.len(), 2, "as many as it needs");
    assert_eq!(decoded(&plan), [0, 1], "the first in order go on");
    harness.run_to_the_end(2);
}

#[test]
fn an_urgent_request_preempts_for_a_slot() {
    let one_slot = with(preempting(), |it| it.scheduler.max_seqs = Some(1));
    let mut harness = Harness::new(one_slot);
    harness.submit(of(5, 4, 50)).unwrap();
    step(&mut harness);
    harness.submit(of(0, 4, 4)).unwrap();
    assert_eq!(step(&mut harness).new_slots[0].request.0, 1);
    harness.run_to_the_end(2);
}

#[test]
fn nobody_is_preempted_within_the_threshold_or_for_nothing() {
    for (priority, num_prompt) in [(6, 60), (0, 120)] {
        let mut harness = Harness::new(preempting());
        harness.submit(of(-10, 40, 40)).unwrap();
        harness.submit(of(10, 40, 40)).unwrap();
        (0..4).for_each(|_| drop(step(&mut harness)));
        harness.submit(of(priority, num_prompt, 4)).unwrap();
        let plan = step(&mut harness);
        assert_eq!(
            plan.freed_slots,
            [],
            "with both victims it would still lack pages"
        );
        harness.run_to_the_end(1);
    }
}

#[test]
fn waiting_makes_up_for_priority() {
    let settings = with(settings(), |it| {
        it.scheduler.max_seqs = Some(1);
        it.scheduler.priority_aging_seconds = 10.0;
    });
    let mut scheduler = Scheduler::new(settings).unwrap();
    let at = |second: u64| Micros(second * 1_000_000);
    let mut submit = |second, priority| {
        let spec = of(priority, 4, 1);
        scheduler.submit(spec.request(), at(second)).unwrap()
    };
    let low = submit(0, 2);
    let soon = submit(19, 0);
    let late = submit(21, 0);
    let mut order = Vec::new();
    while let Some(plan) = scheduler.plan(at(30)) {
        order.extend(plan.new_slots.iter().map(|new| new.request));
        let result = plait_core::StepResult {
            step: plan.step,
            num_accepted: &[1],
            token_ids: &[1],
        };
        let event = plait_core::Event::Result(result);
        scheduler.advance(event, &mut Vec::new()).unwrap();
    }
    assert_eq!(order, [soon, low, late]);
}

#[test]
fn a_shared_prefix_frees_its_pages_once() {
    let settings = with(preempting(), |it| {
        it.runtime.num_pages = 16;
        it.pages.prefix_cache = true;
    });
    let mut harness = Harness::new(settings);
    harness.submit(of(-10, 100, 100)).unwrap();
    for _ in 0..3 {
        harness.submit(of(10, 60, 30)).unwrap();
        (0..4).for_each(|_| drop(step(&mut harness)));
    }
    let mut large = of(0, 180, 4);
    large.salt = 7;
    harness.submit(large).unwrap();
    for _ in 0..10 {
        assert_eq!(
            step(&mut harness).freed_slots,
            [],
            "it would still lack pages"
        );
    }
    harness.run_to_the_end(1);
}

#[test]
fn pages_that_the_urgent_request_itself_finds_make_no_way() {
    let settings = with(preempting(), |it| {
        it.runtime.num_pages = 16;
        it.pages.prefix_cache = true;
    });
    let mut harness = Harness::new(settings);
    let mut other = of(-10, 120, 100);
    other.salt = 7;
    harness.submit(other).unwrap();
    harness.submit(of(10, 100, 20)).unwrap();
    (0..6).for_each(|_| drop(step(&mut harness)));
    // It finds six of its eleven pages with the victim, which holds eight; one page is free.
    harness.submit(of(0, 170, 4)).unwrap();
    for _ in 0..10 {
        assert_eq!(
            step(&mut harness).freed_slots,
            [],
            "it would still lack two pages"
        );
    }
    harness.run_to_the_end(1);
}
