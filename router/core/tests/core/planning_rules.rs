//! Claims about the rules by which a plan is made, one at a time.

use std::num::NonZeroU32;

use plait_core::{
    Plan, Policy, PooledTokens, Refusal, Request, RequestId, Scheduler, Settings, TenantId,
};

use crate::fixtures::{chunks, decoded, harness, settings, step, with};
use crate::harness::{Harness, Spec};

#[test]
fn settings_with_which_nothing_could_run_are_refused_by_name() {
    let refused = |settings: Settings| Scheduler::new(settings).unwrap_err().to_string();
    let text = refused(with(settings(), |it| {
        it.scheduler.max_batch_tokens = Some(0);
    }));
    assert_eq!(
        text,
        "--max-batch-tokens is 0; at least 1 is needed, because a step computes at least one token: raise it"
    );
    assert!(
        refused(with(settings(), |it| it.pages.watermark = Some(64))).contains("watermark is 64")
    );
    assert!(
        refused(with(settings(), |it| {
            it.runtime.num_pages = 1;
            it.pages.page_size = 1;
        }))
        .contains("num-pages is 1")
    );
}

#[test]
fn what_is_not_given_follows_from_other_settings() {
    let limits = with(settings(), |it| {
        it.scheduler.long_prefill_token_threshold = None;
        it.scheduler.itl_target_ms = Some(12.5);
        it.pages.watermark = None;
        it.runtime.num_pages = 250;
        it.runtime.max_rows = None;
    });
    let limits = limits.limits().unwrap();
    assert_eq!(limits.long_prefill_token_threshold, 64, "a whole step");
    assert_eq!(limits.itl_target, Some(plait_core::Micros(12_500)));
    assert_eq!(limits.watermark, 2, "a hundredth of the pool");
    assert_eq!(limits.max_rows, 8, "one a request");
}

#[test]
fn the_output_is_capped_by_the_model_and_by_the_pool() {
    for settings in [
        with(settings(), |it| it.runtime.max_model_len = 43),
        with(settings(), |it| {
            it.pages.page_size = 1;
            it.runtime.num_pages = 43;
        }),
    ] {
        let mut harness = harness(settings, [(40, 100)]);
        harness.run_to_the_end(2);
        assert!(
            harness
                .clients
                .values()
                .all(|client| client.emitted.len() == 3)
        );
    }
}

#[test]
fn a_request_without_room_for_one_token_is_refused() {
    let submit = |settings, spec| Harness::new(settings).submit(spec);
    assert_eq!(
        submit(settings(), Spec::new(0, 1)),
        Err(Refusal::EmptyPrompt)
    );
    let short = with(settings(), |it| it.runtime.max_model_len = 40);
    assert_eq!(
        submit(short, Spec::new(40, 1)),
        Err(Refusal::TooLongForModel {
            prompt: 40,
            limit: 40
        })
    );
    let small = with(settings(), |it| it.runtime.num_pages = 2);
    assert_eq!(
        submit(small, Spec::new(32, 1)),
        Err(Refusal::TooLongForPool {
            prompt: 32,
            limit: 32
        })
    );
}

#[test]
fn a_request_without_output_is_a_prefill_and_nothing_else() {
    let context = with(settings(), |it| it.runtime.max_model_len = 40);
    let mut harness = harness(context, [(40, 0), (5, 2)]);
    let mut plans = Vec::new();
    while !harness.scheduler.is_idle() {
        plans.push(step(&mut harness));
    }
    let rows = || plans.iter().flat_map(|plan| &plan.prefill);
    let of_first = || rows().filter(|row| row.request == RequestId(0));
    assert_eq!(of_first().map(|row| row.length).sum::<u32>(), 40);
    assert!(
        of_first().all(|row| !row.is_last_chunk),
        "it samples nothing"
    );
    assert!(
        plans
            .iter()
            .flat_map(|plan| &plan.decode)
            .all(|row| row.request == RequestId(1))
    );
    harness.check_the_end();
}

