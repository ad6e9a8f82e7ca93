//! Time of plan + advance by number of decoders and context, and of admitting one long prompt.
//!
//! `cargo run --release -p plait-core --example plan_cost`
#![allow(
    clippy::disallowed_types,
    reason = "this program measures time; the core has none"
)]
#![allow(
    clippy::print_stdout,
    reason = "its result is the table that it prints"
)]

use std::time::{Duration, Instant};

use plait_core::{Event, Micros, Plan, Request, Sampling, Scheduler, Settings, StepResult};

const PAGE_SIZE: u32 = 64;
const NUM_STEPS: usize = 2_000;

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
        prefix_cache: None,
        watermark: 0,
        starvation_steps: 8,
        itl_target: None,
        max_queue: 1 << 20,
        max_queue_tokens: u64::MAX,
    }
}

fn request(num_prompt: u32, max_tokens: u32) -> Request {
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
        salt: 0,
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
fn decode_times(num_decoders: u32, context: u32) -> Vec<Duration> {
    let num_steps = u32::try_from(NUM_STEPS).expect("a few thousand");
    let num_pages = num_decoders * (context + num_steps + num_decoders).div_ceil(PAGE_SIZE);
    let mut scheduler =
        Scheduler::new(settings(num_decoders, num_pages)).expect("the settings fit");
    for _ in 0..num_decoders {
        scheduler
            .submit(request(context, num_steps + num_decoders), Micros(0))
            .expect("there is room");
    }
    let mut in_flight = loop {
        let plan = scheduler.plan(Micros(0)).expect("prompts are left");
        if plan.decode.len() == num_decoders as usize {
            break plan;
        }
        advance(&mut scheduler, &plan);
    };
    let mut times: Vec<Duration> = (0..NUM_STEPS)
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

/// Sorted times of submit + plan of one prompt of 8,192 tokens in a pool of 131,072 pages.
fn admission_times() -> Vec<Duration> {
    let mut scheduler = Scheduler::new(settings(256, 131_072)).expect("the settings fit");
    let mut times: Vec<Duration> = (0..500).map(|_| time_admission(&mut scheduler)).collect();
    times.sort_unstable();
    times
}

fn time_admission(scheduler: &mut Scheduler) -> Duration {
    let request = request(8_192, 1);
    let begin = Instant::now();
    scheduler
        .submit(request, Micros(0))
        .expect("the pool is empty");
    let plan = scheduler.plan(Micros(0)).expect("the prompt is admitted");
    let elapsed = begin.elapsed();
    advance(scheduler, &plan);
    elapsed
}

fn print(name: &str, times: &[Duration]) {
    let micros = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
    println!(
        "{name:<44} p50 {:>7.1} us   p99 {:>7.1} us",
        micros(50),
        micros(99)
    );
}

fn main() {
    for (num_decoders, context) in [(256, 8_192), (256, 131_072), (1_024, 8_192), (4_096, 2_048)] {
        let name = format!("plan + advance, {num_decoders} decoders, context {context}");
        print(&name, &decode_times(num_decoders, context));
    }
    print(
        "admit 8,192 tokens, pool of 131,072 pages",
        &admission_times(),
    );
}
