//! Time of plan + advance by number of decoders, context and cache, and of admitting one long prompt.
//!
//! `cargo run --release -p plait-core --example plan_cost` prints one JSON object a case and line; with
//! the words `DECODERS CONTEXT STEPS empty|full` it runs that case alone, for counting instructions in
//! [`step`].
#![allow(
    clippy::disallowed_types,
    reason = "this program measures time; the core has none"
)]
#![allow(
    clippy::print_stdout,
    reason = "its result is the table that it prints"
)]

mod pressure;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plait_core::{
    Event, HashSeed, Micros, PageSettings, Plan, Policy, Request, RuntimeSettings, Scheduler,
    SchedulerSettings, Settings, StepResult, TenantId, TokenId,
};

const PAGE_SIZE: u32 = 64;
const NUM_STEPS: u32 = 1_000;
/// Tokens of one prompt at most; a filler's.
const LONGEST: u32 = 1 << 20;
/// Salts from here on are no decoder's.
const FILLERS: u64 = 1 << 32;

/// A scheduler that only pages bound.
fn scheduler(num_seqs: u32, num_pages: u32, policy: Policy) -> Scheduler {
    let scheduler = SchedulerSettings {
        max_batch_tokens: Some(LONGEST),
        max_seqs: Some(num_seqs),
        policy,
        ..SchedulerSettings::default()
    };
    with_unbounded_queue(&scheduler, num_pages)
}

/// One that cuts prompts into chunks, in steps of at most 8,192 tokens.
fn chunked_scheduler(num_seqs: u32, num_pages: u32, chunk: u32) -> Scheduler {
    let scheduler = SchedulerSettings {
        max_batch_tokens: Some(8_192),
        max_seqs: Some(num_seqs),
        long_prefill_token_threshold: Some(chunk),
        ..SchedulerSettings::default()
    };
    with_unbounded_queue(&scheduler, num_pages)
}

fn with_unbounded_queue(scheduler: &SchedulerSettings, num_pages: u32) -> Scheduler {
    let scheduler = SchedulerSettings {
        max_queue: LONGEST,
        max_queue_tokens: u64::MAX,
        ..scheduler.clone()
    };
    let pages = PageSettings {
        page_size: PAGE_SIZE,
        watermark: Some(0),
        ..PageSettings::default()
    };
    let runtime = RuntimeSettings::new(num_pages, 2 * LONGEST, HashSeed([1, 2]));
    let settings = Settings {
        scheduler,
        pages,
        runtime,
    };
    Scheduler::new(settings).expect("the settings fit")
}

/// Prompts of other salts share no page.
fn request(prompt: Arc<[TokenId]>, max_tokens: u32, salt: u64) -> Request {
    Request {
        prompt,
        max_tokens,
        stop_ids: [TokenId::MAX].into(),
        num_choices: NonZeroU32::MIN,
        prompt_logprobs: false,
        is_masked: false,
        num_slot_words: 0,
        pooled: None,
        priority: 0,
        salt,
        tenant: TenantId(salt),
        weight: NonZeroU32::MIN,
    }
}

fn prompt(num_tokens: u32) -> Arc<[TokenId]> {
    (0..num_tokens).collect()
}

fn submit(scheduler: &mut Scheduler, request: Request) {
    let taken = scheduler.submit(request, Micros(0));
    taken.expect("there is room");
}

fn advance(scheduler: &mut Scheduler, plan: &Plan) {
    let num = plan.prefill.iter().filter(|row| row.is_last_chunk).count() + plan.decode.len();
    let (accepted, tokens) = (vec![1; num], vec![7; num]);
    let result = StepResult {
        step: plan.step,
        num_accepted: &accepted,
        token_ids: &tokens,
    };
    let mut outputs = Vec::with_capacity(num);
    scheduler
        .advance(Event::Result(result), &mut outputs)
        .expect("the result fits the plan");
}

fn run_to_the_end(scheduler: &mut Scheduler) {
    while let Some(plan) = scheduler.plan(Micros(0)) {
        advance(scheduler, &plan);
    }
}

