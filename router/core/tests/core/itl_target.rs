//! Claims about the ITL target, on a worker with known, noisy step times.
#![allow(clippy::cast_sign_loss, reason = "times are positive")]

use std::collections::VecDeque;

use plait_core::{Event, Micros, Plan, Scheduler, StepCost, StepResult, StepWork};

use crate::fixtures::{self, with};
use crate::harness::Spec;
use crate::oracle::mix;

const TARGET: u64 = 20_000;

/// Microseconds of a step: 2 ms, 10 us a prefill token, 50 us a decode row, and the tokens they see.
fn time(work: &StepWork) -> f64 {
    2_000.0
        + 10.0 * work.num_prefill_tokens as f64
        + 0.002 * work.num_prefill_pairs as f64
        + 50.0 * work.num_decode_rows as f64
        + 0.1 * work.num_decode_kv_tokens as f64
}

/// Up to a tenth more or less.
fn noise(seed: u64) -> f64 {
    0.9 + 0.2 * (mix(seed, 1) % 1000) as f64 / 1000.0
}

fn work(seed: u64) -> StepWork {
    let number = |salt: u64, below: u64| mix(seed, salt) % below;
    StepWork {
        num_prefill_tokens: number(1, 4096),
        num_prefill_pairs: number(2, 1 << 24),
        num_decode_rows: number(3, 256),
        num_decode_kv_tokens: number(4, 1 << 20),
    }
}

#[test]
fn a_fit_finds_what_steps_cost() {
    let steps: Vec<_> = (0..200)
        .map(|seed| (work(seed), Micros(time(&work(seed)) as u64)))
        .collect();
    let cost = StepCost::fitted(&steps);
    for seed in 1000..1100 {
        let (estimate, time) = (cost.estimate(&work(seed)), time(&work(seed)));
        assert!(
            (estimate / time - 1.0).abs() < 0.01,
            "{estimate} for {time}"
        );
    }
}

#[test]
fn what_costs_nothing_is_never_found_to_give_time_back() {
    let steps: Vec<_> = (0..50)
        .map(|seed| (work(seed), Micros(mix(seed, 9) % 1000)))
        .collect();
    let cost = StepCost::fitted(&steps);
    let only = |tokens, pairs, rows, kv| StepWork {
        num_prefill_tokens: tokens,
        num_prefill_pairs: pairs,
        num_decode_rows: rows,
        num_decode_kv_tokens: kv,
    };
    let empty = cost.estimate(&StepWork::default());
    assert!(empty >= 0.0);
    for work in [
        only(1, 0, 0, 0),
        only(0, 1, 0, 0),
        only(0, 0, 1, 0),
        only(0, 0, 0, 1),
    ] {
        assert!(cost.estimate(&work) >= empty);
    }
}

#[test]
fn as_many_tokens_fit_as_the_estimate_says() {
    let mut cost = StepCost::new(100.0);
    for seed in 0..300 {
        cost.observe(&work(seed), time(&work(seed)));
    }
    let fixed = cost.estimate(&StepWork::default());
    for (start, micros) in [
        (0, 500.0),
        (0, 50_000.0),
        (30_000, 20_000.0),
        (120_000, 1_000.0),
    ] {
        let chunk = |length| {
            let mut work = StepWork::default();
            work.add_prefill(start, length);
            cost.estimate(&work) - fixed
        };
        let num_tokens = cost.num_tokens_within(micros, start);
        assert!(
            chunk(num_tokens) <= micros * 1.001,
            "{num_tokens} from {start}"
        );
        assert!(
            chunk(num_tokens + 1) >= micros * 0.999,
            "{num_tokens} from {start}"
        );
    }
}

/// A scheduler with eight long answers under way and a prompt of 3,000 tokens every few steps, and a
/// worker whose times are noisy.
struct Paced {
    scheduler: Scheduler,
    in_flight: VecDeque<Plan>,
}

impl Paced {
    fn new() -> Self {
        let settings = with(fixtures::settings(), |it| {
            it.scheduler.max_batch_tokens = Some(4096);
            it.scheduler.long_prefill_token_threshold = Some(4096);
            it.runtime.max_rows = Some(64);
            it.scheduler.max_seqs = Some(64);
            it.runtime.num_pages = 4096;
            it.runtime.max_model_len = 8192;
            it.scheduler.max_queue = 64;
            it.scheduler.max_queue_tokens = 1 << 20;
            it.scheduler.itl_target_ms = Some(TARGET as f64 / 1e3);
        });
        let mut paced = Self {
            scheduler: Scheduler::new(settings).unwrap(),
            in_flight: VecDeque::new(),
        };
        (0..8).for_each(|_| paced.submit(16, 4000));
        paced
    }

    fn submit(&mut self, num_prompt: u32, max_tokens: u32) {
        let request = Spec::new(num_prompt, max_tokens).request();
        self.scheduler.submit(request, Micros(0)).unwrap();
    }

    /// One more step, beside one in flight: what it held, and how long it took.
    fn step(&mut self, slowness: f64) -> (Plan, u64) {
        let plan = self.next_plan();
        if plan.step.0.is_multiple_of(6) {
            self.submit(3000, 4);
        }
        let micros = (time(&StepWork::of(&plan)) * noise(plan.step.0) * slowness) as u64;
        self.advance(Event::Measured {
            step: plan.step,
            elapsed: Micros(micros),
        });
        self.complete(&plan);
        (plan, micros)
    }

