//! What went wrong in other schedulers, one test for each (the design page lists them).

use std::num::NonZeroU32;

use plait_core::{
    Event, GraphSize, Micros, Policy, Request, Scheduler, StepResult, TenantId, decide,
};

use crate::allocations::num_bytes_allocated;
use crate::fixtures::{chunks, decoded, harness, settings, step, with};
use crate::harness::{Harness, Spec};

/// A prefill row of the same plan was chosen as victim, and its pages went to a decode row. Here
/// a starved prefill, the last in order, gets its row before decoders lack pages.
#[test]
fn a_prefill_row_of_this_plan_keeps_its_pages_when_a_decoder_lacks_one() {
    let mut num_met = 0;
    for num_pages in 6..16 {
        let settings = with(settings(), |it| {
            it.scheduler.max_batch_tokens = Some(4);
            it.runtime.draft_width = 1;
            it.scheduler.long_prefill_token_threshold = Some(1);
            it.pages.page_size = 2;
            it.runtime.num_pages = num_pages;
            it.scheduler.prefill_starvation_steps = 1;
        });
        let mut harness = Harness::new(settings);
        let last = Spec {
            priority: 1,
            ..Spec::new(9, 2)
        };
        harness.submit(last).unwrap();
        step(&mut harness);
        for _ in 0..2 {
            harness.submit(Spec::new(1, 12)).unwrap();
        }
        while !harness.scheduler.is_idle() {
            num_met += u32::from(has_granted_row_and_a_decoder_without_pages(&mut harness));
        }
        harness.check_the_end();
    }
    assert!(num_met > 0, "it never came to this");
}

/// One step, whose rows all keep their slots.
fn has_granted_row_and_a_decoder_without_pages(harness: &mut Harness) -> bool {
    let before = harness.scheduler.stats().counts;
    let plan = step(harness);
    let after = harness.scheduler.stats().counts;
    let prefills = plan.prefill.iter().map(|row| row.slot);
    let decodes = plan.decode.iter().map(|row| row.slot);
    let new: Vec<_> = plan.new_slots.iter().map(|new| new.slot).collect();
    for slot in prefills.chain(decodes) {
        assert!(new.contains(&slot) || !plan.freed_slots.contains(&slot));
    }
    let is_granted = after.num_starvation_grants > before.num_starvation_grants;
    let lacks_pages = after.carryover.pages > before.carryover.pages
        || after.num_preemptions > before.num_preemptions;
    is_granted && lacks_pages
}

/// A preemption dropped the token in flight, and a placeholder stayed in the context.
#[test]
fn a_token_in_flight_survives_the_preemption_of_its_request() {
    let settings = with(settings(), |it| {
        it.pages.page_size = 4;
        it.runtime.num_pages = 4;
    });
    let mut harness = harness(settings, [(4, 8), (4, 8)]);
    (0..4).for_each(|_| drop(step(&mut harness)));
    harness.plan();
    assert!(
        harness.plan().is_none(),
        "the second is held with a row on the wire"
    );
    let num_emitted = |harness: &Harness| -> usize {
        let clients = harness.clients.values();
        clients.map(|client| client.emitted.len()).sum()
    };
    let before = num_emitted(&harness);
    harness.complete();
    let after = num_emitted(&harness);
    assert_eq!(after - before, 2, "both tokens of the step are kept");
    harness.run_to_the_end(2);
}

/// Ties were broken by the request's id: a client could buy priority with it.
#[test]
fn nothing_that_a_client_chooses_decides_between_equals() {
    let admitted = |choices: [u32; 3], policy| {
        let settings = with(settings(), |it| it.scheduler.policy = policy);
        let mut scheduler = Scheduler::new(settings).unwrap();
        for choice in choices {
            scheduler.submit(chosen(choice), Micros(7)).unwrap();
        }
        let plan = scheduler.plan(Micros(8)).unwrap();
        let rows: Vec<u64> = plan.prefill.iter().map(|row| row.request.0).collect();
        assert_eq!(rows, [0, 1, 2]);
        let new: Vec<u64> = plan.new_slots.iter().map(|new| new.request.0).collect();
        assert_eq!(new, [0, 1, 2]);
    };
    for policy in [Policy::Fcfs, Policy::Priority] {
        admitted([1, 2, 3], policy);
        admitted([3, 2, 1], policy);
    }
}

