//! Figures of the scheduler's policies under pressure, exact and the same on every machine.
//!
//! `cargo run --release -p plait-core --example pressure` prints one JSON object a figure and line.
#![allow(
    clippy::print_stdout,
    reason = "its result is the figures that it prints"
)]

use std::collections::VecDeque;
use std::num::NonZeroU32;

use plait_core::{
    Event, HashSeed, Micros, Output, PageSettings, Plan, Policy, Request, RequestId,
    RuntimeSettings, Scheduler, SchedulerSettings, Settings, StepResult, StepWork, TenantId,
    TokenId,
};

const TARGET_MS: f64 = 30.0;

/// Microseconds of a step, by its work and its number.
type StepTime = Box<dyn Fn(&StepWork, u64) -> f64>;

/// A scheduler, two plans in flight, and steps that take as long as `time` says.
struct World {
    scheduler: Scheduler,
    in_flight: VecDeque<Plan>,
    time: StepTime,
    num_prompts: u32,
    num_steps: u64,
}

/// What one step did.
struct Step {
    plan: Plan,
    expected: f64,
    micros: f64,
    outputs: Vec<Output>,
}

impl World {
    fn new(settings: Settings) -> Self {
        Self {
            scheduler: Scheduler::new(settings).expect("the settings fit"),
            in_flight: VecDeque::new(),
            time: Box::new(|_, _| 10_000.0),
            num_prompts: 0,
            num_steps: 0,
        }
    }

    /// Steps take `base` plus 30 us a prefill token and 20 us a decode row, and three times as long every
    /// `hiccup` steps.
    fn timed(settings: Settings, base: f64, hiccup: u64) -> Self {
        let time = move |work: &StepWork, step: u64| {
            let factor = if hiccup > 0 && mixed_bits(step).is_multiple_of(hiccup) {
                3.0
            } else {
                1.0
            };
            let prefill =
                30.0 * work.num_prefill_tokens as f64 + 0.001 * work.num_prefill_pairs as f64;
            let decode =
                20.0 * work.num_decode_rows as f64 + 0.02 * work.num_decode_kv_tokens as f64;
            let noise = 0.98 + 0.04 * (mixed_bits(step + 7) % 100) as f64 / 100.0;
            factor * noise * (base + prefill + decode)
        };
        Self {
            time: Box::new(time),
            ..Self::new(settings)
        }
    }

    /// Submits a prompt that shares nothing with others.
    fn submit(&mut self, num_prompt: u32, max_tokens: u32, tenant: u64) -> Option<RequestId> {
        self.num_prompts += 1;
        let prompt = vec![self.num_prompts; num_prompt as usize];
        self.submit_prompt(prompt, max_tokens, tenant, 0)
    }

    fn submit_prompt(
        &mut self,
        prompt: Vec<TokenId>,
        max_tokens: u32,
        tenant: u64,
        priority: i32,
    ) -> Option<RequestId> {
        let request = Request {
            prompt: prompt.into(),
            max_tokens,
            stop_ids: [].into(),
            num_choices: NonZeroU32::MIN,
            prompt_logprobs: false,
            is_masked: false,
            num_slot_words: 0,
            pooled: None,
            priority,
            tenant: TenantId(tenant),
            weight: NonZeroU32::MIN,
            salt: 0,
        };
        let now = Micros(self.num_steps * 10_000);
        self.scheduler.submit(request, now).ok()
    }

    /// Submits prompts that share nothing.
    fn submit_many(&mut self, num: u32, num_prompt: u32, max_tokens: u32) {
        for _ in 0..num {
            self.submit(num_prompt, max_tokens, 0);
        }
    }

    fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    /// Plans up to two steps, and completes the oldest; None if there is nothing to do.
    fn step(&mut self) -> Option<Step> {
        while self.in_flight.len() < 2 {
            let Some(plan) = self.scheduler.plan(Micros(self.num_steps * 10_000)) else {
                break;
            };
            self.in_flight.push_back(plan);
        }
        let plan = self.in_flight.pop_front()?;
        self.num_steps += 1;
        let expected = self.scheduler.expected(plan.step);
        let micros = (self.time)(&StepWork::of(&plan), self.num_steps);
        let outputs = self.complete(&plan, micros);
        Some(Step {
            plan,
            expected: expected.map_or(0.0, |micros| micros.0 as f64),
            micros,
            outputs,
        })
    }

