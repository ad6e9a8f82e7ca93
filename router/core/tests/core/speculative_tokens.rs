//! Claims about draft tokens: start is a bound, surplus pages are freed, no token is lost.

use plait_core::{Plan, RequestId, Scheduler, Settings};

use crate::fixtures::{harness, settings, step, with};
use crate::harness::{Harness, Spec};

/// Three drafts a row, on pages of four tokens.
fn drafting() -> Settings {
    with(settings(), |it| {
        it.runtime.draft_width = 3;
        it.pages.page_size = 4;
    })
}

fn lengths(plan: &Plan) -> Vec<u32> {
    plan.decode.iter().map(|row| row.length).collect()
}

/// The first decoder's draft does not fit any more, but the last token of the second does.
#[test]
fn a_decoder_that_does_not_fit_lets_a_shorter_one_pass() {
    let settings = with(settings(), |it| {
        it.runtime.draft_width = 3;
        it.scheduler.max_batch_tokens = Some(5);
        it.scheduler.long_prefill_token_threshold = Some(5);
    });
    let mut harness = harness(settings, [(1, 30), (1, 30), (1, 2)]);
    let mut num_met = 0;
    while !harness.scheduler.is_idle() {
        let plan = step(&mut harness);
        let lengths: Vec<u32> = plan.decode.iter().map(|row| row.length).collect();
        num_met += u32::from(plan.decode.len() == 2 && plan.num_tokens() == 5);
        assert!(lengths.iter().sum::<u32>() <= 5, "{lengths:?}");
    }
    assert!(num_met > 0, "the rest of a plan went to the shorter row");
}

#[test]
fn a_row_with_its_drafts_must_fit_a_step() {
    let error = Scheduler::new(with(drafting(), |it| {
        it.scheduler.max_batch_tokens = Some(3);
    }));
    let text = error.unwrap_err().to_string();
    assert!(text.starts_with("--max-batch-tokens is 3; a row with 3 draft tokens"));
}

#[test]
fn start_is_an_upper_bound_while_drafts_are_on_the_wire() {
    let mut harness = harness(drafting(), [(5, 20)]);
    let plans: Vec<Plan> = (0..3).map(|_| harness.plan().unwrap()).collect();
    let starts: Vec<u32> = plans[1..].iter().map(|plan| plan.decode[0].start).collect();
    assert_eq!(starts, [5, 9]);
    harness.run_to_the_end(3);
}

#[test]
fn rows_never_plan_past_the_tokens_that_are_due() {
    let mut harness = harness(drafting(), [(5, 7)]);
    harness.plan();
    assert_eq!(lengths(&harness.plan().unwrap()), [4]);
    assert_eq!(lengths(&harness.plan().unwrap()), [2], "1 + 4 + 2 are due");
    assert!(harness.plan().is_none());
    harness.run_to_the_end(3);
    assert_eq!(harness.clients[&RequestId(0)].emitted.len(), 7);
}

#[test]
fn rejected_draft_tokens_are_due_again() {
    // One of many planned tokens is accepted: a fully planned request must decode again.
    for num_prompt in 1..20 {
        let mut harness = harness(drafting(), [(num_prompt, 9)]);
        harness.run_to_the_end(3);
    }
}

#[test]
fn pages_leased_for_drafts_that_were_not_accepted_come_back() {
    let mut harness = harness(drafting(), [(3, 60)]);
    let mut num_trimmed = 0;
    while !harness.scheduler.is_idle() {
        let plan = step(&mut harness);
        num_trimmed += plan.trimmed_slots.len();
        let client = &harness.clients[&RequestId(0)];
        let num_tokens = 3 + u32::try_from(client.emitted.len()).unwrap();
        if client.ended.is_none() {
            let leased = harness.scheduler.stats().pages.leased;
            assert_eq!(leased, (num_tokens - 1).div_ceil(4), "no more than is held");
        }
    }
    assert!(num_trimmed > 0);
}

#[test]
fn only_accepted_tokens_are_published() {
    let settings = with(drafting(), |it| it.pages.prefix_cache = true);
    let mut harness = harness(settings, [(5, 30)]);
    harness.run_to_the_end(2);
    let client = &harness.clients[&RequestId(0)];
    let mut prompt = client.spec.prompt.clone();
    prompt.extend(&client.emitted);
    let follow = Spec {
        prompt,
        ..Spec::new(1, 5)
    };
    harness.submit(follow).unwrap();
    // 34 tokens have KV; another token would be sampled if a draft's had been published as theirs.
    assert_eq!(step(&mut harness).new_slots[0].num_cached, 32);
    harness.run_to_the_end(2);
}

#[test]
fn a_stop_id_among_accepted_tokens_ends_the_output_there() {
    let free_run = {
        let mut harness = harness(drafting(), [(5, 20)]);
        harness.run_to_the_end(1);
        harness.clients[&RequestId(0)].emitted.clone()
    };
    for stop in &free_run {
        let mut harness = Harness::new(drafting());
        let spec = Spec {
            stop_ids: vec![*stop],
            ..Spec::new(5, 20)
        };
        harness.submit(spec).unwrap();
        harness.run_to_the_end(2);
        let end = free_run.iter().position(|token| token == stop).unwrap() + 1;
        assert_eq!(harness.clients[&RequestId(0)].emitted, free_run[..end]);
    }
}

#[test]
fn decoders_with_drafts_get_rows_within_the_bound() {
    let settings = with(drafting(), |it| {
        it.scheduler.max_batch_tokens = Some(8);
        it.scheduler.mixed = false;
    });
    let mut harness = harness(settings, [(1, 200); 5]);
    while !step(&mut harness).prefill.is_empty() {}
    for _ in 0..10 {
        let rows = (0..3).flat_map(|_| step(&mut harness).decode);
        let mut served: Vec<u64> = rows.map(|row| row.request.0).collect();
        served.sort_unstable();
        served.dedup();
        assert_eq!(served.len(), 5, "two rows of four tokens a plan");
    }
}