/// A request whose fields all grow with the choice, except its priority.
fn chosen(choice: u32) -> Request {
    Request {
        prompt: vec![choice; choice as usize].into(),
        max_tokens: choice,
        stop_ids: vec![choice].into(),
        num_choices: NonZeroU32::MIN,
        prompt_logprobs: false,
        is_masked: false,
        num_slot_words: 0,
        pooled: None,
        priority: 0,
        tenant: TenantId(choice.into()),
        weight: NonZeroU32::MIN,
        salt: choice.into(),
    }
}

/// The same: one whose id sorted first was served first in every step, and starved the others.
#[test]
fn decoders_that_do_not_fit_a_step_run_round_robin_whatever_their_order() {
    let two_rows_a_step = with(settings(), |it| {
        it.scheduler.max_batch_tokens = Some(4);
        it.runtime.draft_width = 1;
    });
    let mut harness = Harness::new(two_rows_a_step);
    for priority in [1, 0, 0, -1] {
        let spec = Spec {
            priority,
            ..Spec::new(1, 40)
        };
        harness.submit(spec).unwrap();
    }
    step(&mut harness);
    let mut num_rows = [0; 4];
    for _ in 0..20 {
        for request in decoded(&step(&mut harness)) {
            num_rows[request as usize] += 1;
        }
    }
    assert_eq!(num_rows, [10; 4]);
}

/// Block tables were rebuilt and hashes copied in every step, so that planning cost grew with batch x
/// context; and with the pool, once the cache was full.
#[test]
fn a_decode_step_is_as_large_and_allocates_as_much_at_any_context_and_with_a_full_cache() {
    let step_at = |num_prompt: u32, prefix_cache| {
        let settings = with(settings(), |it| {
            it.runtime.max_model_len = 4096;
            it.runtime.num_pages = 600;
            it.scheduler.max_batch_tokens = Some(4096);
            it.scheduler.long_prefill_token_threshold = Some(4096);
            it.pages.prefix_cache = prefix_cache;
        });
        let mut harness = Harness::new(settings);
        if prefix_cache {
            fill_cache(&mut harness);
        }
        harness.submit(Spec::new(num_prompt, 9)).unwrap();
        (0..2).for_each(|_| drop(step(&mut harness)));
        let mut sizes = (0, 0, 0);
        let num_bytes = num_bytes_allocated(|| sizes = decode_step(&mut harness.scheduler));
        assert_eq!(sizes, (1, 0, 0));
        num_bytes
    };
    for prefix_cache in [false, true] {
        assert_eq!(step_at(17, prefix_cache), step_at(2001, prefix_cache));
    }
    let full = step_at(17, true);
    assert_eq!(full, step_at(17, false), "no more than without a cache");
}

fn fill_cache(harness: &mut Harness) {
    for salt in 1..=3 {
        let filler = Spec {
            salt,
            ..Spec::new(2900, 1)
        };
        harness.submit(filler).unwrap();
        harness.run_to_the_end(1);
    }
    assert!(harness.scheduler.stats().pages.free < 60);
}

/// One plan and its result, past the harness; how many rows, new pages and token ids the plan has.
fn decode_step(scheduler: &mut Scheduler) -> (usize, usize, usize) {
    let plan = scheduler.plan(Micros(99)).unwrap();
    let result = StepResult {
        step: plan.step,
        num_accepted: &[1],
        token_ids: &[7],
    };
    let mut outputs = Vec::new();
    scheduler
        .advance(Event::Result(result), &mut outputs)
        .unwrap();
    (
        plan.decode.len(),
        plan.appended_pages.len(),
        plan.token_ids.len(),
    )
}

