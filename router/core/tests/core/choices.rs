//! Claims about several answers to one prompt: it is computed once, with and without a prefix cache.

use std::num::NonZeroU32;

use plait_core::{
    Event, Micros, Plan, Policy, Refusal, Request, RequestId, Scheduler, Settings, StepResult,
    TenantId, TokenId,
};

use crate::fixtures::{chunks, settings, step, with};
use crate::harness::{Harness, Spec};

const PAGE: u32 = 16;

/// A server's: plenty of pages, so that nobody is preempted.
fn server(prefix_cache: bool, max_batch_tokens: u32) -> Settings {
    with(settings(), |it| {
        it.scheduler.max_batch_tokens = Some(max_batch_tokens);
        it.scheduler.long_prefill_token_threshold = None;
        it.scheduler.max_seqs = Some(128);
        it.pages.prefix_cache = prefix_cache;
        it.pages.page_size = PAGE;
        it.pages.watermark = None;
        it.runtime.num_pages = 4096;
        it.runtime.max_rows = None;
        it.runtime.max_model_len = 1 << 14;
        it.scheduler.max_queue_tokens = 1 << 20;
    })
}

/// Pages of four tokens, chunks of eight, no prefix cache.
fn small() -> Settings {
    with(settings(), |it| {
        it.pages.page_size = 4;
        it.scheduler.long_prefill_token_threshold = Some(8);
    })
}

fn with_choices(num_choices: u32, num_prompt: u32, max_tokens: u32) -> Spec {
    Spec {
        num_choices,
        ..Spec::new(num_prompt, max_tokens)
    }
}

fn request(prompt: &[TokenId], num_choices: u32) -> Request {
    Request {
        prompt: prompt.into(),
        max_tokens: 4,
        stop_ids: [].into(),
        num_choices: NonZeroU32::new(num_choices).unwrap(),
        prompt_logprobs: false,
        num_slot_words: 0,
        pooled: None,
        is_masked: false,
        priority: 0,
        tenant: TenantId(0),
        weight: NonZeroU32::MIN,
        salt: 0,
    }
}

fn complete(scheduler: &mut Scheduler, plan: &Plan) {
    let num = plan.prefill.iter().filter(|row| row.is_last_chunk).count() + plan.decode.len();
    let result = StepResult {
        step: plan.step,
        num_accepted: &vec![1; num],
        token_ids: &vec![1; num],
    };
    scheduler
        .advance(Event::Result(result), &mut Vec::new())
        .unwrap();
}

/// Prompt tokens that a scheduler computes until it is idle, one plan after the other.
fn computed_tokens(scheduler: &mut Scheduler) -> u32 {
    let mut num_tokens = 0;
    while let Some(plan) = scheduler.plan(Micros(0)) {
        num_tokens += plan.num_prefill_tokens();
        complete(scheduler, &plan);
    }
    assert!(scheduler.is_idle());
    num_tokens
}

#[test]
fn a_prompt_of_2048_tokens_is_computed_once_for_eight_choices() {
    let prompt: Vec<TokenId> = (0..2048).collect();
    for prefix_cache in [true, false] {
        for max_batch_tokens in [8192, 2048, 700, 64] {
            for num_prompt in [2048, 2047, 2040] {
                let settings = server(prefix_cache, max_batch_tokens);
                let mut scheduler = Scheduler::new(settings).unwrap();
                let request = request(&prompt[..num_prompt as usize], 8);
                scheduler.submit(request, Micros(0)).unwrap();
                let num_computed = computed_tokens(&mut scheduler);
                let tail = (num_prompt - 1) % PAGE + 1;
                assert_eq!(
                    num_computed,
                    num_prompt + 7 * tail,
                    "cache {prefix_cache}, {max_batch_tokens} a plan"
                );
                assert!(num_computed <= 2048 + 8 * PAGE);
            }
        }
    }
}

