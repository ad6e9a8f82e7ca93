//! Claims about requests with equal prefixes that run side by side: each prefix is computed once.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use plait_core::{
    Event, Micros, Output, Plan, Request, RequestId, Scheduler, Settings, StepResult, TenantId,
    TokenId,
};

use crate::fixtures::{chunks, harness, settings, step, with};
use crate::harness::{Harness, Spec};

/// Pages of four tokens, chunks of eight.
fn sharing() -> Settings {
    with(settings(), |it| {
        it.pages.page_size = 4;
        it.pages.prefix_cache = true;
        it.scheduler.long_prefill_token_threshold = Some(8);
    })
}

/// A server's: many pages of `page_size` tokens, `max_batch_tokens` a plan.
fn large(max_batch_tokens: u32, chunk: u32, page_size: u32) -> Settings {
    with(settings(), |it| {
        it.scheduler.max_batch_tokens = Some(max_batch_tokens);
        it.scheduler.long_prefill_token_threshold = Some(chunk);
        it.scheduler.max_seqs = Some(256);
        it.scheduler.max_queue = 10_000;
        it.scheduler.max_queue_tokens = 1 << 40;
        it.pages.page_size = page_size;
        it.pages.prefix_cache = true;
        it.runtime.num_pages = 20_000;
        it.runtime.max_rows = None;
        it.runtime.max_model_len = 1 << 17;
    })
}

/// A prompt that begins as the others do and ends in eight tokens of its own.
fn shared_prompt(num_shared: u32, own: u32) -> Vec<TokenId> {
    (0..num_shared).chain([1_000_000 + own; 8]).collect()
}

fn submit(scheduler: &mut Scheduler, prompt: Vec<TokenId>, priority: i32) -> RequestId {
    let request = Request {
        prompt: prompt.into(),
        max_tokens: 4,
        stop_ids: [].into(),
        num_choices: NonZeroU32::MIN,
        prompt_logprobs: false,
        is_masked: false,
        num_slot_words: 0,
        pooled: None,
        priority,
        salt: 0,
        tenant: TenantId(0),
        weight: NonZeroU32::MIN,
    };
    scheduler.submit(request, Micros(0)).unwrap()
}

fn complete(scheduler: &mut Scheduler, plan: &Plan) -> Vec<Output> {
    let num = plan.prefill.iter().filter(|row| row.is_last_chunk).count() + plan.decode.len();
    let mut outputs = Vec::new();
    let result = StepResult {
        step: plan.step,
        num_accepted: &vec![1; num],
        token_ids: &vec![1; num],
    };
    scheduler
        .advance(Event::Result(result), &mut outputs)
        .unwrap();
    outputs
}

/// Runs to the end with `depth` steps in flight, and calls `on_plan` after each plan. Returns the prompt tokens
/// that were computed.
fn computed_tokens(
    scheduler: &mut Scheduler,
    depth: usize,
    mut on_plan: impl FnMut(&mut Scheduler, &Plan),
) -> u64 {
    let (mut in_flight, mut num_tokens) = (VecDeque::new(), 0);
    while !scheduler.is_idle() {
        while in_flight.len() < depth
            && let Some(plan) = scheduler.plan(Micros(0))
        {
            num_tokens += u64::from(plan.num_prefill_tokens());
            on_plan(scheduler, &plan);
            in_flight.push_back(plan);
        }
        let plan: Plan = in_flight.pop_front().expect("a step is in flight");
        complete(scheduler, &plan);
    }
    num_tokens
}

/// Asserts that what was computed is at most 1.1 times the distinct tokens.
#[track_caller]
fn assert_shared(num_computed: u64, num_distinct: u32) {
    assert!(
        num_computed * 10 <= u64::from(num_distinct) * 11,
        "{num_computed} tokens computed of {num_distinct} distinct ones"
    );
}

#[test]
fn a_burst_of_requests_computes_its_prefix_once_at_any_chunk_size() {
    for depth in [1, 2, 3] {
        for chunk in [8192, 1000, 512, 100, 24] {
            for (num, num_shared) in [(64, 1024), (16, 4096), (64, 4096)] {
                let mut scheduler = Scheduler::new(large(8192, chunk, 16)).unwrap();
                for own in 0..num {
                    submit(&mut scheduler, shared_prompt(num_shared, own), 0);
                }
                let num_computed = computed_tokens(&mut scheduler, depth, |_, _| ());
                assert_shared(num_computed, num_shared + 8 * num);
            }
        }
    }
}

#[test]
fn long_prompts_in_lockstep_compute_their_prefix_once() {
    for chunk in [512, 2048, 700] {
        for depth in [1, 2] {
            let mut scheduler = Scheduler::new(large(2048, chunk, 64)).unwrap();
            for own in 0..4 {
                submit(&mut scheduler, shared_prompt(32_768, own), 0);
            }
            let num_computed = computed_tokens(&mut scheduler, depth, |_, _| ());
            assert_shared(num_computed, 32_768 + 4 * 8);
            let num_hits = scheduler.stats().counts.num_hit_tokens;
            assert_eq!(num_computed + num_hits, 4 * (32_768 + 8));
        }
    }
}

