//! What recording KV events adds to plan + advance: `cargo run --release -p plait-core --example
//! kv_event_cost`. Every page that a prompt fills is stored, and evicts another.
#![allow(
    clippy::disallowed_types,
    reason = "this program measures time; the core has none"
)]
#![allow(
    clippy::print_stdout,
    reason = "its result is the table that it prints"
)]

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use plait_core::{
    Event, HashSeed, Micros, PageSettings, Plan, Request, RuntimeSettings, Scheduler,
    SchedulerSettings, Settings, StepResult, TenantId,
};

const PAGE_SIZE: u32 = 64;
const STEP_TOKENS: u32 = 8192;
const NUM_PAGES: u32 = 4096;
const NUM_STEPS: u32 = 2000;
const NUM_ROUNDS: usize = 7;

fn scheduler() -> Scheduler {
    let settings = Settings {
        scheduler: SchedulerSettings {
            max_batch_tokens: Some(STEP_TOKENS),
            max_seqs: Some(256),
            ..SchedulerSettings::default()
        },
        pages: PageSettings {
            page_size: PAGE_SIZE,
            ..PageSettings::default()
        },
        runtime: RuntimeSettings::new(NUM_PAGES, 2 * STEP_TOKENS, HashSeed([1, 2])),
    };
    Scheduler::new(settings).expect("the settings fit")
}

/// A prompt that fills a step and shares no page with another.
fn request(salt: u64) -> Request {
    Request {
        prompt: (0..STEP_TOKENS).collect(),
        max_tokens: 1,
        stop_ids: [].into(),
        num_choices: NonZeroU32::MIN,
        prompt_logprobs: false,
        is_masked: false,
        num_slot_words: 0,
        pooled: None,
        priority: 0,
        salt,
        tenant: TenantId(0),
        weight: NonZeroU32::MIN,
    }
}

fn complete(scheduler: &mut Scheduler, plan: &Plan) {
    let result = StepResult {
        step: plan.step,
        num_accepted: &[1],
        token_ids: &[7],
    };
    let advanced = scheduler.advance(Event::Result(result), &mut Vec::new());
    advanced.expect("the result fits the plan");
}

/// Mean time of plan, advance and the taking of events.
fn time_a_step(records: bool) -> Duration {
    let mut scheduler = scheduler();
    if records {
        scheduler.record_kv_events();
    }
    let mut events = Vec::new();
    let mut total = Duration::ZERO;
    for salt in 0..u64::from(NUM_STEPS) {
        let taken = scheduler.submit(request(salt), Micros(0));
        taken.expect("the queue is empty");
        let began = Instant::now();
        let plan = scheduler.plan(Micros(0)).expect("a prompt waits");
        complete(&mut scheduler, &plan);
        scheduler.take_kv_events(&mut events);
        total += began.elapsed();
        events.clear();
    }
    total / NUM_STEPS
}

fn main() {
    // Alternating, and the least of each: other work on the machine only adds.
    let rounds = (0..NUM_ROUNDS).map(|_| [false, true].map(time_a_step));
    let [off, on] = rounds.fold([Duration::MAX; 2], |least, round| {
        [least[0].min(round[0]), least[1].min(round[1])]
    });
    println!(
        "{STEP_TOKENS} prompt tokens a step, {} pages stored and evicted",
        STEP_TOKENS / PAGE_SIZE
    );
    println!("events off: {off:?} a step");
    println!("events on:  {on:?} a step");
}