/// The last choice has its first token one step after the first one.
#[test]
fn all_choices_get_their_first_rows_one_plan_after_the_first() {
    for prefix_cache in [true, false] {
        let mut scheduler = Scheduler::new(server(prefix_cache, 8192)).unwrap();
        let prompt: Vec<TokenId> = (0..2048).collect();
        scheduler.submit(request(&prompt, 8), Micros(0)).unwrap();
        let first = scheduler.plan(Micros(0)).unwrap();
        assert_eq!(chunks(&first), [(0, 0, 2048)]);
        let second = scheduler.plan(Micros(0)).unwrap();
        let rest: Vec<_> = (1..8).map(|choice| (choice, 2032, 16)).collect();
        assert_eq!(chunks(&second), rest);
    }
}

#[test]
fn choices_wait_for_the_row_that_computes_their_prompt_and_share_its_full_pages() {
    let mut harness = Harness::new(small());
    harness.submit(with_choices(3, 18, 2)).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(0, 0, 8)]);
    assert_eq!(chunks(&step(&mut harness)), [(0, 8, 8)]);
    assert_eq!(
        chunks(&step(&mut harness)),
        [(0, 16, 2), (1, 16, 2), (2, 16, 2)]
    );
    let pages = harness.scheduler.stats().pages;
    assert_eq!(pages.leased, 4 + 3, "four shared pages, and one of each");
    harness.run_to_the_end(1);
}

#[test]
fn others_pass_choices_that_wait_and_find_none_of_their_pages() {
    let mut harness = Harness::new(small());
    harness.submit(with_choices(3, 18, 2)).unwrap();
    harness.submit(Spec::new(18, 2)).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(0, 0, 8), (3, 0, 8)]);
    harness.run_to_the_end(2);
    assert_eq!(harness.scheduler.stats().counts.num_hit_tokens, 0);
}

/// Choices reserve their own last pages, not the whole prompt each.
#[test]
fn a_small_pool_has_room_for_others_beside_many_choices() {
    let settings = with(small(), |it| it.runtime.num_pages = 16);
    let mut harness = Harness::new(settings);
    harness.submit(with_choices(5, 18, 2)).unwrap();
    let other = Spec {
        salt: 1,
        ..Spec::new(7, 2)
    };
    harness.submit(other).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(0, 0, 8), (5, 0, 7)]);
    harness.run_to_the_end(2);
}

/// Two slots: the third choice comes when the first has ended, and finds the pages that nobody leases.
#[test]
fn a_choice_that_finds_no_slot_comes_later_from_pages_that_are_kept_for_it() {
    let settings = with(small(), |it| it.scheduler.max_seqs = Some(1));
    let mut harness = Harness::new(settings);
    harness.submit(with_choices(3, 18, 2)).unwrap();
    let mut rows = Vec::new();
    while let Some(plan) = harness.plan() {
        rows.extend(chunks(&plan));
        harness.complete();
    }
    assert_eq!(
        rows,
        [(0, 0, 8), (0, 8, 8), (0, 16, 2), (1, 16, 2), (2, 16, 2)]
    );
    harness.check_the_end();
    assert_eq!(harness.scheduler.stats().pages.free, 64, "nothing is kept");
}

#[test]
fn others_take_the_kept_pages_before_anybody_is_preempted() {
    let settings = with(small(), |it| {
        it.scheduler.max_seqs = Some(1);
        it.runtime.num_pages = 8;
    });
    let mut harness = Harness::new(settings);
    let first = harness.submit(with_choices(2, 18, 2)).unwrap();
    while harness.clients[&first].ended.is_none() {
        step(&mut harness);
    }
    assert_eq!(harness.scheduler.stats().pages.cached, 4);
    let urgent = Spec {
        priority: -1,
        ..Spec::new(24, 2)
    };
    harness.submit(urgent).unwrap();
    harness.run_to_the_end(1);
    let stats = harness.scheduler.stats();
    assert_eq!(stats.counts.num_preemptions, 0);
    assert_eq!(stats.counts.num_evictions, 3);
}

#[test]
fn an_abort_of_the_first_choice_leaves_its_pages_to_the_others() {
    let mut harness = Harness::new(small());
    harness.submit(with_choices(3, 18, 2)).unwrap();
    step(&mut harness);
    harness.abort(RequestId(0));
    assert_eq!(chunks(&step(&mut harness)), [(1, 8, 8)]);
    harness.run_to_the_end(1);
    assert_eq!(harness.scheduler.stats().pages.free, 64);
}

