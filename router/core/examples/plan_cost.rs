//! Time of plan + advance by number of decoders and context, and of admitting one long prompt.
//!
//! `cargo run --release -p plait-core --example plan_cost` prints one JSON object a case and line;
//! with the words `DECODERS CONTEXT STEPS` it runs that case alone, for counting instructions.
#![allow(
    clippy::disallowed_types,
    reason = "this program measures time; the core has none"
)]
#![allow(
    clippy::print_stdout,
    reason = "its result is the table that it prints"
)]

use std::time::{Duration, Instant};

use plait_core::{
    Event, HashSeed, Micros, Plan, Request, Sampling, Scheduler, Settings, StepResult,
};

const PAGE_SIZE: u32 = 64;
const NUM_STEPS: u32 = 2_000;

fn settings(num_seqs: u32, num_pages: u32) -> Settings {
    Settings {
        max_batch_tokens: 1 << 20,
        max_rows: num_seqs,
        max_seqs: num_seqs,
        long_prefill: 1 << 20,
        page_size: PAGE_SIZE,
        num_pages,
        max_model_len: 1 << 20,
        draft_width: 0,
        policy: plait_core::Policy::Fcfs,
        mixed: true,
        prefix_cache: Some(HashSeed([1, 2])),
        watermark: 0,
        starvation_steps: 8,
        itl_target: None,
        max_queue: 1 << 20,
        max_queue_tokens: u64::MAX,
    }
}

/// Prompts of other salts share no page.
fn request(num_prompt: u32, max_tokens: u32, salt: u64) -> Request {
    let sampling = Sampling {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 1,
        logprobs: None,
        prompt_logprobs: None,
    };
    let prompt = (0..num_prompt).collect::<Vec<_>>().into();
    Request {
        prompt,
        max_tokens,
        stop_ids: [u32::MAX].into(),
        sampling,
        priority: 0,
        salt,
        tenant: plait_core::TenantId(0),
    }
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

/// Sorted times of plan + advance with every request decoding, one plan in flight beyond the step.
fn decode_times(num_decoders: u32, context: u32, num_steps: u32) -> Vec<Duration> {
    let num_pages = num_decoders * (context + num_steps + num_decoders).div_ceil(PAGE_SIZE);
    let mut scheduler =
        Scheduler::new(settings(num_decoders, num_pages)).expect("the settings fit");
    for salt in 0..u64::from(num_decoders) {
        scheduler
            .submit(request(context, num_steps + num_decoders, salt), Micros(0))
            .expect("there is room");
    }
    let mut in_flight = loop {
        let plan = scheduler.plan(Micros(0)).expect("prompts are left");
        if plan.decode.len() == num_decoders as usize {
            break plan;
        }
        advance(&mut scheduler, &plan);
    };
    let mut times: Vec<Duration> = (0..num_steps)
        .map(|_| time_one(&mut scheduler, &mut in_flight))
        .collect();
    times.sort_unstable();
    times
}

fn time_one(scheduler: &mut Scheduler, in_flight: &mut Plan) -> Duration {
    let begin = Instant::now();
    let plan = scheduler.plan(Micros(0)).expect("decoders are left");
    let landed = std::mem::replace(in_flight, plan);
    advance(scheduler, &landed);
    begin.elapsed()
}

/// Sorted times of submit + plan of one prompt of 8,192 tokens in a pool of 131,072 pages, of which all
/// but a few are cached where the cache is full; every admission then evicts what it leases.
fn admission_times(is_cache_full: bool) -> Vec<Duration> {
    const NUM_PAGES: u32 = 131_072;
    let mut scheduler = Scheduler::new(settings(256, NUM_PAGES)).expect("the settings fit");
    let mut salts = 0..;
    let num_fillers = NUM_PAGES / (8_192 / PAGE_SIZE) + 1;
    for salt in salts
        .by_ref()
        .take(num_fillers as usize * usize::from(is_cache_full))
    {
        time_admission(&mut scheduler, salt);
    }
    assert_eq!(is_cache_full, scheduler.stats().pages.free == 0);
    let mut times: Vec<Duration> = salts
        .take(500)
        .map(|salt| time_admission(&mut scheduler, salt))
        .collect();
    times.sort_unstable();
    times
}

/// Sorted times of admitting a prompt whose every page but the last is cached.
fn hit_times() -> Vec<Duration> {
    let mut scheduler = Scheduler::new(settings(256, 131_072)).expect("the settings fit");
    time_admission(&mut scheduler, 0);
    let mut times: Vec<Duration> = (0..500)
        .map(|_| time_admission(&mut scheduler, 0))
        .collect();
    times.sort_unstable();
    times
}

fn time_admission(scheduler: &mut Scheduler, salt: u64) -> Duration {
    let request = request(8_192, 1, salt);
    let begin = Instant::now();
    scheduler.submit(request, Micros(0)).expect("there is room");
    let plan = scheduler.plan(Micros(0)).expect("the prompt is admitted");
    let elapsed = begin.elapsed();
    advance(scheduler, &plan);
    elapsed
}

fn print(case: &str, times: &[Duration]) {
    let micros = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
    let (p50, p99) = (micros(50), micros(99));
    println!("{{\"case\": \"{case}\", \"p50_us\": {p50:.1}, \"p99_us\": {p99:.1}}}");
}

fn main() {
    let words: Vec<u32> = std::env::args()
        .skip(1)
        .map(|word| word.parse().expect("three numbers"))
        .collect();
    if let [num_decoders, context, num_steps] = words[..] {
        decode_times(num_decoders, context, num_steps);
        return;
    }
    let cases = [
        (32, 1_024),
        (256, 1_024),
        (256, 8_192),
        (256, 131_072),
        (1_024, 8_192),
        (4_096, 2_048),
    ];
    for (num_decoders, context) in cases {
        let case = format!("plan + advance, {num_decoders} decoders, context {context}");
        print(&case, &decode_times(num_decoders, context, NUM_STEPS));
    }
    print(
        "admit 8192 tokens, pool of 131072 pages, cache empty",
        &admission_times(false),
    );
    print(
        "admit 8192 tokens, pool of 131072 pages, cache full",
        &admission_times(true),
    );
    print(
        "admit 8192 tokens, all cached but the last page",
        &hit_times(),
    );
}
