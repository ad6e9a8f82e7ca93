//! Claims about admission where answers need more pages than the pool has.

use std::collections::VecDeque;

use plait_core::{Event, Micros, Output, Plan, Policy, Scheduler, Settings, StepResult, StepWork};

use crate::fixtures::{settings, with};
use crate::harness::Spec;

/// 2,048 pages of 16 tokens, and a watermark of 1%.
fn small_pool(watermark: Option<u32>) -> Settings {
    with(settings(), |it| {
        it.scheduler.policy = Policy::Fcfs;
        it.scheduler.max_seqs = Some(256);
        it.runtime.max_rows = Some(256);
        it.scheduler.max_batch_tokens = Some(8192);
        it.scheduler.long_prefill_token_threshold = None;
        it.scheduler.max_queue = 100_000;
        it.scheduler.max_queue_tokens = 1 << 40;
        it.runtime.num_pages = 2048;
        it.runtime.max_model_len = 16_384;
        it.pages.watermark = watermark;
    })
}

/// What serving some requests took.
#[derive(Debug)]
struct Served {
    num_prefill_tokens: u64,
    num_needed: u64,
    num_preemptions: u64,
    /// Of steps of 8 ms, 20 us a prefill token, 30 us a decode row and 50 ns a token that it reads.
    seconds: f64,
}

impl Served {
    fn recomputed(&self) -> f64 {
        self.num_prefill_tokens as f64 / self.num_needed as f64
    }
}

/// Serves requests of one prompt length, 128 at a time, two steps deep. Answer `i` has `outputs(i)` of at
/// most `max_tokens` tokens.
fn serve(
    settings: Settings,
    num_requests: u32,
    num_prompt: u32,
    max_tokens: u32,
    outputs: impl Fn(u64) -> u32,
) -> Served {
    let mut scheduler = Scheduler::new(settings).unwrap();
    let mut num_left = num_requests;
    let mut submit = |scheduler: &mut Scheduler| {
        num_left = num_left.saturating_sub(1);
        let mut spec = Spec::new(num_prompt, max_tokens);
        spec.stop_ids = vec![1];
        scheduler.submit(spec.request(), Micros(0)).unwrap();
        num_left > 0
    };
    let mut is_left = true;
    for _ in 0..128 {
        is_left = submit(&mut scheduler);
    }
    let mut emitted = vec![0; num_requests as usize];
    let mut in_flight: VecDeque<Plan> = VecDeque::new();
    let mut served = Served {
        num_prefill_tokens: 0,
        num_needed: u64::from(num_requests * num_prompt),
        num_preemptions: 0,
        seconds: 0.0,
    };
    while !scheduler.is_idle() {
        while in_flight.len() < 2
            && let Some(plan) = scheduler.plan(Micros(0))
        {
            in_flight.push_back(plan);
        }
        let plan = in_flight.pop_front().unwrap();
        let work = StepWork::of(&plan);
        served.num_prefill_tokens += work.num_prefill_tokens;
        served.seconds += 8e-3
            + 20e-6 * work.num_prefill_tokens as f64
            + 30e-6 * work.num_decode_rows as f64
            + 50e-9 * work.num_decode_kv_tokens as f64;
        let last_chunks = plan.prefill.iter().filter(|row| row.is_last_chunk);
        let sampled = last_chunks.map(|row| row.request);
        let sampled = sampled.chain(plan.decode.iter().map(|row| row.request));
        let tokens: Vec<u32> = sampled
            .map(|request| {
                let emitted = &mut emitted[usize::try_from(request.0).unwrap()];
                *emitted += 1;
                u32::from(*emitted >= outputs(request.0))
            })
            .collect();
        let result = Event::Result(StepResult {
            step: plan.step,
            num_accepted: &vec![1; tokens.len()],
            token_ids: &tokens,
        });
        let mut ended = Vec::new();
        scheduler.advance(result, &mut ended).unwrap();
        for output in ended {
            if is_left && matches!(output, Output::Finished { .. }) {
                is_left = submit(&mut scheduler);
            }
        }
    }
    served.num_preemptions = scheduler.stats().counts.num_preemptions;
    served
}

/// Between 1 and `most`, and the same for the same number.
fn any_length(number: u64, most: u32) -> u32 {
    1 + u32::try_from(crate::oracle::mix(number, 7) % u64::from(most)).unwrap()
}

/// What it takes with a fixed watermark, and with the reserve that follows from what was seen.
fn fixed_and_seen(
    num_requests: u32,
    num_prompt: u32,
    max_tokens: u32,
    outputs: impl Fn(u64) -> u32,
) -> [Served; 2] {
    [Some(20), None].map(|watermark| {
        serve(
            small_pool(watermark),
            num_requests,
            num_prompt,
            max_tokens,
            &outputs,
        )
    })
}

#[test]
fn answers_as_long_as_asked_are_hardly_recomputed_at_no_lower_throughput() {
    for (num_prompt, num_output) in [(128, 1000), (16, 2000)] {
        let [fixed, seen] = fixed_and_seen(512, num_prompt, num_output, |_| num_output);
        assert!(fixed.recomputed() > 6.0, "{fixed:?}");
        assert!(seen.recomputed() < 1.5, "{seen:?}");
        assert!(
            seen.seconds < 1.02 * fixed.seconds,
            "{seen:?}, before {fixed:?}"
        );
    }
}

#[test]
fn answers_of_unknown_length_are_recomputed_less_at_nearly_the_same_throughput() {
    let [fixed, seen] = fixed_and_seen(1024, 16, 8000, |request| any_length(request, 2000));
    assert!(
        seen.recomputed() < fixed.recomputed() / 8.0,
        "{seen:?}, before {fixed:?}"
    );
    assert!(
        seen.seconds < 1.08 * fixed.seconds,
        "{seen:?}, before {fixed:?}"
    );
}

/// The first answers may fill the pool for all that is known.
#[test]
fn short_answers_are_soon_expected_to_be_short() {
    let [fixed, seen] = fixed_and_seen(2048, 128, 8000, |request| 80 + any_length(request, 40));
    assert_eq!(seen.num_preemptions, 0, "{seen:?}");
    assert!(
        seen.seconds < 1.1 * fixed.seconds,
        "{seen:?}, before {fixed:?}"
    );
}

#[test]
fn all_slots_are_taken_at_once_where_the_pool_holds_them_however_many_wait() {
    let settings = with(small_pool(None), |it| {
        it.scheduler.max_seqs = Some(64);
        it.runtime.max_rows = Some(64);
    });
    let mut scheduler = Scheduler::new(settings).unwrap();
    for _ in 0..1000 {
        let request = Spec::new(100, 100).request();
        scheduler.submit(request, Micros(0)).unwrap();
    }
    let plan = scheduler.plan(Micros(0)).unwrap();
    assert_eq!(plan.prefill.len(), 64);
}