    fn complete(&mut self, plan: &Plan, micros: f64) -> Vec<Output> {
        let num_last_chunks = plan.prefill.iter().filter(|row| row.is_last_chunk).count();
        let num = num_last_chunks + plan.decode.len();
        let (accepted, tokens) = (vec![1; num], vec![1; num]);
        let result = StepResult {
            step: plan.step,
            num_accepted: &accepted,
            token_ids: &tokens,
        };
        #[expect(clippy::cast_sign_loss, reason = "times are positive")]
        let measured = Event::Measured {
            step: plan.step,
            elapsed: Micros(micros as u64),
        };
        let mut outputs = Vec::new();
        for event in [measured, Event::Result(result)] {
            let advanced = self.scheduler.advance(event, &mut outputs);
            advanced.expect("the result fits its plan");
        }
        outputs
    }
}

/// Bits that seem random (splitmix64).
fn mixed_bits(number: u64) -> u64 {
    let mut bits = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^ (bits >> 27)
}

/// Steps of 8,192 tokens, 256 requests, 20,000 pages of 16 tokens.
fn settings(change: impl FnOnce(&mut Settings)) -> Settings {
    let mut settings = Settings {
        scheduler: SchedulerSettings {
            max_batch_tokens: Some(8_192),
            max_seqs: Some(256),
            max_queue: 100_000,
            max_queue_tokens: 1 << 40,
            ..SchedulerSettings::default()
        },
        pages: PageSettings {
            page_size: 16,
            prefix_cache: false,
            ..PageSettings::default()
        },
        runtime: RuntimeSettings::new(20_000, 140_000, HashSeed([1, 2])),
    };
    change(&mut settings);
    settings
}

fn with_target(settings: &mut Settings) {
    settings.scheduler.itl_target_ms = Some(TARGET_MS);
    settings.runtime.num_pages = 200_000;
}

fn say(case: &str, metric: &str, value: f64) {
    println!("{{\"case\": \"{case}\", \"metric\": \"{metric}\", \"value\": {value:.4}}}");
}

/// Steps until every later estimate of a decode-only step is within a tenth of its time.
fn steps_until_right(world: &mut World, num_steps: usize) -> usize {
    let mut last_wrong = 0;
    for index in 1..=num_steps {
        let step = world.step().expect("decoders are left");
        if (step.expected / step.micros - 1.0).abs() > 0.1 {
            last_wrong = index;
        }
    }
    last_wrong
}

/// A first prefill, then decode-only steps of 10 ms; later their time changes for good.
fn step_time_model() {
    let constant = |micros: f64| move |_: &StepWork, _: u64| micros;
    let mut world = World::new(settings(with_target));
    world.submit_many(8, 125, 100_000);
    world.time = Box::new(constant(40_000.0));
    while world.step().is_some_and(|step| step.plan.decode.is_empty()) {}
    world.time = Box::new(constant(10_000.0));
    let num_steps = steps_until_right(&mut world, 3_000);
    say(
        "step-time model, first decode-only steps",
        "steps_until_within_10_percent",
        num_steps as f64,
    );
    for factor in [2.0, 4.0, 10.0] {
        world.time = Box::new(constant(10_000.0));
        (0..2_000).for_each(|_| drop(world.step()));
        world.time = Box::new(constant(10_000.0 * factor));
        let num_steps = steps_until_right(&mut world, 3_000);
        let case = format!("step-time model, steps become {factor} times as long");
        say(&case, "steps_until_within_10_percent", num_steps as f64);
    }
}

/// Eight decoders whose steps alone take 18 of 30 ms, and prompts that join them.
fn first_steps() {
    let mut world = World::timed(settings(with_target), 18_000.0, 0);
    world.submit_many(8, 1_000, 30_000);
    let mut longest: f64 = 0.0;
    for index in 0..100 {
        if index % 8 == 0 {
            world.submit(2_000, 20, 0);
        }
        let step = world.step().expect("decoders are left");
        if !step.plan.decode.is_empty() {
            longest = longest.max(step.micros);
        }
    }
    say(
        "target 30 ms, longest of the first 100 steps",
        "seconds",
        longest / 1e6,
    );
}