/// Leaves no page free: all pages that no request holds are cached.
fn fill_cache(scheduler: &mut Scheduler, num_pages: u32) {
    let mut left = num_pages;
    for salt in FILLERS.. {
        let num = left.min(num_pages / 2).min(LONGEST / PAGE_SIZE);
        if num == 0 {
            break;
        }
        submit(scheduler, request(prompt(num * PAGE_SIZE), 1, salt));
        run_to_the_end(scheduler);
        left -= num;
    }
    assert_eq!(scheduler.stats().pages.free, 0);
}

/// Makes one plan while another is in flight, then completes the other. Never inlined, so that a profiler can
/// tell it from what prepares it.
#[inline(never)]
pub fn step(scheduler: &mut Scheduler, in_flight: &mut Plan) {
    let plan = scheduler.plan(Micros(0)).expect("decoders are left");
    let completed = std::mem::replace(in_flight, plan);
    advance(scheduler, &completed);
}

fn sorted_times(num: u32, mut work: impl FnMut() -> Duration) -> Vec<Duration> {
    let mut times: Vec<Duration> = (0..num).map(|_| work()).collect();
    times.sort_unstable();
    times
}

fn step_times(scheduler: &mut Scheduler, in_flight: &mut Plan, num_steps: u32) -> Vec<Duration> {
    sorted_times(num_steps, || {
        let begin = Instant::now();
        step(scheduler, in_flight);
        begin.elapsed()
    })
}

/// So many decoding requests, and the step in flight. Their contexts end anywhere in a
/// page, and they decode for `num_steps` and more.
fn decoding(
    num_decoders: u32,
    context: u32,
    num_steps: u32,
    is_cache_full: bool,
) -> (Scheduler, Plan) {
    let max_tokens = num_steps + num_decoders + 16;
    let longest = (context + PAGE_SIZE + max_tokens).div_ceil(PAGE_SIZE);
    let num_pages = num_decoders * longest;
    let mut scheduler = scheduler(num_decoders, num_pages, Policy::Fcfs);
    if is_cache_full {
        fill_cache(&mut scheduler, num_pages);
    }
    let prompts: Vec<_> = (0..PAGE_SIZE).map(|more| prompt(context + more)).collect();
    for salt in 0..num_decoders {
        let prompt = prompts[(salt % PAGE_SIZE) as usize].clone();
        submit(&mut scheduler, request(prompt, max_tokens, u64::from(salt)));
    }
    loop {
        let plan = scheduler.plan(Micros(0)).expect("prompts are left");
        if plan.decode.len() == num_decoders as usize {
            return (scheduler, plan);
        }
        advance(&mut scheduler, &plan);
    }
}

fn time_decoding() {
    for is_cache_full in [false, true] {
        for num_decoders in [32, 256, 1_024, 4_096] {
            for context in [1_024, 8_192, 131_072] {
                let (mut scheduler, mut in_flight) =
                    decoding(num_decoders, context, NUM_STEPS, is_cache_full);
                let cache = if is_cache_full { "full" } else { "empty" };
                let case = format!(
                    "plan + advance, {num_decoders} decoders, context {context}, cache {cache}"
                );
                print(
                    &case,
                    &step_times(&mut scheduler, &mut in_flight, NUM_STEPS),
                );
            }
        }
    }
}

/// The head of the queue cannot be admitted, though the cache has pages of it: 2,048, or with a full cache
/// half as many, of which the decoders evict one a step.
fn time_blocked_head() {
    for is_cache_full in [false, true] {
        let (mut scheduler, mut in_flight) = blocked_head(is_cache_full);
        let cache = if is_cache_full { "full" } else { "empty" };
        let times = step_times(&mut scheduler, &mut in_flight, NUM_STEPS);
        assert_eq!(scheduler.stats().num_waiting, 1);
        print(
            &format!(
                "plan + advance, 64 decoders, blocked head that has cached pages, cache {cache}"
            ),
            &times,
        );
    }
}

