//! Claims about requests whose tokens are sampled under masks that may come late.

use plait_core::{Event, Output, RequestId, Settings, StepId, StepResult, UnexpectedResult};

use crate::fixtures::{chunks, decoded, settings, step, with};
use crate::harness::{Harness, Spec};
use crate::masks::Lateness;

const FREE: RequestId = RequestId(0);
const MASKED: RequestId = RequestId(1);

/// A free request and a masked one, both decoding, and no mask late so far.
fn decoding(settings: Settings) -> Harness {
    let mut harness = Harness::new(settings);
    harness.masks.lateness = Lateness::Never;
    harness.submit(Spec::new(5, 40)).unwrap();
    harness.submit(masked(5, 40)).unwrap();
    step(&mut harness);
    harness
}

fn masked(num_prompt: u32, max_tokens: u32) -> Spec {
    Spec {
        is_masked: true,
        ..Spec::new(num_prompt, max_tokens)
    }
}

fn num_emitted(harness: &Harness, request: RequestId) -> usize {
    harness.clients[&request].emitted.len()
}

#[test]
fn a_late_mask_slows_its_own_request_alone() {
    let mut harness = decoding(settings());
    harness.masks.lateness = Lateness::Always;
    assert_eq!(decoded(&step(&mut harness)), [0, 1]);
    for _ in 0..10 {
        assert_eq!(decoded(&step(&mut harness)), [0], "its mask is late");
    }
    assert_eq!(num_emitted(&harness, FREE), 12, "a token in every step");
    assert_eq!(num_emitted(&harness, MASKED), 1);
    harness.mask_ready(MASKED);
    assert_eq!(decoded(&step(&mut harness)), [0, 1]);
    assert_eq!(num_emitted(&harness, MASKED), 2);
    harness.run_to_the_end(2);
}

#[test]
fn a_row_behind_one_that_was_left_out_accepts_nothing_and_the_request_goes_on_behind_it() {
    let mut harness = decoding(settings());
    harness.masks.lateness = Lateness::Always;
    let first = harness.plan().unwrap();
    let second = harness.plan().unwrap();
    assert_eq!(second.decode[1].start, first.decode[1].start + 1);
    harness.complete();
    harness.mask_ready(MASKED);
    assert_eq!(
        decoded(&harness.plan().unwrap()),
        [0],
        "a row of it is on the wire"
    );
    harness.complete();
    let again = harness.plan().unwrap();
    assert_eq!(
        again.decode[1], first.decode[1],
        "the same token at the same position"
    );
    harness.run_to_the_end(2);
}

#[test]
fn a_mask_that_comes_before_the_result_that_lacks_it_is_not_forgotten() {
    let mut harness = decoding(settings());
    harness.masks.lateness = Lateness::Always;
    harness.plan().unwrap();
    harness.mask_ready(MASKED);
    harness.complete();
    assert_eq!(decoded(&step(&mut harness)), [0, 1]);
}

#[test]
fn the_last_token_of_a_prompt_without_its_mask_is_computed_again() {
    let mut harness = Harness::new(settings());
    harness.masks.lateness = Lateness::Always;
    let request = harness.submit(masked(32, 4)).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(0, 0, 32)]);
    assert!(
        harness.plan().is_none(),
        "nothing to do until the mask is there"
    );
    assert!(!harness.scheduler.is_idle());
    harness.mask_ready(request);
    assert_eq!(chunks(&step(&mut harness)), [(0, 31, 1)]);
    assert_eq!(num_emitted(&harness, request), 1);
    harness.run_to_the_end(1);
}

#[test]
fn a_page_that_is_computed_again_behind_a_flush_is_found() {
    let settings = with(settings(), |it| it.pages.prefix_cache = true);
    let mut harness = Harness::new(settings);
    harness.masks.lateness = Lateness::Always;
    let request = harness.submit(masked(16, 4)).unwrap();
    step(&mut harness);
    harness.flush();
    harness.mask_ready(request);
    assert_eq!(chunks(&step(&mut harness)), [(0, 15, 1)]);
    harness.submit(Spec::new(40, 4)).unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 16);
    harness.run_to_the_end(1);
}

