//! Claims about preemption: which request loses its pages, which are parked, and that no token is lost.

use plait_core::{
    Event, FinishReason, Output, RequestId, Settings, StepId, StepResult, UnexpectedResult,
};

use crate::fixtures::{chunks, decoded, harness, settings, step, with};
use crate::harness::{Harness, Spec};

/// Four pages of four tokens.
fn four_pages() -> Settings {
    with(settings(), |it| {
        it.pages.page_size = 4;
        it.runtime.num_pages = 4;
    })
}

#[test]
fn the_last_in_order_is_preempted_and_loses_no_token() {
    let mut harness = harness(four_pages(), [(4, 8), (4, 8)]);
    let plans: Vec<_> = (0..6).map(|_| step(&mut harness)).collect();
    assert_eq!(decoded(&plans[4]), [0, 1], "both fill their second page");
    assert_eq!(
        decoded(&plans[5]),
        [0],
        "the first needs a third one, the second gives way"
    );
    assert_eq!(plans[5].freed_slots.len(), 1);
    harness.run_to_the_end(2);
    assert_eq!(harness.scheduler.stats().counts.num_preemptions, 1);
}

#[test]
fn a_preempted_request_computes_prompt_and_output_again_and_goes_on() {
    let mut harness = harness(four_pages(), [(4, 6), (4, 8)]);
    (0..6).for_each(|_| drop(step(&mut harness)));
    let emitted = harness.clients[&RequestId(1)].emitted.len();
    let back = step(&mut harness);
    assert_eq!(emitted, 5);
    assert_eq!(chunks(&back), [(1, 0, 9)]);
    assert_eq!(
        (back.new_slots[0].next_output, back.new_slots[0].waited),
        (5, None)
    );
    assert_eq!(
        back.token_ids[4..],
        harness.clients[&RequestId(1)].emitted[..5]
    );
}

#[test]
fn a_request_with_rows_on_the_wire_is_held_and_its_tokens_are_shown() {
    let mut harness = harness(four_pages(), [(4, 8), (4, 8)]);
    (0..4).for_each(|_| drop(step(&mut harness)));
    assert_eq!(decoded(&harness.plan().unwrap()), [0, 1]);
    harness.submit(Spec::new(1, 1)).unwrap();
    assert!(
        harness.plan().is_none(),
        "the second is held, the first waits for its pages, nobody is admitted"
    );
    assert_eq!(harness.complete().len(), 2, "the held one's token is shown");
    assert_eq!(decoded(&harness.plan().unwrap()), [0]);
    harness.complete();
    harness.run_to_the_end(2);
}

#[test]
fn no_request_is_admitted_while_one_is_held() {
    let six_pages = with(four_pages(), |it| it.runtime.num_pages = 6);
    let mut harness = harness(six_pages, [(4, 8), (5, 4), (4, 8)]);
    (0..3).for_each(|_| drop(step(&mut harness)));
    (0..2).for_each(|_| drop(harness.plan().unwrap()));
    assert!(
        harness.plan().is_none(),
        "the first waits for the pages of the third"
    );
    harness.submit(Spec::new(1, 1)).unwrap();
    harness.complete();
    assert!(
        harness.clients[&RequestId(1)].ended.is_some(),
        "the second ends, its two pages are free"
    );
    let plan = harness.plan().unwrap();
    assert_eq!(
        (decoded(&plan), plan.new_slots.len()),
        (vec![0], 0),
        "one for the first, none for the newcomer yet"
    );
    harness.run_to_the_end(2);
}

/// Of eight pages of four tokens an older prefill wants three more, where two are free.
#[test]
fn a_chunk_shrinks_to_the_free_pages_before_anybody_is_preempted() {
    let settings = with(four_pages(), |it| {
        it.runtime.num_pages = 8;
        it.scheduler.max_batch_tokens = Some(20);
        it.scheduler.long_prefill_token_threshold = Some(12);
    });
    let mut harness = harness(settings, [(7, 12)]);
    step(&mut harness);
    let older = Spec {
        priority: -1,
        ..Spec::new(24, 4)
    };
    harness.submit(older).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(1, 0, 12)]);
    let plan = step(&mut harness);
    assert_eq!(chunks(&plan), [(1, 12, 8)]);
    assert_eq!((decoded(&plan), plan.freed_slots.len()), (vec![0], 0));
    harness.run_to_the_end(1);
}

#[test]
fn a_row_of_this_plan_is_never_a_victim() {
    let mut harness = harness(four_pages(), [(4, 8)]);
    (0..3).for_each(|_| drop(step(&mut harness)));
    harness.submit(Spec::new(4, 8)).unwrap();
    while !harness.scheduler.is_idle() {
        let plan = step(&mut harness);
        let rows: Vec<_> = plan
            .prefill
            .iter()
            .map(|row| row.slot)
            .chain(plan.decode.iter().map(|row| row.slot))
            .collect();
        let is_new = |slot| plan.new_slots.iter().any(|new| new.slot == slot);
        assert!(
            plan.freed_slots
                .iter()
                .all(|slot| !rows.contains(slot) || is_new(*slot))
        );
    }
}

#[test]
fn the_last_in_order_is_preempted_itself_if_no_request_comes_after_it() {
    let mut harness = harness(four_pages(), [(6, 8), (7, 9)]);
    (0..2).for_each(|_| drop(step(&mut harness)));
    let plan = step(&mut harness);
    assert_eq!(decoded(&plan), [0], "the second needs a third page");
    assert_eq!(plan.freed_slots.len(), 1);
    assert_eq!(harness.scheduler.stats().counts.carryover.pages, 1);
    harness.run_to_the_end(1);
}

