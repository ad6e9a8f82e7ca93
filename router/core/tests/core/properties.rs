//! The invariants under random settings, arrivals, delays, aborts, stops, flushes and losses of all ranks.

use plait_core::{
    HashSeed, PageSettings, Plan, Policy, PooledTokens, RuntimeSettings, SchedulerSettings,
    Settings,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::fixtures::{settings, with};
use crate::harness::{Harness, Spec};

#[derive(Clone, Debug)]
pub enum Action {
    Submit(Spec),
    Plan,
    Complete,
    MaskReady,
    Abort(usize),
    Stop(usize),
    Lose,
    Flush,
}

prop_compose! {
    /// Pools of a few pages, where nearly every case preempts, to pools where none does.
    pub fn any_settings()(
        draft_width in prop_oneof![2 => Just(0u32), 1 => 1..4u32],
        (batch_tokens, max_rows, max_seqs, long_prefill_token_threshold) in (1..40u32, 1..8u32, 1..8u32, 1..30u32),
        (page_size, num_pages) in (1..6u32, 2..14u32),
        (max_model_len, mixed, prefix_cache, watermark) in (12..60u32, any::<bool>(), any::<bool>(), 0..2u32),
        (prefill_starvation_steps, max_queue, itl_target) in (1..5u32, 4..12u32, option::of(1..400u32)),
        policy in prop::sample::select(vec![Policy::Fcfs, Policy::Priority, Policy::Fair, Policy::CacheAware]),
        (max_skip_ahead, threshold, is_watermark_given) in (0..3u32, option::of(1..3u32), any::<bool>()),
        (max_wait, aging) in (option::of(20..200u32), 1..40u32),
    ) -> Settings {
        with(settings(), |it| {
            it.scheduler = SchedulerSettings {
                max_batch_tokens: Some(batch_tokens.max(1 + draft_width)), max_seqs: Some(max_seqs), mixed, policy, prefill_starvation_steps, max_queue,
                long_prefill_token_threshold: Some(long_prefill_token_threshold), max_queue_tokens: 200, max_skip_ahead,
                priority_preemption_threshold: threshold.filter(|_| policy == Policy::Priority),
                priority_aging_seconds: f64::from(aging) / 1e6,
                max_queue_seconds: max_wait.map(|micros| f64::from(micros) / 1e6),
                itl_target_ms: itl_target.filter(|_| mixed).map(|micros| f64::from(micros) / 1e3),
                ..SchedulerSettings::default()
            };
            it.pages = PageSettings { page_size, prefix_cache, watermark: Some(watermark).filter(|_| is_watermark_given), ..PageSettings::default() };
            it.runtime = RuntimeSettings {
                max_rows: Some(max_rows), draft_width, ..RuntimeSettings::new(num_pages, max_model_len, HashSeed([1, 2]))
            };
        })
    }
}

/// Short, long, or one that begins as others do: like one of two texts.
fn any_prompt() -> impl Strategy<Value = Vec<u32>> {
    let shared = (0..2u32, 1..40u32, vec(0..61u32, 0..4));
    prop_oneof![
        vec(0..61u32, 1..8),
        vec(0..61u32, 1..40),
        shared
            .prop_map(|(text, num, own)| (0..num).map(|i| i * 5 % 61 + text).chain(own).collect()),
    ]
}

prop_compose! {
    pub fn any_spec()(
        prompt in any_prompt(),
        max_tokens in prop_oneof![1 => Just(0), 9 => 1..24u32],
        stop_ids in vec(0..61u32, 0..4),
        priority in -1..2i32,
        prompt_logprobs in prop::bool::weighted(0.3),
        salt in prop_oneof![9 => Just(0), 1 => Just(1u64)],
        is_masked in prop::bool::weighted(0.25),
        num_slot_words in prop_oneof![6 => Just(0), 1 => Just(9u32), 1 => Just(1 << 21)],
        (tenant, weight) in (0..3u64, 1..4u32),
        num_choices in prop_oneof![7 => Just(1), 2 => 2..5u32],
        pooled in option::weighted(0.5, prop_oneof![Just(PooledTokens::Last), Just(PooledTokens::All)]),
    ) -> Spec {
        let pooled = pooled.filter(|_| max_tokens == 0 && num_choices == 1 && !prompt_logprobs && !is_masked);
        Spec { prompt, max_tokens, stop_ids, priority, num_choices, prompt_logprobs, salt, is_masked, num_slot_words, pooled, tenant, weight }
    }
}

pub fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        8 => any_spec().prop_map(Action::Submit),
        24 => Just(Action::Plan),
        14 => Just(Action::Complete),
        4 => Just(Action::MaskReady),
        1 => any::<usize>().prop_map(Action::Abort),
        1 => any::<usize>().prop_map(Action::Stop),
        1 => Just(Action::Lose),
        1 => Just(Action::Flush),
    ]
}