#[test]
fn a_stop_in_one_choice_leaves_the_others() {
    let mut harness = Harness::new(small());
    harness.submit(with_choices(3, 6, 9)).unwrap();
    step(&mut harness);
    step(&mut harness);
    harness.stop(RequestId(1));
    harness.run_to_the_end(2);
    let lengths: Vec<usize> = harness
        .clients
        .values()
        .map(|client| client.emitted.len())
        .collect();
    assert_eq!([lengths[0], lengths[2]], [9, 9]);
    assert!(lengths[1] < 9);
}

#[test]
fn pages_of_an_ended_prompt_are_free_once_its_steps_are_complete() {
    let mut harness = Harness::new(small());
    let ids = harness.submit_all(vec![with_choices(2, 18, 2)]).unwrap();
    harness.plan();
    harness.plan();
    for id in ids {
        harness.abort(id);
    }
    let pages = harness.scheduler.stats().pages;
    assert_eq!((pages.parked, pages.cached), (4, 0));
    harness.complete();
    harness.complete();
    assert_eq!(harness.scheduler.stats().pages.free, 64);
}

#[test]
fn a_preempted_choice_finds_its_prompt_again() {
    let settings = with(small(), |it| it.runtime.num_pages = 8);
    let mut harness = Harness::new(settings);
    harness.submit(with_choices(2, 16, 12)).unwrap();
    harness.run_to_the_end(1);
    assert!(harness.scheduler.stats().counts.num_preemptions > 0);
}

#[test]
fn choices_come_in_the_order_of_their_prompts() {
    let mut scheduler = Scheduler::new(settings()).unwrap();
    let prompts = [request(&[1, 2], 3), request(&[3], 1), request(&[4], 2)];
    let ids = scheduler.submit_all(prompts.into(), Micros(0)).unwrap();
    assert_eq!(ids, (0..6).map(RequestId).collect::<Vec<_>>());
    let prompt_len = |id| scheduler.prompt_len(RequestId(id)).unwrap();
    assert_eq!([2, 3, 4].map(prompt_len), [2, 1, 1]);
}

#[test]
fn the_queue_counts_each_choice_and_each_prompt_once() {
    let limits = |max_queue, max_queue_tokens| {
        let settings = with(settings(), |it| {
            it.scheduler.max_queue = max_queue;
            it.scheduler.max_queue_tokens = max_queue_tokens;
        });
        let mut scheduler = Scheduler::new(settings).unwrap();
        scheduler.submit(request(&[1], 1), Micros(0)).unwrap();
        scheduler.submit(request(&[1; 10], 4), Micros(0))
    };
    assert!(limits(5, 11).is_ok());
    assert!(matches!(limits(4, 11), Err(Refusal::QueueFull { .. })));
    assert!(matches!(
        limits(5, 10),
        Err(Refusal::QueueTokensFull { .. })
    ));
}

#[test]
fn the_prompts_log_probabilities_are_reported_by_the_first_choice_alone() {
    for prefix_cache in [true, false] {
        let settings = with(small(), |it| it.pages.prefix_cache = prefix_cache);
        let mut harness = Harness::new(settings);
        let measured = Spec {
            prompt_logprobs: true,
            ..with_choices(3, 18, 2)
        };
        harness.submit(measured).unwrap();
        let mut num_computed = 0;
        while let Some(plan) = harness.plan() {
            num_computed += plan.num_prefill_tokens();
            harness.complete();
        }
        assert_eq!(num_computed, 18 + 2 * 2);
        harness.check_the_end();
    }
}

/// Two tenants, one slot: the choices of a prompt cost their last pages, and the prompt once.
#[test]
fn fair_share_charges_choices_for_what_they_compute() {
    let settings = with(server(false, 2048), |it| {
        it.scheduler.policy = Policy::Fair;
        it.scheduler.max_seqs = Some(1);
    });
    let mut harness = Harness::new(settings);
    harness.measures = false;
    let of = |tenant, num_choices, num_prompt| Spec {
        tenant,
        ..with_choices(num_choices, num_prompt, 1)
    };
    for spec in [of(1, 4, 1024), of(2, 1, 1100), of(2, 1, 8), of(1, 1, 8)] {
        harness.submit(spec).unwrap();
    }
    let mut served = Vec::new();
    while let Some(plan) = harness.plan() {
        served.extend(plan.prefill.iter().map(|row| row.request.0));
        harness.complete();
    }
    assert_eq!(served, [0, 4, 1, 2, 3, 6, 5]);
}