#[test]
fn an_abort_parks_pages_until_the_last_step_that_names_them() {
    let mut harness = harness(settings(), [(20, 9)]);
    (0..3).for_each(|_| drop(harness.plan()));
    harness.abort(RequestId(0));
    let parked = |harness: &Harness| harness.scheduler.stats().pages.parked;
    assert_eq!(
        (harness.scheduler.stats().pages.leased, parked(&harness)),
        (0, 2)
    );
    assert!(
        harness.complete().is_empty() && harness.complete().is_empty(),
        "its tokens are dropped"
    );
    assert_eq!(parked(&harness), 2);
    harness.complete();
    assert_eq!((parked(&harness), harness.scheduler.is_idle()), (0, true));
}

#[test]
fn no_request_is_preempted_if_parked_pages_suffice() {
    let six_pages = with(four_pages(), |it| it.runtime.num_pages = 6);
    let mut harness = harness(six_pages, [(4, 8), (5, 8), (4, 8)]);
    (0..3).for_each(|_| drop(step(&mut harness)));
    harness.plan();
    harness.abort(RequestId(1));
    harness.plan();
    assert!(harness.plan().is_none(), "both need a page, two are parked");
    harness.complete();
    assert_eq!(decoded(&harness.plan().unwrap()), [0, 2]);
    harness.run_to_the_end(2);
    assert_eq!(harness.scheduler.stats().counts.num_preemptions, 0);
}

#[test]
fn a_parked_slot_is_not_given_out() {
    let mut harness = harness(
        with(settings(), |it| it.scheduler.max_seqs = Some(1)),
        [(20, 9), (5, 1)],
    );
    harness.plan();
    harness.abort(RequestId(0));
    assert!(harness.plan().is_none());
    harness.complete();
    assert_eq!(harness.plan().unwrap().new_slots[0].request, RequestId(1));
    harness.complete();
}

#[test]
fn a_waiting_request_can_be_aborted() {
    let mut harness = harness(
        with(settings(), |it| it.scheduler.max_seqs = Some(1)),
        [(20, 9), (5, 1)],
    );
    step(&mut harness);
    assert_eq!(harness.abort(RequestId(1)).len(), 1);
    assert!(harness.abort(RequestId(1)).is_empty(), "it ends once");
    harness.run_to_the_end(2);
}

#[test]
fn a_stop_string_ends_a_request_and_drops_what_is_on_the_wire() {
    let mut harness = harness(settings(), [(5, 20)]);
    step(&mut harness);
    (0..2).for_each(|_| drop(harness.plan()));
    let outputs = harness.stop(RequestId(0));
    assert_eq!(
        outputs,
        [Output::Finished {
            request: RequestId(0),
            reason: FinishReason::Stop
        }]
    );
    assert!(harness.complete().is_empty() && harness.complete().is_empty());
    harness.run_to_the_end(1);
}

#[test]
fn what_is_sampled_after_a_stop_id_is_dropped() {
    let free_run = {
        let mut harness = harness(settings(), [(5, 20)]);
        harness.run_to_the_end(1);
        harness.clients[&RequestId(0)].emitted.clone()
    };
    let mut harness = Harness::new(settings());
    harness
        .submit(Spec {
            stop_ids: vec![free_run[3]],
            ..Spec::new(5, 20)
        })
        .unwrap();
    harness.run_to_the_end(3);
    let num_until_stop = free_run
        .iter()
        .position(|token| *token == free_run[3])
        .unwrap()
        + 1;
    assert_eq!(
        harness.clients[&RequestId(0)].emitted,
        free_run[..num_until_stop]
    );
}

#[test]
fn prompt_logprobs_are_reported_once_though_a_preempted_prompt_is_computed_twice() {
    let mut harness = Harness::new(with(settings(), |it| {
        it.pages.page_size = 4;
        it.runtime.num_pages = 5;
        it.scheduler.long_prefill_token_threshold = Some(4);
    }));
    harness.submit(Spec::new(4, 12)).unwrap();
    harness
        .submit(Spec {
            prompt_logprobs: true,
            ..Spec::new(10, 4)
        })
        .unwrap();
    harness.run_to_the_end(1);
    assert!(harness.scheduler.stats().counts.num_preemptions > 0);
}

#[test]
fn a_result_that_fits_no_step_is_an_error_and_changes_nothing() {
    let mut harness = harness(settings(), [(5, 20)]);
    harness.plan();
    let mut wrong = |step, num_accepted: &[u32], token_ids: &[u32]| {
        let result = StepResult {
            step: StepId(step),
            num_accepted,
            token_ids,
        };
        harness
            .scheduler
            .advance(Event::Result(result), &mut Vec::new())
            .unwrap_err()
    };
    let step = StepId(1);
    assert_eq!(
        wrong(2, &[1], &[7]),
        UnexpectedResult::Step {
            given: StepId(2),
            expected: Some(step)
        }
    );
    assert_eq!(
        wrong(1, &[], &[]),
        UnexpectedResult::Rows {
            step,
            given: 0,
            expected: 1
        }
    );
    assert_eq!(
        wrong(1, &[2], &[7, 7]),
        UnexpectedResult::Accepted {
            step,
            row: 0,
            given: 2,
            possible: 1..=1
        }
    );
    assert_eq!(
        wrong(1, &[1], &[]),
        UnexpectedResult::Tokens {
            step,
            given: 0,
            expected: 1
        }
    );
    harness.complete();
    harness.run_to_the_end(2);
}