/// Requests that go first meet one that has computed a part of the same prompt.
#[test]
fn requests_of_higher_priority_share_what_is_being_computed() {
    for chunk in [512, 300] {
        for depth in [1, 2] {
            let mut scheduler = Scheduler::new(large(600, chunk, 16)).unwrap();
            submit(&mut scheduler, shared_prompt(16_384, 0), 5);
            let mut left = 4;
            let num_computed = computed_tokens(&mut scheduler, depth, |scheduler, plan| {
                if left > 0 && plan.step.0.is_multiple_of(3) {
                    left -= 1;
                    submit(scheduler, shared_prompt(16_384, 1 + left), 0);
                }
            });
            assert_shared(num_computed, 16_384 + 5 * 8);
        }
    }
}

#[test]
fn prompts_that_part_in_a_page_share_the_pages_before_it() {
    let mut harness = Harness::new(sharing());
    for own in [1, 2, 3] {
        let prompt = (0..18).chain([30 + own; 9]).collect();
        harness
            .submit(Spec {
                prompt,
                ..Spec::new(1, 2)
            })
            .unwrap();
    }
    let (mut num_computed, mut num_plans) = (0, 0);
    while num_plans < 12 {
        num_computed += harness.plan().map_or(0, |plan| plan.num_prefill_tokens());
        harness.complete();
        num_plans += 1;
        if harness.scheduler.stats().num_waiting == 0 && harness.num_in_flight() == 0 {
            break;
        }
    }
    harness.run_to_the_end(2);
    assert!(num_computed <= 16 + 3 * 11, "{num_computed}");
}

#[test]
fn a_request_waits_for_the_row_that_computes_its_next_page_and_others_pass_it() {
    let mut harness = harness(sharing(), [(20, 2), (20, 2)]);
    let other = Spec {
        salt: 1,
        ..Spec::new(6, 2)
    };
    harness.submit(other).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(0, 0, 8), (2, 0, 6)]);
    assert_eq!(chunks(&step(&mut harness)), [(0, 8, 8)]);
    assert_eq!(chunks(&step(&mut harness)), [(0, 16, 4), (1, 16, 4)]);
    harness.run_to_the_end(2);
}

#[test]
fn who_passes_leaves_the_one_that_waits_a_slot() {
    let settings = with(sharing(), |it| it.scheduler.max_seqs = Some(3));
    let mut harness = harness(settings, [(20, 2), (20, 2)]);
    for salt in [1, 2] {
        let other = Spec {
            salt,
            ..Spec::new(6, 9)
        };
        harness.submit(other).unwrap();
    }
    assert_eq!(chunks(&step(&mut harness)), [(0, 0, 8), (2, 0, 6)]);
    step(&mut harness);
    let plan = step(&mut harness);
    assert_eq!(chunks(&plan), [(0, 16, 4), (1, 16, 4)]);
    harness.run_to_the_end(2);
}

#[test]
fn who_passes_leaves_the_one_that_waits_its_pages() {
    let settings = with(sharing(), |it| it.runtime.num_pages = 9);
    let mut harness = harness(settings, [(20, 2), (24, 2)]);
    let other = Spec {
        salt: 1,
        ..Spec::new(4, 9)
    };
    harness.submit(other).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(0, 0, 8)]);
    harness.run_to_the_end(2);
}

#[test]
fn pages_of_an_aborted_request_are_found_while_its_step_is_in_flight() {
    for depth in [1, 2] {
        let mut harness = harness(sharing(), [(20, 2), (20, 2)]);
        harness.plan();
        harness.abort(RequestId(0));
        if depth == 1 {
            harness.complete();
        }
        assert_eq!(chunks(&harness.plan().unwrap()), [(1, 8, 8)]);
        harness.run_to_the_end(depth);
    }
}

#[test]
fn nobody_waits_for_a_request_that_is_gone() {
    let mut harness = harness(sharing(), [(40, 2), (40, 2), (40, 2)]);
    harness.plan();
    harness.plan();
    harness.abort(RequestId(0));
    assert_eq!(chunks(&harness.plan().unwrap()), [(1, 16, 8)]);
    assert_eq!(chunks(&harness.plan().unwrap()), [(1, 24, 8)]);
    harness.abort(RequestId(1));
    assert_eq!(chunks(&harness.plan().unwrap()), [(2, 32, 8)]);
    harness.run_to_the_end(2);
}

/// Drafts leave four tokens of the second plan: too few for the long prompt, enough for the short one.
#[test]
fn a_prefill_ends_the_page_it_is_in_and_adopts_those_behind_it() {
    let settings = with(sharing(), |it| {
        it.pages.page_size = 2;
        it.scheduler.max_batch_tokens = Some(10);
        it.scheduler.long_prefill_token_threshold = Some(5);
        it.runtime.draft_width = 1;
    });
    let mut harness = harness(settings, [(20, 2), (1, 40), (1, 40), (1, 40)]);
    assert_eq!(chunks(&step(&mut harness))[0], (0, 0, 5));
    harness.submit(Spec::new(8, 2)).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(4, 4, 4)]);
    for request in 1..4 {
        harness.abort(RequestId(request));
    }
    assert_eq!(chunks(&step(&mut harness)), [(0, 5, 1)]);
    assert_eq!(chunks(&step(&mut harness)), [(0, 8, 5)]);
    assert_eq!(harness.scheduler.stats().counts.num_hit_tokens, 4 + 2);
    harness.run_to_the_end(2);
}