/// Prefill tokens a step beside eight decoders, where one step in `hiccup` takes three times as long, and p99 of the
/// steps: of all, and of those that are no hiccups.
fn prefill_rate(hiccup: u64) -> (f64, f64, f64) {
    let mut world = World::timed(settings(with_target), 5_000.0, hiccup);
    world.submit_many(8, 1_000, 30_000);
    let (mut num_tokens, mut times) = (0, Vec::new());
    for index in 0..6_000 {
        if world.scheduler.stats().num_waiting < 4 {
            world.submit(4_000, 4, 0);
        }
        let step = world.step().expect("decoders are left");
        if index >= 2_500 && !step.plan.decode.is_empty() {
            num_tokens += step.plan.num_prefill_tokens();
            times.push(step.micros);
        }
    }
    let rate = f64::from(num_tokens) / times.len() as f64;
    let p99_of_all = p99(&mut times);
    times.retain(|micros| *micros < 2e3 * TARGET_MS);
    (rate, p99_of_all, p99(&mut times))
}

/// In seconds.
fn p99(micros: &mut [f64]) -> f64 {
    micros.sort_unstable_by(f64::total_cmp);
    micros[micros.len() * 99 / 100] / 1e6
}

fn hiccups() {
    let (undisturbed, ..) = prefill_rate(0);
    for (name, hiccup) in [("0.2%", 500), ("0.5%", 200), ("1%", 100)] {
        let (rate, p99, p99_of_others) = prefill_rate(hiccup);
        let case = format!("target 30 ms, {name} of the steps three times as long");
        say(
            &case,
            "prefill_tokens_a_step_over_undisturbed",
            rate / undisturbed,
        );
        say(&case, "decoding_step_p99", p99);
        say(&case, "decoding_step_p99_without_hiccups", p99_of_others);
    }
}

/// Microseconds of a step of an 8B model on an H200: graphs have whole tiles of 128 tokens, of which some are for
/// decode rows.
fn of_graph_sizes(work: &StepWork, step: u64) -> f64 {
    let (num_prefill, num_decode) = (work.num_prefill_tokens, work.num_decode_rows);
    let sizes = [16, 32, 64, 128, 192, 256];
    let num_rows = sizes.into_iter().find(|size| *size >= num_decode);
    let num_tokens = num_prefill + num_rows.unwrap_or(num_decode);
    let num_tokens = match num_prefill {
        0 => num_decode,
        _ => num_tokens.next_multiple_of(128),
    };
    let noise = 0.98 + 0.04 * (mixed_bits(step + 7) % 100) as f64 / 100.0;
    let attention =
        0.0008 * work.num_prefill_pairs as f64 + 0.035 * work.num_decode_kv_tokens as f64;
    noise * (4_000.0 + 22.0 * num_tokens as f64 + attention)
}

/// 256 streams of 1,024 + 128 tokens.
fn graph_sizes() {
    let mut world = World::new(settings(with_target));
    world.time = Box::new(of_graph_sizes);
    world.submit_many(256, 1_024, 128);
    let (mut mixed, mut times, mut num_tokens) = (Vec::new(), Vec::new(), 0_usize);
    for index in 0..3_000 {
        let step = world.step().expect("requests are left");
        let is_finished = |output: &&Output| matches!(output, Output::Finished { .. });
        let num_finished = step.outputs.iter().filter(is_finished).count();
        for _ in 0..num_finished {
            world.submit(1_024, 128, 0);
        }
        if index >= 1_000 && !step.plan.decode.is_empty() {
            times.push(step.micros);
            num_tokens += step.outputs.len() - num_finished;
            mixed.extend((!step.plan.prefill.is_empty()).then_some(step.micros));
        }
    }
    let case = "target 30 ms, 256 streams, graphs of whole tiles";
    let seconds = times.iter().sum::<f64>() / 1e6;
    let mean = mixed.iter().sum::<f64>() / 1e6 / mixed.len() as f64;
    say(
        case,
        "output_tokens_per_second",
        num_tokens as f64 / seconds,
    );
    say(case, "mixed_step_mean", mean);
    say(case, "decoding_step_p99", p99(&mut times));
}