/// Runs the actions and returns the plans.
pub fn run(harness: &mut Harness, actions: &[Action], depth: usize) -> Vec<Plan> {
    let mut plans = Vec::new();
    for action in actions {
        match action {
            Action::Submit(spec) => drop(harness.submit(spec.clone())),
            Action::Plan if harness.num_in_flight() < depth => plans.extend(harness.plan()),
            Action::Complete if harness.num_in_flight() > 0 => drop(harness.complete()),
            Action::MaskReady => drop(harness.any_mask_ready()),
            Action::Abort(index) => {
                drop(pick(harness, *index).map(|request| harness.abort(request)));
            }
            Action::Stop(index) => drop(pick(harness, *index).map(|request| harness.stop(request))),
            Action::Lose => drop(harness.lose()),
            Action::Flush => harness.flush(),
            Action::Plan | Action::Complete => {}
        }
    }
    plans
}

fn pick(harness: &Harness, index: usize) -> Option<plait_core::RequestId> {
    harness
        .clients
        .keys()
        .nth(index % harness.clients.len().max(1))
        .copied()
}

const NUM_CASES: u32 = 4_000;

/// Cases of the main property: `PLAIT_CASES=1000000` runs as many as the design page asks for.
fn num_cases() -> u32 {
    let asked = std::env::var("PLAIT_CASES").ok();
    asked.map_or(NUM_CASES, |asked| {
        asked.parse().expect("PLAIT_CASES is a number")
    })
}

/// Cases of another property, which grow with those of the main one.
pub fn in_proportion(num: u32) -> u32 {
    num * (num_cases() / NUM_CASES).max(1)
}

pub fn any_case() -> impl Strategy<Value = (Settings, usize, Vec<Action>)> {
    (any_settings(), 1..4usize, vec(any_action(), 1..120))
}

/// Runs a case to its end, all invariants checked. Returns the number of plans.
pub fn run_case((settings, depth, actions): (Settings, usize, Vec<Action>)) -> u64 {
    let mut harness = Harness::new(settings);
    run(&mut harness, &actions, depth);
    harness.run_to_the_end(depth);
    harness.num_plans
}

proptest! {
    #![proptest_config(ProptestConfig { cases: num_cases(), ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_once_with_its_own_tokens_and_all_pages_come_back(case in any_case()) {
        run_case(case);
    }
}

/// Run it alone, with `--ignored --nocapture`. The cases are the same every time.
#[test]
#[ignore = "a measurement: prints how many plans the main property checks in a second"]
#[allow(
    clippy::print_stdout,
    clippy::disallowed_types,
    reason = "it measures and prints"
)]
fn speed_of_the_main_property() {
    let mut runner = TestRunner::deterministic();
    let cases: Vec<_> = (0..num_cases())
        .map(|_| any_case().new_tree(&mut runner).unwrap().current())
        .collect();
    let begin = std::time::Instant::now();
    let num_plans: u64 = cases.into_iter().map(run_case).sum();
    let seconds = begin.elapsed().as_secs_f64();
    println!("{num_plans} plans in {seconds} s");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: in_proportion(300), ..ProptestConfig::default() })]

    #[test]
    fn the_same_calls_give_the_same_plans(
        settings in any_settings(),
        actions in vec(any_action(), 1..120),
    ) {
        let plans = || run(&mut Harness::new(settings.clone()), &actions, 2);
        prop_assert_eq!(plans(), plans());
    }

    #[test]
    fn a_clone_goes_on_as_the_original(
        settings in any_settings(),
        (before, after) in (vec(any_action(), 1..60), vec(any_action(), 1..60)),
    ) {
        let mut harness = Harness::new(settings);
        run(&mut harness, &before, 2);
        let mut other = harness.clone();
        prop_assert_eq!(run(&mut harness, &after, 2), run(&mut other, &after, 2));
    }
}