#[test]
fn requests_that_bring_much_with_their_slots_enter_one_by_one() {
    let heavy = Spec {
        num_slot_words: 1 << 20,
        ..Spec::new(3, 2)
    };
    let mut harness = harness(settings(), [(3, 2)]);
    for spec in [heavy.clone(), heavy, Spec::new(3, 2)] {
        harness.submit(spec).unwrap();
    }
    let entered: Vec<usize> = (0..3).map(|_| step(&mut harness).new_slots.len()).collect();
    assert_eq!(
        entered,
        [2, 1, 1],
        "what comes after a heavy one waits for the next plan"
    );
    harness.run_to_the_end(2);
}

#[test]
fn a_full_queue_refuses_and_an_empty_one_takes_any_prompt() {
    let mut few = harness(with(settings(), |it| it.scheduler.max_queue = 1), [(1, 1)]);
    assert_eq!(
        few.submit(Spec::new(1, 1)),
        Err(Refusal::QueueFull {
            waiting: 1,
            limit: 1
        })
    );
    let more = vec![Spec::new(1, 1); 5];
    assert_eq!(
        few.submit_all(more.clone()),
        Err(Refusal::QueueFull {
            waiting: 1,
            limit: 1
        }),
        "all or none"
    );
    few.run_to_the_end(1);
    assert_eq!(few.submit_all(more).map(|ids| ids.len()), Ok(5));
    few.run_to_the_end(1);
    let mut short = harness(
        with(settings(), |it| it.scheduler.max_queue_tokens = 10),
        [(20, 1)],
    );
    assert_eq!(
        short.submit(Spec::new(1, 1)),
        Err(Refusal::QueueTokensFull {
            waiting: 20,
            limit: 10
        })
    );
    step(&mut short);
    assert!(short.submit(Spec::new(1, 1)).is_ok());
}

#[test]
fn a_draining_scheduler_refuses_and_serves_what_it_took() {
    let mut harness = harness(settings(), [(40, 3), (5, 2)]);
    harness.scheduler.drain();
    assert_eq!(harness.submit(Spec::new(1, 1)), Err(Refusal::Draining));
    harness.run_to_the_end(2);
}

#[test]
fn every_prompt_token_is_computed_once_at_every_chunk_size() {
    for long_prefill_token_threshold in [1, 7, 16, 64] {
        let mut harness = harness(
            with(settings(), |it| {
                it.scheduler.long_prefill_token_threshold = Some(long_prefill_token_threshold);
            }),
            [(100, 2)],
        );
        let mut starts = Vec::new();
        while harness
            .scheduler
            .prompt_len(plait_core::RequestId(0))
            .is_some()
        {
            starts.extend(
                chunks(&step(&mut harness))
                    .into_iter()
                    .flat_map(|(_, start, length)| start..start + length),
            );
        }
        assert_eq!(
            starts,
            (0..100).collect::<Vec<_>>(),
            "chunks of {long_prefill_token_threshold}"
        );
    }
}

#[test]
fn decoders_come_before_prefills_and_share_a_step_with_them() {
    let settings = with(settings(), |it| it.scheduler.max_batch_tokens = Some(20));
    let mut harness = harness(settings, [(1, 50), (1, 50), (60, 5)]);
    step(&mut harness);
    let plan = step(&mut harness);
    assert_eq!(
        (decoded(&plan), chunks(&plan)),
        (vec![0, 1], vec![(2, 18, 18)])
    );
}

#[test]
fn a_last_chunk_on_the_wire_makes_a_decoder() {
    let mut harness = harness(settings(), [(40, 3)]);
    let plans: Vec<Plan> = (0..4).map(|_| harness.plan().unwrap()).collect();
    assert_eq!(
        (chunks(&plans[0]), chunks(&plans[1])),
        (vec![(0, 0, 32)], vec![(0, 32, 8)])
    );
    assert_eq!(
        (plans[2].decode[0].start, plans[3].decode[0].start),
        (40, 41)
    );
    assert!(
        harness.plan().is_none(),
        "every token that is due is on the wire"
    );
    (0..4).for_each(|_| drop(harness.complete()));
    harness.run_to_the_end(1);
}

