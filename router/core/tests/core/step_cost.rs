//! Claims about what is learned of step times, from few steps, hiccups and lasting changes.
#![allow(
    clippy::print_stdout,
    reason = "the figures are what these tests measure"
)]

use plait_core::{StepCost, StepWork};

use crate::oracle::mix;

/// A guess for a prefill token, as a target of 30 ms makes it.
const GUESS: f64 = 30_000.0 / 16.0;

fn prefill(num_tokens: u32) -> StepWork {
    let mut work = StepWork::default();
    work.add_prefill(0, num_tokens);
    work
}

fn decode(num_rows: u32, start: u32) -> StepWork {
    let mut work = StepWork::default();
    (0..num_rows).for_each(|_| work.add_decode(start));
    work
}

/// Microseconds on a GPU with a fixed cost.
fn time(work: &StepWork) -> f64 {
    5_000.0
        + 30.0 * work.num_prefill_tokens as f64
        + 0.001 * work.num_prefill_pairs as f64
        + 20.0 * work.num_decode_rows as f64
        + 0.02 * work.num_decode_kv_tokens as f64
}

/// Up to 2% more or less.
fn noise(seed: u64) -> f64 {
    0.98 + 0.04 * (mix(seed, 1) % 1000) as f64 / 1000.0
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Decode,
    Mixed,
    Prefill,
}

/// A step of a kind with rows, contexts and tokens of its own.
fn work(kind: Kind, seed: u64) -> StepWork {
    let number = |salt: u64, below: u64| u32::try_from(mix(seed, salt) % below).unwrap();
    let mut work = StepWork::default();
    if !matches!(kind, Kind::Prefill) {
        let rows = 1 + number(2, 128);
        (0..rows).for_each(|row| work.add_decode(500 + number(100 + u64::from(row), 8000)));
    }
    if !matches!(kind, Kind::Decode) {
        work.add_prefill(number(3, 16_000), 64 + number(4, 2000));
    }
    work
}

fn error(cost: &StepCost, work: &StepWork, micros: f64) -> f64 {
    (cost.estimate(work) / micros - 1.0).abs()
}

#[test]
fn the_first_decoding_step_after_a_prefill_is_learned_at_once() {
    let mut cost = StepCost::new(GUESS);
    cost.observe(&prefill(1000), 40_000.0);
    for i in 0..3000u32 {
        cost.observe(&decode(8, 1000 + i), 10_000.0);
        if [0, 1, 7, 20, 100, 500, 1000, 1500].contains(&i) {
            let estimate = cost.estimate(&decode(8, 1001 + i));
            println!("after {:4} steps of 10,000 us: {estimate:.0} us", i + 1);
        }
        if i >= 7 {
            let found = error(&cost, &decode(8, 1001 + i), 10_000.0);
            assert!(found < 0.1, "after {} steps: {found}", i + 1);
        }
    }
}

#[test]
fn eight_steps_of_a_kind_are_enough() {
    for kind in [Kind::Decode, Kind::Mixed, Kind::Prefill] {
        let mut errors: Vec<f64> = Vec::new();
        for run in 0..100u64 {
            let mut cost = StepCost::new(GUESS);
            for seed in 0..8 {
                let work = work(kind, 1000 * run + seed);
                cost.observe(&work, time(&work) * noise(run * 8 + seed));
            }
            for seed in 500..520 {
                let work = work(kind, 1000 * run + seed);
                errors.push(error(&cost, &work, time(&work)));
            }
        }
        errors.sort_by(f64::total_cmp);
        let (p50, p90, p99) = (errors[1000], errors[1800], errors[1980]);
        println!("{kind:?}, 8 steps: error p50 {p50:.3} p90 {p90:.3} p99 {p99:.3}");
        assert!(p90 < 0.1, "{kind:?}: {p90}");
    }
}

/// Steps until the estimate stays within a tenth of a time that is `factor` times the usual one.
fn steps_to_follow(cost: &mut StepCost, kind: Kind, factor: f64, first_seed: u64) -> u64 {
    let mut last_wrong = 0;
    for step in 1..=700 {
        let now = work(kind, first_seed + step);
        cost.observe(&now, time(&now) * factor * noise(step));
        let next = work(kind, first_seed + step + 1);
        if error(cost, &next, time(&next) * factor) > 0.1 {
            last_wrong = step;
        }
    }
    last_wrong + 1
}

#[test]
fn a_lasting_change_is_followed_within_sixteen_steps() {
    for kind in [Kind::Decode, Kind::Mixed, Kind::Prefill] {
        for factor in [2.0, 4.0, 10.0] {
            let mut cost = StepCost::new(GUESS);
            for step in 0..1000 {
                let work = work(kind, step);
                cost.observe(&work, time(&work) * noise(step));
            }
            let there = steps_to_follow(&mut cost, kind, factor, 10_000);
            let back = steps_to_follow(&mut cost, kind, 1.0, 20_000);
            println!("{kind:?} {factor}x slower: followed after {there} steps, back after {back}");
            assert!(
                there <= 16 && back <= 16,
                "{kind:?} {factor}x: {there} {back}"
            );
        }
    }
}

#[test]
fn a_step_that_first_compiles_hides_nothing_for_long() {
    let mut cost = StepCost::new(GUESS);
    for step in 0..8 {
        let slow = if step == 0 { 100.0 } else { 1.0 };
        cost.observe(&decode(8, 1000 + step), 10_000.0 * slow);
    }
    let found = error(&cost, &decode(8, 1010), 10_000.0);
    println!("after a first step of 100x and 7 others: error {found:.3}");
    assert!(found < 0.1, "{found}");
}

#[test]
fn hiccups_do_not_move_the_estimate() {
    let mut cost = StepCost::new(GUESS);
    let mut worst: f64 = 0.0;
    for step in 0..4000 {
        let now = work(Kind::Mixed, step);
        let slow = if mix(step, 77).is_multiple_of(100) {
            3.0
        } else {
            1.0
        };
        cost.observe(&now, time(&now) * slow * noise(step));
        let next = work(Kind::Mixed, step + 1);
        if step > 100 {
            worst = worst.max(error(&cost, &next, time(&next)));
        }
    }
    println!("1% of steps 3x as long: the estimate is off by {worst:.3} at most");
    assert!(worst < 0.15, "{worst}");
}

#[test]
fn hostile_times_leave_estimates_finite() {
    for case in 0..2000 {
        let number = |salt: u64, below: u64| mix(case, salt) % below;
        let small = |salt: u64, below: u64| u32::try_from(number(salt, below)).unwrap();
        let mut cost = StepCost::new([1e-3, 1.0, 1e3, 3.75e6][number(0, 4) as usize]);
        for step in (10..).step_by(20).take(200) {
            let mut work = StepWork::default();
            if number(step, 2) == 0 {
                work.add_prefill(small(step + 1, 4_000_000), small(step + 2, 65_536) + 1);
            }
            for row in 0..number(step + 3, 8) {
                work.add_decode(small(step + 4 + row, 4_000_000));
            }
            let micros = match number(step + 15, 4) {
                0 => 0.0,
                1 => u64::MAX as f64,
                2 => number(step + 16, 100) as f64,
                _ => number(step + 16, 1_000_000) as f64,
            };
            cost.observe(&work, micros);
            let estimate = cost.estimate(&work);
            assert!(estimate.is_finite() && estimate >= 0.0, "{estimate}");
            let _fits = cost.num_tokens_within(30_000.0 - estimate, small(step + 17, 4_000_000));
        }
    }
}