/// One slot: the last choices wait longer than a request may, and their answer has begun.
#[test]
fn choices_of_an_answer_that_has_begun_wait_as_long_as_it_takes() {
    let settings = with(small(), |it| {
        it.scheduler.max_seqs = Some(1);
        it.scheduler.max_queue_seconds = Some(5.0);
    });
    let mut scheduler = Scheduler::new(settings).unwrap();
    scheduler.submit(request(&[1; 6], 3), Micros(0)).unwrap();
    let late = scheduler.submit(request(&[2; 6], 2), Micros(0)).unwrap();
    let plan = scheduler.plan(Micros(0)).unwrap();
    complete(&mut scheduler, &plan);
    let mut num_steps = 1;
    while let Some(plan) = scheduler.plan(Micros(6_000_000)) {
        complete(&mut scheduler, &plan);
        num_steps += 1;
    }
    assert_eq!(
        num_steps,
        3 * 4,
        "three choices of four tokens, one after the other"
    );
    let rejected = scheduler.take_rejected();
    let ids: Vec<_> = rejected.iter().map(|it| it.request).collect();
    assert_eq!(
        ids,
        [late, RequestId(late.0 + 1)],
        "none of these had begun"
    );
}

/// The prompt of the first tenant is computed, and its other choices wait.
#[test]
fn choices_whose_prompt_is_computed_count_in_a_full_queue() {
    let settings = with(server(false, 2048), |it| {
        it.scheduler.policy = Policy::Fair;
        it.scheduler.max_seqs = Some(1);
        it.scheduler.max_queue = 200;
        it.scheduler.max_queue_tokens = 100;
    });
    let mut scheduler = Scheduler::new(settings).unwrap();
    let of = |tenant, num_prompt, num_choices| Request {
        tenant: TenantId(tenant),
        ..request(&vec![1; num_prompt], num_choices)
    };
    scheduler.submit(of(1, 90, 60), Micros(0)).unwrap();
    let plan = scheduler.plan(Micros(0)).unwrap();
    complete(&mut scheduler, &plan);
    let last = scheduler.submit(of(1, 90, 1), Micros(0)).unwrap();
    scheduler.submit(of(2, 50, 1), Micros(0)).unwrap();
    let rejected = scheduler.take_rejected();
    assert_eq!(rejected.len(), 1);
    assert_eq!(
        rejected[0].request, last,
        "tenant 1 has 59 choices beside it"
    );
    assert_eq!(rejected[0].refusal, Refusal::Displaced);
}

#[test]
fn a_full_queue_takes_no_choice_of_an_answer_that_has_begun() {
    let settings = with(settings(), |it| {
        it.scheduler.policy = Policy::Fair;
        it.scheduler.max_seqs = Some(1);
        it.scheduler.max_queue = 10;
    });
    let mut scheduler = Scheduler::new(settings).unwrap();
    let of = |tenant, num_choices| Request {
        tenant: TenantId(tenant),
        ..request(&[1, 2], num_choices)
    };
    scheduler.submit(of(1, 11), Micros(0)).unwrap();
    let plan = scheduler.plan(Micros(0)).unwrap();
    complete(&mut scheduler, &plan);
    let refused = scheduler.submit(of(2, 1), Micros(0));
    assert!(
        matches!(refused, Err(Refusal::QueueFull { .. })),
        "{refused:?}"
    );
    assert_eq!(scheduler.take_rejected(), []);
}

#[test]
fn others_pass_a_hundred_choices_that_wait_for_their_prompt() {
    let settings = with(server(true, 4096), |it| it.scheduler.max_queue = 200);
    let mut scheduler = Scheduler::new(settings).unwrap();
    let prompt: Vec<TokenId> = (0..2048).collect();
    scheduler.submit(request(&prompt, 100), Micros(0)).unwrap();
    scheduler.submit(request(&[5000; 7], 1), Micros(0)).unwrap();
    let plan = scheduler.plan(Micros(0)).unwrap();
    assert_eq!(chunks(&plan), [(0, 0, 2048), (100, 0, 7)]);
}