#[test]
fn a_decoder_without_a_row_keeps_its_position_in_the_queue() {
    let settings = with(settings(), |it| {
        it.scheduler.max_batch_tokens = Some(2);
        it.scheduler.mixed = false;
    });
    let mut harness = harness(settings, [(1, 50), (1, 50), (1, 50)]);
    assert_eq!(
        (
            chunks(&step(&mut harness)).len(),
            chunks(&step(&mut harness)).len()
        ),
        (2, 1)
    );
    let turns: Vec<_> = (0..3).map(|_| decoded(&step(&mut harness))).collect();
    assert_eq!(turns, [vec![0, 1], vec![0, 2], vec![1, 2]]);
    assert_eq!(harness.scheduler.stats().counts.carryover.tokens, 3);
}

#[test]
fn priority_and_number_never_decide_who_decodes() {
    let settings = with(settings(), |it| {
        it.runtime.max_rows = Some(1);
        it.scheduler.mixed = false;
    });
    let mut harness = Harness::new(settings);
    for priority in [0, -5, 5] {
        harness
            .submit(Spec {
                priority,
                ..Spec::new(1, 50)
            })
            .unwrap();
    }
    (0..3).for_each(|_| drop(step(&mut harness)));
    let turns: Vec<u64> = (0..6).flat_map(|_| decoded(&step(&mut harness))).collect();
    assert_eq!(
        turns,
        [1, 0, 2, 1, 0, 2],
        "the order in which they came to decode"
    );
    assert_eq!(harness.scheduler.stats().counts.carryover.rows, 12);
}

#[test]
fn every_decoder_gets_a_row_within_the_bound() {
    for (max_batch_tokens, max_rows) in [(1, 8), (3, 8), (8, 2), (5, 4)] {
        let settings = with(settings(), |it| {
            it.scheduler.max_batch_tokens = Some(max_batch_tokens);
            it.runtime.max_rows = Some(max_rows);
            it.scheduler.mixed = false;
        });
        let mut harness = harness(settings, [(1, 100); 7]);
        while !step(&mut harness).prefill.is_empty() {}
        let num_in_bound = 7_u32.div_ceil(max_batch_tokens.min(max_rows));
        for _ in 0..20 {
            let mut served: Vec<u64> = (0..num_in_bound)
                .flat_map(|_| decoded(&step(&mut harness)))
                .collect();
            served.sort_unstable();
            served.dedup();
            assert_eq!(served.len(), 7);
        }
    }
}

#[test]
fn a_chunk_is_not_cut_to_a_few_tokens() {
    let settings = with(settings(), |it| it.scheduler.max_batch_tokens = Some(40));
    let mut harness = harness(settings, [(30, 1), (100, 1), (5, 1)]);
    assert_eq!(
        chunks(&step(&mut harness)),
        [(0, 0, 30)],
        "10 are left, and nobody overtakes the second"
    );
    assert_eq!(
        chunks(&step(&mut harness)),
        [(1, 0, 32), (2, 0, 5)],
        "a short prompt fits whole"
    );
}

#[test]
fn a_starved_prefill_comes_first_with_a_page_of_tokens() {
    let settings = with(settings(), |it| {
        it.scheduler.long_prefill_token_threshold = Some(4);
        it.runtime.num_pages = 5;
    });
    let mut harness = harness(settings, [(64, 2), (15, 40)]);
    (0..12).for_each(|_| drop(step(&mut harness)));
    let waiting: Vec<Plan> = (0..8).map(|_| step(&mut harness)).collect();
    assert!(
        waiting
            .iter()
            .all(|plan| plan.prefill.is_empty() && decoded(plan) == [1]),
        "no page is free"
    );
    let plan = step(&mut harness);
    assert_eq!((decoded(&plan), chunks(&plan)), (vec![], vec![(0, 48, 4)]));
    let counts = harness.scheduler.stats().counts;
    assert_eq!(
        (counts.num_starvation_grants, counts.num_preemptions),
        (1, 1)
    );
    harness.run_to_the_end(2);
}