/// A prompt of 130,000 tokens, and newcomers after it, beside decoders that leave little of the target.
fn long_prefill() {
    let mut world = World::new(settings(|it| {
        with_target(it);
        it.scheduler.max_seqs = Some(64);
        it.pages.page_size = 64;
    }));
    world.time = Box::new(|work, _| {
        1_000.0
            + 20.0 * work.num_prefill_tokens as f64
            + 0.002 * work.num_prefill_pairs as f64
            + 3_300.0 * work.num_decode_rows as f64
    });
    world.submit_many(8, 64, 100_000);
    (0..4_000).for_each(|_| drop(world.step()));
    let long = world.submit(130_000, 2, 0).expect("the queue has room");
    let (mut num_long, mut num_others, mut num_steps) = (0_u32, 0_u32, 0_u32);
    while num_long < 130_000 && num_steps < 100_000 {
        while world.scheduler.stats().num_waiting < 3 {
            world.submit(600, 1, 0);
        }
        let step = world.step().expect("decoders are left");
        num_steps += 1;
        for row in &step.plan.prefill {
            if row.request == long {
                num_long += row.length;
            } else if row.request > long {
                num_others += row.length;
            }
        }
    }
    let case = "target 30 ms, 130k prompt among newcomers";
    say(case, "steps_until_prefilled", num_steps.into());
    say(case, "tokens_of_newcomers_meanwhile", num_others.into());
}

/// An 8,192-token prompt beside decoders that alone take 1 ms more than the target.
fn decoding_over_target() {
    let mut world = World::timed(settings(with_target), 31_000.0, 0);
    world.submit_many(8, 1_000, 30_000);
    (0..50).for_each(|_| drop(world.step()));
    world.submit(8_192, 2, 0);
    let (mut left, mut num_steps) = (8_192_u32, 0_u32);
    while left > 0 && num_steps < 30_000 {
        let step = world.step().expect("decoders are left");
        left = left.saturating_sub(step.plan.num_prefill_tokens());
        num_steps += 1;
    }
    say(
        "target 30 ms, decoding alone takes 31, 8k prompt",
        "steps_until_prefilled",
        num_steps.into(),
    );
}

/// A tenant that was served before, among tenants that ask once each.
fn one_shot_tenants() {
    let mut world = World::new(settings(|it| {
        it.scheduler.policy = Policy::Fair;
        it.scheduler.max_seqs = Some(1);
    }));
    world.submit(16, 16, 1);
    for tenant in 1_000..1_004 {
        world.submit(16, 16, tenant);
    }
    let (mut second, mut num_others, mut next) = (None, 0_u32, 2_000);
    while num_others < 12_500 {
        let step = world.step().expect("requests are left");
        let ended = step.outputs.iter().filter_map(|output| match output {
            Output::Finished { request, .. } => Some(*request),
            Output::Tokens { .. } | Output::Failed { .. } => None,
        });
        for request in ended.collect::<Vec<_>>() {
            if second == Some(request) {
                break;
            }
            num_others += u32::from(second.is_some());
            second = second.or_else(|| world.submit(16, 16, 1));
            world.submit(16, 16, next);
            next += 1;
        }
        if second.is_some_and(|second| world.scheduler.prompt_len(second).is_none()) {
            break;
        }
    }
    say(
        "fair share, second request among one-shot tenants",
        "requests_of_others_before_it",
        num_others.into(),
    );
}

/// One tenant fills the queue; is another's request taken?
fn queue_flood() {
    let mut world = World::new(settings(|it| {
        it.scheduler.policy = Policy::Fair;
        it.scheduler.max_queue = 100;
        it.scheduler.max_seqs = Some(1);
    }));
    for _ in 0..101 {
        world.submit(16, 16, 7);
    }
    let is_taken = world.submit(16, 16, 8).is_some();
    say(
        "fair share, one tenant fills the queue",
        "another_is_taken",
        f64::from(u8::from(is_taken)),
    );
}

