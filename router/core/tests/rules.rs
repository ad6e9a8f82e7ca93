//! Claims about the rules, one at a time.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
use std::sync::Arc;

use plait_core::{
    Event, FinishReason, Micros, Output, Plan, Request, RequestId, Sampling, Scheduler, Settings,
    StepResult,
};

fn settings() -> Settings {
    Settings {
        max_batch_tokens: 64,
        max_rows: 8,
        max_seqs: 8,
        long_prefill: 32,
        page_size: 16,
        num_pages: 32,
        max_model_len: 256,
        mixed: true,
        watermark: 1,
        starvation_steps: 8,
        max_queue: 16,
        max_queue_tokens: 4096,
    }
}

fn request(prompt: u32, max_tokens: u32) -> Request {
    Request {
        prompt: (0..prompt).collect::<Vec<_>>().into(),
        max_tokens,
        stop_ids: Arc::new([999]),
        sampling: Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            logprobs: None,
            prompt_logprobs: None,
        },
        priority: 0,
    }
}

/// The result in which every row that samples gets `token`.
fn answer(scheduler: &mut Scheduler, plan: &Plan, token: u32) -> Vec<Output> {
    let num = plan.prefill.iter().filter(|row| row.is_last_chunk).count() + plan.decode.len();
    let (accepted, tokens) = (vec![1; num], vec![token; num]);
    let result = StepResult {
        step: plan.step,
        num_accepted: &accepted,
        token_ids: &tokens,
    };
    let mut outputs = Vec::new();
    scheduler
        .advance(Event::Result(result), &mut outputs)
        .unwrap();
    outputs
}

#[test]
fn a_prompt_is_cut_into_chunks_and_then_decodes_to_its_length() {
    let mut scheduler = Scheduler::new(settings()).unwrap();
    scheduler.submit(request(40, 2), Micros(0)).unwrap();
    let chunks: Vec<Plan> = (0..2).map(|i| scheduler.plan(Micros(i)).unwrap()).collect();
    let of = |plan: &Plan| {
        (
            plan.prefill[0].start,
            plan.prefill[0].length,
            plan.prefill[0].is_last_chunk,
        )
    };
    assert_eq!(
        chunks.iter().map(of).collect::<Vec<_>>(),
        [(0, 32, false), (32, 8, true)]
    );
    assert!(answer(&mut scheduler, &chunks[0], 7).is_empty());
    let decode = scheduler.plan(Micros(3)).unwrap();
    assert_eq!((decode.decode[0].start, decode.prefill.len()), (40, 0));
    assert!(
        scheduler.plan(Micros(4)).is_none(),
        "every token that is due is on the wire"
    );
    assert_eq!(answer(&mut scheduler, &chunks[1], 7).len(), 1);
    let finished = Output::Finished {
        request: RequestId(0),
        reason: FinishReason::Length,
    };
    assert_eq!(answer(&mut scheduler, &decode, 8)[1], finished);
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.stats().pages.free, 32);
}