    fn next_plan(&mut self) -> Plan {
        while self.in_flight.len() < 2 {
            self.in_flight.extend(self.scheduler.plan(Micros(0)));
        }
        self.in_flight.pop_front().unwrap()
    }

    fn complete(&mut self, plan: &Plan) {
        let last_chunks = plan.prefill.iter().filter(|row| row.is_last_chunk);
        let num = last_chunks.count() + plan.decode.len();
        self.advance(Event::Result(StepResult {
            step: plan.step,
            num_accepted: &vec![1; num],
            token_ids: &vec![0; num],
        }));
    }

    fn advance(&mut self, event: Event<'_>) {
        self.scheduler.advance(event, &mut Vec::new()).unwrap();
    }

    /// Times of the next steps that decode, sorted, and the prefill tokens that they took along.
    fn times(&mut self, num_steps: usize, slowness: f64) -> (Vec<u64>, u32) {
        let steps: Vec<_> = (0..num_steps).map(|_| self.step(slowness)).collect();
        let decoding = steps.iter().filter(|(plan, _)| !plan.decode.is_empty());
        let num_prefill_tokens = decoding
            .clone()
            .map(|(plan, _)| plan.num_prefill_tokens())
            .sum();
        let mut times: Vec<u64> = decoding.map(|(_, time)| *time).collect();
        times.sort_unstable();
        (times, num_prefill_tokens)
    }
}

#[test]
fn noisy_steps_keep_the_target() {
    let mut paced = Paced::new();
    paced.times(50, 1.0);
    let (times, num_prefill_tokens) = paced.times(1000, 1.0);
    assert!(times[989] <= TARGET * 105 / 100, "p99 {}", times[989]);
    assert!(*times.last().unwrap() <= TARGET * 3 / 2, "{times:?}");
    assert!(num_prefill_tokens > 300_000, "{num_prefill_tokens}");
}

#[test]
fn a_worker_that_slows_down_is_followed() {
    let mut paced = Paced::new();
    paced.times(200, 1.0);
    paced.times(50, 2.5);
    let (times, _) = paced.times(500, 2.5);
    assert!(times[494] <= TARGET * 115 / 100, "p99 {}", times[494]);
}

#[test]
fn one_hiccup_does_not_stop_prefill_for_long() {
    let mut paced = Paced::new();
    paced.times(200, 1.0);
    paced.times(1, 200.0);
    paced.times(100, 1.0);
    let (_, num_prefill_tokens) = paced.times(500, 1.0);
    assert!(num_prefill_tokens > 150_000, "{num_prefill_tokens}");
}

#[test]
fn without_times_a_prompt_still_gets_on() {
    let mut paced = Paced::new();
    let first = paced.next_plan();
    paced.complete(&first);
    paced.submit(300, 4);
    let mut num_prefill_tokens = 0;
    for _ in 0..400 {
        let plan = paced.next_plan();
        num_prefill_tokens += plan.num_prefill_tokens();
        paced.complete(&plan);
    }
    assert_eq!(num_prefill_tokens, 300);
}

#[test]
fn a_step_without_decoders_is_not_bound() {
    let mut paced = Paced::new();
    paced.submit(4000, 4);
    assert_eq!(paced.step(1.0).0.num_prefill_tokens(), 4096);
}

#[test]
fn a_target_needs_time_and_mixed_steps() {
    let refused = |itl_target, mixed| {
        let settings = with(fixtures::settings(), |it| {
            it.scheduler.itl_target_ms = Some(itl_target);
            it.scheduler.mixed = mixed;
        });
        Scheduler::new(settings).unwrap_err().to_string()
    };
    assert!(refused(0.0, true).starts_with("--itl-target-ms is 0; a step takes time"));
    assert!(refused(50.0, false).starts_with("--itl-target-ms is 50; without mixed steps"));
}

#[test]
fn a_starved_prefill_is_granted_a_page_where_time_leaves_it_nothing() {
    let settings = with(fixtures::settings(), |it| {
        it.pages.page_size = 4;
        it.runtime.num_pages = 200;
        it.scheduler.prefill_starvation_steps = 2;
        it.scheduler.itl_target_ms = Some(0.001);
    });
    let mut harness = fixtures::harness(settings, [(100, 1), (5, 40)]);
    let chunks: Vec<_> = (0..4)
        .map(|_| fixtures::chunks(&fixtures::step(&mut harness)))
        .collect();
    assert_eq!(chunks[0], [(0, 0, 32), (1, 0, 5)]);
    assert!(chunks[1].is_empty() && chunks[2].is_empty());
    assert_eq!(chunks[3], [(0, 32, 4)]);
}

#[test]
fn a_newcomer_is_admitted_with_a_page_where_time_leaves_it_nothing() {
    let settings = with(fixtures::settings(), |it| {
        it.scheduler.prefill_starvation_steps = 2;
        it.scheduler.itl_target_ms = Some(0.001);
    });
    let mut harness = fixtures::harness(settings, [(5, 40)]);
    fixtures::step(&mut harness);
    harness.submit(Spec::new(20, 1)).unwrap();
    let chunks: Vec<_> = (0..3)
        .map(|_| fixtures::chunks(&fixtures::step(&mut harness)))
        .collect();
    assert_eq!(chunks, [vec![], vec![], vec![(1, 0, 16)]]);
}