#[test]
fn a_page_that_may_be_computed_again_is_not_shared_before_its_token_is_sampled() {
    let settings = with(settings(), |it| it.pages.prefix_cache = true);
    let mut harness = Harness::new(settings);
    harness.masks.lateness = Lateness::Always;
    let request = harness.submit(masked(32, 4)).unwrap();
    step(&mut harness);
    harness.submit(Spec::new(40, 4)).unwrap();
    assert_eq!(
        step(&mut harness).new_slots[0].num_cached,
        16,
        "one page of two"
    );
    harness.mask_ready(request);
    step(&mut harness);
    harness.submit(Spec::new(41, 4)).unwrap();
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 32);
    harness.run_to_the_end(2);
}

#[test]
fn a_request_that_waits_for_its_mask_gives_its_pages_to_one_before_it() {
    let settings = with(settings(), |it| it.runtime.num_pages = 4);
    let mut harness = Harness::new(settings);
    harness.submit(Spec::new(16, 40)).unwrap();
    harness.submit(masked(16, 20)).unwrap();
    harness.masks.lateness = Lateness::Always;
    step(&mut harness);
    assert_eq!(harness.masks.late.len(), 1);
    while harness.clients[&FREE].ended.is_none() {
        step(&mut harness);
    }
    assert_eq!(harness.scheduler.stats().counts.num_preemptions, 1);
    harness.masks.lateness = Lateness::Sometimes;
    harness.run_to_the_end(2);
}

#[test]
fn one_that_ends_while_its_mask_is_late_gives_everything_back() {
    for stops in [true, false] {
        let mut harness = decoding(settings());
        harness.masks.lateness = Lateness::Always;
        harness.plan().unwrap();
        harness.plan().unwrap();
        harness.complete();
        if stops {
            harness.stop(MASKED);
        } else {
            harness.abort(MASKED);
        }
        harness.mask_ready(MASKED);
        harness.run_to_the_end(2);
    }
}

#[test]
fn only_rows_that_need_a_mask_may_accept_nothing() {
    let mut harness = decoding(settings());
    harness.plan().unwrap();
    let mut advance = |num_accepted: &[u32], token_ids: &[u32]| {
        let mut outputs = Vec::new();
        let result = StepResult {
            step: StepId(2),
            num_accepted,
            token_ids,
        };
        let advanced = harness
            .scheduler
            .advance(Event::Result(result), &mut outputs);
        advanced.map(|()| outputs)
    };
    let refused = UnexpectedResult::Accepted {
        step: StepId(2),
        row: 0,
        given: 0,
        possible: 1..=1,
    };
    assert_eq!(advance(&[0, 1], &[3]), Err(refused));
    let outputs = advance(&[1, 0], &[3]).unwrap();
    assert!(matches!(
        outputs[..],
        [Output::Tokens { request: FREE, .. }]
    ));
}

#[test]
fn a_token_behind_one_that_was_not_sampled_is_refused() {
    let mut harness = decoding(settings());
    harness.plan().unwrap();
    harness.plan().unwrap();
    let mut result = |step, num_accepted: &[u32], token_ids: &[u32]| {
        harness.scheduler.advance(
            Event::Result(StepResult {
                step: StepId(step),
                num_accepted,
                token_ids,
            }),
            &mut Vec::new(),
        )
    };
    result(2, &[1, 0], &[3]).unwrap();
    let refused = UnexpectedResult::Accepted {
        step: StepId(3),
        row: 1,
        given: 1,
        possible: 0..=0,
    };
    assert_eq!(result(3, &[1, 1], &[3, 4]), Err(refused));
}