/// Prefill first: gaps of minutes between tokens. Decoders have a row in every plan with room.
#[test]
fn a_stream_of_long_prompts_leaves_no_gap_between_a_decoders_tokens() {
    let settings = with(settings(), |it| {
        it.runtime.max_model_len = 2048;
        it.runtime.num_pages = 1024;
        it.scheduler.max_queue = 100;
        it.scheduler.max_queue_tokens = 1 << 20;
    });
    let mut harness = harness(settings, [(5, 200)]);
    step(&mut harness);
    for _ in 0..20 {
        harness.submit(Spec::new(500, 1)).unwrap();
    }
    for _ in 0..100 {
        let plan = step(&mut harness);
        assert!(decoded(&plan).contains(&0), "{plan:?}");
        assert!(!chunks(&plan).is_empty(), "and the prompts go on");
    }
}

/// One optimisation was switched off locally after the ranks had voted on it: they hung.
#[test]
fn what_happens_to_a_replica_after_its_vote_changes_neither_its_rows_nor_the_decision() {
    let mut replicas = [harness(settings(), [(5, 9)]), harness(settings(), [(7, 3)])];
    replicas.iter_mut().for_each(|it| drop(step(it)));
    let plans = replicas.each_mut().map(|it| it.plan_only().unwrap());
    let votes = [0, 1].map(|replica| {
        let scheduler = &replicas[replica as usize].scheduler;
        scheduler.vote(Some(&plans[replica as usize]), replica, 8)
    });
    let agreed = decide(&votes, 2, &[1, 8].map(GraphSize::of_decode_rows)).unwrap();
    assert_eq!(agreed.graph_bucket, Some(1));
    replicas[0].abort(plait_core::RequestId(0));
    replicas[0].submit(Spec::new(4, 1)).unwrap();
    replicas[1].scheduler.drain();
    for (replica, plan) in replicas.iter_mut().zip(plans) {
        let decided = replica
            .scheduler
            .apply_decision(Some(plan.clone()), &agreed)
            .unwrap();
        assert_eq!((decided.plan, decided.decision), (plan, agreed.clone()));
    }
}

/// One of several parallel arrays was not cut like the others: garbage.
#[test]
fn the_token_ids_of_a_plan_are_those_of_its_rows_and_no_more() {
    let mut harness = harness(settings(), [(40, 3), (5, 3)]);
    let measured = Spec {
        prompt_logprobs: true,
        ..Spec::new(70, 3)
    };
    harness.submit(measured).unwrap();
    while !harness.scheduler.is_idle() {
        let plan = step(&mut harness);
        let num_tokens: u32 = plan
            .prefill
            .iter()
            .map(|row| row.length + u32::from(row.lookahead))
            .sum();
        assert_eq!(plan.token_ids.len(), num_tokens as usize);
    }
}

/// Fully cached rows reached the kernel without a token to compute.
#[test]
fn a_prompt_that_is_cached_to_its_last_page_still_has_a_token_to_compute() {
    for num_prompt in 1..40 {
        let mut harness = harness(
            with(settings(), |it| {
                it.pages.page_size = 4;
                it.pages.prefix_cache = true;
            }),
            [(num_prompt, 1)],
        );
        harness.run_to_the_end(1);
        harness.submit(Spec::new(num_prompt, 1)).unwrap();
        assert!(step(&mut harness).prefill[0].length >= 1);
        harness.run_to_the_end(1);
    }
}

/// Hashing went on with the cache switched off: two requests that differ in their salt alone are then
/// the same to the scheduler, whose whole state is printed here.
#[test]
fn without_the_cache_nothing_is_hashed() {
    let state_with = |salt| {
        let mut scheduler = Scheduler::new(settings()).unwrap();
        let request = Request {
            prompt: (0..100).collect(),
            max_tokens: 2,
            stop_ids: [].into(),
            num_choices: NonZeroU32::MIN,
            prompt_logprobs: false,
            is_masked: false,
            num_slot_words: 0,
            pooled: None,
            priority: 0,
            tenant: TenantId(0),
            weight: NonZeroU32::MIN,
            salt,
        };
        scheduler.submit(request, Micros(0)).unwrap();
        scheduler.plan(Micros(1)).unwrap();
        format!("{scheduler:?}").replace(&format!("salt: {salt}"), "")
    };
    assert_eq!(state_with(1), state_with(2));
}