#[test]
fn no_request_overtakes_the_head_of_the_queue() {
    let settings = with(settings(), |it| it.runtime.num_pages = 6);
    let mut harness = harness(settings, [(60, 20), (60, 1), (5, 1)]);
    step(&mut harness);
    step(&mut harness);
    assert_eq!(
        harness.scheduler.stats().num_waiting,
        2,
        "two pages are free, the second needs four, the third one"
    );
    harness.run_to_the_end(2);
}

/// The order in which requests of these priorities are admitted, one a step.
fn admitted_of_priorities(settings: &Settings, priorities: [i32; 3]) -> Vec<u64> {
    let mut harness = Harness::new(with(settings.clone(), |it| it.runtime.max_rows = Some(1)));
    for priority in priorities {
        harness
            .submit(Spec {
                priority,
                ..Spec::new(1, 1)
            })
            .unwrap();
    }
    (0..3)
        .map(|_| step(&mut harness).prefill[0].request.0)
        .collect()
}

#[test]
fn priority_decides_the_order_of_admission() {
    assert_eq!(admitted_of_priorities(&settings(), [1, 0, -1]), [2, 1, 0]);
}

#[test]
fn fcfs_does_not_look_at_priorities() {
    let settings = with(settings(), |it| it.scheduler.policy = Policy::Fcfs);
    assert_eq!(admitted_of_priorities(&settings, [1, 0, -1]), [0, 1, 2]);
}

#[test]
fn the_watermark_is_kept_free_unless_nothing_holds_a_lease() {
    let settings = with(settings(), |it| {
        it.runtime.num_pages = 8;
        it.pages.watermark = Some(2);
    });
    let mut harness = harness(settings, [(112, 1), (20, 8), (60, 2)]);
    assert_eq!(
        chunks(&step(&mut harness)),
        [(0, 0, 32)],
        "seven of eight pages, yet it is alone"
    );
    while harness
        .scheduler
        .prompt_len(plait_core::RequestId(0))
        .is_some()
    {
        step(&mut harness);
    }
    assert_eq!(
        chunks(&step(&mut harness)),
        [(1, 0, 20), (2, 0, 32)],
        "2 + 4 + 2 pages"
    );
    harness.submit(Spec::new(1, 1)).unwrap();
    assert_eq!(
        step(&mut harness).prefill.len(),
        1,
        "the two that are left are the decoders'"
    );
}

#[test]
fn without_mixing_prefills_come_first_and_a_plan_has_one_kind_of_rows() {
    let settings = with(settings(), |it| it.scheduler.mixed = false);
    let mut harness = harness(settings, [(5, 9)]);
    step(&mut harness);
    harness.submit(Spec::new(40, 3)).unwrap();
    let plans: Vec<Plan> = (0..3).map(|_| step(&mut harness)).collect();
    assert_eq!(
        (chunks(&plans[0]), chunks(&plans[1])),
        (vec![(1, 0, 32)], vec![(1, 32, 8)])
    );
    assert_eq!(
        (
            plans[0].decode.len(),
            plans[1].decode.len(),
            decoded(&plans[2])
        ),
        (0, 0, vec![0, 1])
    );
}

#[test]
fn an_idle_scheduler_stays_idle_and_tells_of_freed_slots_with_the_next_rows() {
    let mut harness = harness(settings(), [(5, 1)]);
    step(&mut harness);
    assert!(harness.scheduler.is_idle() && harness.plan().is_none());
    harness.submit(Spec::new(5, 1)).unwrap();
    let plan = step(&mut harness);
    assert_eq!(
        (plan.freed_slots, plan.new_slots[0].slot),
        (vec![plan.new_slots[0].slot], plan.new_slots[0].slot)
    );
}