/// Requests with one prefix at the same time: prefill tokens computed over distinct ones.
fn shared_prefix(num_requests: u32, num_prefix: u32, batch: u32, chunk: u32) {
    let mut world = World::new(settings(|it| {
        it.pages.prefix_cache = true;
        it.scheduler.max_batch_tokens = Some(batch);
        it.scheduler.long_prefill_token_threshold = Some(chunk);
    }));
    for own in 0..num_requests {
        let mut prompt: Vec<TokenId> = (0..num_prefix).collect();
        prompt.extend([1_000_000 + own; 8]);
        world.submit_prompt(prompt, 4, 0, 0);
    }
    let mut num_computed = 0;
    while let Some(step) = world.step() {
        num_computed += step.plan.num_prefill_tokens();
    }
    let num_distinct = num_prefix + num_requests * 8;
    let case = format!("{num_requests} requests that share {num_prefix} tokens, chunks of {chunk}");
    say(
        &case,
        "computed_over_distinct",
        f64::from(num_computed) / f64::from(num_distinct),
    );
}

/// Long answers in a pool that cannot hold them all.
fn overcommitted(num_prompt: u32, num_output: u32) {
    let mut world = World::timed(settings(|it| it.runtime.num_pages = 2_048), 10_000.0, 0);
    let mut left = 512 - 128;
    world.submit_many(128, num_prompt, num_output);
    let (mut num_prefill, mut micros) = (0, 0.0);
    while let Some(step) = world.step() {
        num_prefill += step.plan.num_prefill_tokens();
        micros += step.micros;
        for output in step.outputs {
            if matches!(output, Output::Finished { .. }) && left > 0 {
                left -= 1;
                world.submit(num_prompt, num_output, 0);
            }
        }
    }
    assert!(world.is_idle());
    let case = format!("512 requests of {num_prompt} + {num_output} tokens on 2,048 pages");
    let needed = f64::from(512 * num_prompt);
    say(
        &case,
        "prefill_over_needed",
        f64::from(num_prefill) / needed,
    );
    let num_preemptions = world.scheduler.stats().counts.num_preemptions;
    say(&case, "preemptions", num_preemptions as f64);
    say(&case, "seconds", micros / 1e6);
}

/// A prompt of higher priority, where requests of lower priority hold the pool.
fn priority() {
    let mut world = World::new(settings(|it| {
        it.scheduler.policy = Policy::Priority;
        it.scheduler.priority_preemption_threshold = Some(1);
        it.scheduler.max_batch_tokens = Some(2_048);
        it.scheduler.max_seqs = Some(64);
        it.runtime.num_pages = 1_000;
        it.pages.watermark = Some(0);
    }));
    for number in 0..40 {
        world.submit_prompt(vec![number; 300], 3_000, 0, 1);
    }
    (0..80).for_each(|_| drop(world.step()));
    let urgent = world.submit_prompt(vec![77; 8_000], 4, 0, 0);
    let mut num_steps = 0_u32;
    while let Some(step) = world.step() {
        let is_admitted = |step: &Step| {
            step.plan
                .new_slots
                .iter()
                .any(|new| Some(new.request) == urgent)
        };
        if is_admitted(&step) {
            break;
        }
        num_steps += 1;
    }
    say(
        "priority, urgent prompt where others hold the pool",
        "steps_until_admitted",
        num_steps.into(),
    );
}

fn main() {
    step_time_model();
    first_steps();
    hiccups();
    graph_sizes();
    long_prefill();
    decoding_over_target();
    one_shot_tenants();
    queue_flood();
    for (num_requests, num_prefix, batch, chunk) in [
        (64, 1_024, 8_192, 8_192),
        (64, 4_096, 8_192, 8_192),
        (4, 32_768, 2_048, 2_048),
        (4, 32_768, 2_048, 512),
    ] {
        shared_prefix(num_requests, num_prefix, batch, chunk);
    }
    overcommitted(128, 1_000);
    overcommitted(16, 2_000);
    priority();
}
