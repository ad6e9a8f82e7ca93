//! Planning under pressure: many tenants and requests that wait, overload, shared prefixes.

use std::time::Instant;

use plait_core::{Micros, Plan, Policy, Scheduler};

use crate::{
    NUM_STEPS, PAGE_SIZE, advance, print, prompt, request, scheduler, sorted_times, step_times,
    submit,
};

const NUM_TENANTS: u64 = 4_096;
const NUM_DECODERS: u32 = 256;
const NUM_WAITING: u64 = 100_000;

/// Decoders beside requests that wait for a slot: none, one of each tenant, and a hundred thousand.
pub fn time_waiting() {
    for (waiting, num_waiting) in [
        ("nobody waiting", 0),
        ("100000 requests of 4096 tenants waiting", NUM_WAITING),
    ] {
        for policy in [Policy::Fcfs, Policy::Fair] {
            let (mut scheduler, mut in_flight) = decoding(policy);
            for salt in 0..num_waiting {
                let tenant = 1_000 + salt % NUM_TENANTS;
                submit(&mut scheduler, request(prompt(1_024), 1, tenant));
            }
            let times = step_times(&mut scheduler, &mut in_flight, NUM_STEPS);
            assert_eq!(u64::from(scheduler.stats().num_waiting), num_waiting);
            let case = format!("plan + advance, 256 decoders, {}, {waiting}", name(policy));
            print(&case, &times);
        }
    }
}

fn name(policy: Policy) -> &'static str {
    match policy {
        Policy::Fair => "fair share",
        _ => "in order",
    }
}

/// Every slot decodes.
fn decoding(policy: Policy) -> (Scheduler, Plan) {
    let num_pages = NUM_DECODERS * (1_024 + 4 * NUM_STEPS) / PAGE_SIZE;
    let mut scheduler = scheduler(NUM_DECODERS, num_pages, policy);
    for tenant in 0..u64::from(NUM_DECODERS) {
        submit(
            &mut scheduler,
            request(prompt(1_024), 4 * NUM_STEPS, tenant),
        );
    }
    let in_flight = scheduler.plan(Micros(0)).expect("prompts are left");
    (scheduler, in_flight)
}

/// Requests end and others are admitted at every step, while the queue holds few or a hundred thousand.
pub fn time_overload() {
    for num_waiting in [64, NUM_WAITING] {
        for policy in [Policy::Fcfs, Policy::Fair] {
            let times = overload_times(policy, num_waiting);
            let case = format!(
                "plan + advance + submits, 256 slots overloaded, {}, {num_waiting} waiting",
                name(policy)
            );
            print(&case, &times);
        }
    }
}

fn overload_times(policy: Policy, num_waiting: u64) -> Vec<std::time::Duration> {
    /// Answers end one by one, after 32 tokens in the mean.
    const LONGEST_OUTPUT: u64 = 63;
    let num_pages = NUM_DECODERS * 8;
    let mut scheduler = scheduler(NUM_DECODERS, num_pages, policy);
    let asked = prompt(256);
    let mut salts = 0..;
    let mut ask = |scheduler: &mut Scheduler, num: u64| {
        for salt in salts.by_ref().take(usize::try_from(num).expect("few")) {
            let num_output = u32::try_from(1 + salt % LONGEST_OUTPUT).expect("few");
            let mut request = request(asked.clone(), num_output, salt % NUM_TENANTS);
            request.salt = salt;
            submit(scheduler, request);
        }
    };
    ask(&mut scheduler, num_waiting + u64::from(NUM_DECODERS));
    let mut in_flight = scheduler.plan(Micros(0)).expect("prompts are left");
    sorted_times(NUM_STEPS, || {
        let missing = num_waiting.saturating_sub(scheduler.stats().num_waiting.into());
        let begin = Instant::now();
        ask(&mut scheduler, missing);
        crate::step(&mut scheduler, &mut in_flight);
        begin.elapsed()
    })
}

/// Requests that begin alike: how many prefill tokens are computed, and what a plan takes meanwhile.
pub fn time_shared_prefixes() {
    for (num_requests, num_prefix, chunk) in [(64, 1_024, 8_192), (4, 32_768, 512)] {
        let (times, num_computed) = shared_prefix(num_requests, num_prefix, chunk);
        let case =
            format!("{num_requests} requests that share {num_prefix} tokens, chunks of {chunk}");
        print(&format!("{case}: plan + advance"), &times);
        let num_distinct = num_prefix + num_requests * OWN_TOKENS;
        let ratio = f64::from(num_computed) / f64::from(num_distinct);
        crate::print_figure(&case, "computed_over_distinct", ratio);
    }
}

/// Tokens of each request after what it shares.
const OWN_TOKENS: u32 = 8;

fn shared_prefix(
    num_requests: u32,
    num_prefix: u32,
    chunk: u32,
) -> (Vec<std::time::Duration>, u32) {
    let num_pages = num_requests * (num_prefix + 256) / PAGE_SIZE;
    let mut scheduler = crate::chunked_scheduler(num_requests, num_pages, chunk);
    for own in 0..num_requests {
        let shared = 0..num_prefix;
        let prompt = shared.chain(std::iter::repeat_n(num_prefix + own, OWN_TOKENS as usize));
        let mut request = request(prompt.collect(), 64, 0);
        request.salt = 0;
        submit(&mut scheduler, request);
    }
    let mut in_flight = scheduler.plan(Micros(0)).expect("prompts are left");
    let (mut times, mut num_computed) = (Vec::new(), 0);
    loop {
        num_computed += in_flight.num_prefill_tokens();
        let begin = Instant::now();
        let plan = scheduler.plan(Micros(0));
        advance(&mut scheduler, &in_flight);
        times.push(begin.elapsed());
        match plan.or_else(|| scheduler.plan(Micros(0))) {
            Some(plan) => in_flight = plan,
            None => break,
        }
    }
    times.sort_unstable();
    (times, num_computed)
}