#[test]
fn the_wait_is_reported_at_the_first_admission() {
    let mut scheduler = Scheduler::new(settings()).unwrap();
    let request = Request {
        prompt: [1].into(),
        max_tokens: 1,
        stop_ids: [].into(),
        num_choices: NonZeroU32::MIN,
        prompt_logprobs: false,
        is_masked: false,
        num_slot_words: 0,
        pooled: None,
        priority: 0,
        salt: 0,
        tenant: TenantId(0),
        weight: NonZeroU32::MIN,
    };
    scheduler.submit(request, plait_core::Micros(100)).unwrap();
    let plan = scheduler.plan(plait_core::Micros(350)).unwrap();
    assert_eq!(plan.new_slots[0].waited, Some(plait_core::Micros(250)));
}

#[test]
fn a_decode_plan_costs_what_changed_at_any_context() {
    let settings = with(settings(), |it| {
        it.runtime.max_model_len = 1024;
        it.runtime.num_pages = 128;
        it.scheduler.long_prefill_token_threshold = Some(64);
    });
    let mut harness = harness(settings, [(500, 40), (500, 40)]);
    while !step(&mut harness).prefill.is_empty() {}
    let plans: Vec<Plan> = (0..16).map(|_| step(&mut harness)).collect();
    assert!(
        plans
            .iter()
            .all(|plan| plan.token_ids.is_empty() && plan.decode.len() == 2)
    );
    assert_eq!(
        plans
            .iter()
            .map(|plan| plan.appended_pages.len())
            .sum::<usize>(),
        2,
        "one page each in 16 tokens"
    );
}

#[test]
fn a_prefill_under_way_comes_before_one_that_waits() {
    let settings = with(settings(), |it| it.scheduler.max_batch_tokens = Some(32));
    let mut harness = harness(settings, [(100, 1)]);
    step(&mut harness);
    harness.submit(Spec::new(20, 1)).unwrap();
    assert_eq!(chunks(&step(&mut harness)), [(0, 32, 32)]);
    harness.run_to_the_end(2);
}

#[test]
fn a_prompt_whose_tokens_are_all_pooled_is_computed_whole_though_its_pages_are_cached() {
    let settings = with(settings(), |it| it.pages.prefix_cache = true);
    let mut harness = harness(settings, [(40, 1)]);
    harness.run_to_the_end(1);
    harness.submit(Spec::new(40, 1)).unwrap();
    let hit = step(&mut harness);
    assert!(hit.prefill[0].start > 0, "its prefix is found");
    harness.run_to_the_end(1);
    let pooled = Spec {
        pooled: Some(PooledTokens::All),
        ..Spec::new(40, 0)
    };
    harness.submit(pooled).unwrap();
    let plans = [step(&mut harness), step(&mut harness)];
    assert_eq!(
        plans.each_ref().map(chunks),
        [vec![(2, 0, 32)], vec![(2, 32, 8)]]
    );
    let rows = plans.each_ref().map(|plan| &plan.prefill[0]);
    assert_eq!(rows.map(|row| row.lookahead), [true, false]);
    assert_eq!(rows.map(|row| row.is_last_chunk), [false, false]);
    // A captured step has no hidden states: the vote says so by them.
    assert!(rows.iter().all(|row| !row.prompt_logprobs.is_empty()));
    harness.run_to_the_end(1);
    let of_last = Spec {
        pooled: Some(PooledTokens::Last),
        ..Spec::new(40, 0)
    };
    harness.submit(of_last).unwrap();
    let hit = step(&mut harness);
    let [row] = &hit.prefill[..] else {
        panic!("one prompt is computed");
    };
    assert!(row.start > 0 && row.start + row.length == 40, "{row:?}");
    assert!(!row.lookahead && !row.prompt_logprobs.is_empty());
}