fn blocked_head(is_cache_full: bool) -> (Scheduler, Plan) {
    const NUM_DECODERS: u32 = 64;
    const NUM_CACHED: u32 = 2_048;
    const BLOCKED: u64 = FILLERS - 1;
    let num_others = NUM_DECODERS * (2_048 + 2 * NUM_STEPS) / PAGE_SIZE;
    let num_pages = NUM_CACHED + num_others;
    let mut scheduler = scheduler(256, num_pages, Policy::Fcfs);
    submit(
        &mut scheduler,
        request(prompt(NUM_CACHED * PAGE_SIZE), 1, BLOCKED),
    );
    run_to_the_end(&mut scheduler);
    if is_cache_full {
        fill_cache(&mut scheduler, num_others);
    }
    for salt in 0..u64::from(NUM_DECODERS) {
        submit(&mut scheduler, request(prompt(1_024), 2 * NUM_STEPS, salt));
    }
    let in_flight = scheduler.plan(Micros(0)).expect("prompts are left");
    let too_long = (num_pages - 16) * PAGE_SIZE;
    submit(&mut scheduler, request(prompt(too_long), 1, BLOCKED));
    (scheduler, in_flight)
}

/// Tenants that all wait for one that runs.
fn time_tenants() {
    const NUM_TENANTS: u64 = 4_096;
    const NUM_PAGES: u32 = 256 * (1_024 + 4 * NUM_STEPS) / PAGE_SIZE;
    let mut scheduler = scheduler(257, NUM_PAGES, Policy::Fair);
    for tenant in 0..256 {
        submit(
            &mut scheduler,
            request(prompt(1_024), 4 * NUM_STEPS, tenant),
        );
    }
    let mut in_flight = scheduler.plan(Micros(0)).expect("prompts are left");
    let too_long = prompt((NUM_PAGES - 16) * PAGE_SIZE);
    for tenant in 256..256 + NUM_TENANTS {
        submit(&mut scheduler, request(too_long.clone(), 1, tenant));
    }
    let times = step_times(&mut scheduler, &mut in_flight, NUM_STEPS);
    assert_eq!(u64::from(scheduler.stats().num_waiting), NUM_TENANTS);
    print("plan + advance, 256 decoders, 4096 tenants waiting", &times);
}

/// Submit + plan of one prompt of 8,192 tokens in a pool of 131,072 pages. Where the cache is full,
/// every admission evicts what it leases; where the prompt is cached, all but its last page is found.
fn time_admissions() {
    const NUM_PAGES: u32 = 131_072;
    let asked = prompt(8_192);
    for (cache, is_full, is_same) in [
        ("empty", false, false),
        ("full", true, false),
        ("with the prompt", true, true),
    ] {
        let mut scheduler = scheduler(256, NUM_PAGES, Policy::Fcfs);
        if is_full {
            fill_cache(&mut scheduler, NUM_PAGES);
        }
        let mut salts = 0..;
        let times = sorted_times(501, || {
            let salt = salts.next().filter(|_| !is_same).unwrap_or(0);
            let request = request(asked.clone(), 1, salt);
            let begin = Instant::now();
            submit(&mut scheduler, request);
            let plan = scheduler.plan(Micros(0)).expect("the prompt is admitted");
            let elapsed = begin.elapsed();
            advance(&mut scheduler, &plan);
            elapsed
        });
        print(
            &format!("admit 8192 tokens, pool of {NUM_PAGES} pages, cache {cache}"),
            &times,
        );
    }
}

fn print(case: &str, times: &[Duration]) {
    let micros = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
    let (p50, p99) = (micros(50), micros(99));
    println!("{{\"case\": \"{case}\", \"p50\": {p50:.2}, \"p99\": {p99:.2}}}");
}

/// A figure without a unit.
fn print_figure(case: &str, metric: &str, value: f64) {
    println!("{{\"case\": \"{case}\", \"{metric}\": {value:.3}}}");
}

/// The case of the command line: decoders, context, steps, and whether the cache is full.
fn only_case() -> Option<(u32, u32, u32, bool)> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [decoders, context, steps, cache] = &words[..] else {
        return None;
    };
    let number = |word: &String| word.parse().expect("DECODERS CONTEXT STEPS empty|full");
    Some((
        number(decoders),
        number(context),
        number(steps),
        cache == "full",
    ))
}

fn main() {
    if let Some((num_decoders, context, num_steps, is_cache_full)) = only_case() {
        let (mut scheduler, mut in_flight) =
            decoding(num_decoders, context, num_steps, is_cache_full);
        (0..num_steps).for_each(|_| step(&mut scheduler, &mut in_flight));
        return;
    }
    time_decoding();
    time_blocked_head();
    time_tenants();
    pressure::time_waiting();
    pressure::time_overload();
    pressure::time_shared_prefixes();
    time_admissions();
}
