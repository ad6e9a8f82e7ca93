//! Prints what the wire costs, a JSON object a case and line:
//! `cargo run --release -p plait-proto --example timing`.

#![allow(clippy::print_stdout, reason = "the example is there to print")]

use std::hint::black_box;
use std::time::Instant;

use plait_proto::{
    AppendedPage, DecodeRow, Message, NewSlot, Plan, PlanEncoder, PrefillRow, SamplingParams,
    StepResult, decode, encode,
};

const NUM_ROWS: u32 = 256;
const CHUNK: u32 = 2048;
const ROUNDS: u32 = 20_000;

fn main() {
    let mut encoder = PlanEncoder::default();
    for (name, plan) in [
        ("decode plan of 256 rows", decode_plan()),
        ("plan of 2048 + 255 tokens", mixed_plan()),
    ] {
        let frames = encode(&plan.clone().into());
        let num_bytes = num_bytes(&frames);
        report(&format!("encode a {name}"), num_bytes, || {
            encoder.encode(&plan).len()
        });
        report(&format!("decode a {name}"), num_bytes, || decode(&frames));
    }
    let result: Message = step_result().into();
    let frames = encode(&result);
    let num_bytes = num_bytes(&frames);
    report("encode a result of 256 rows", num_bytes, || encode(&result));
    report("decode a result of 256 rows", num_bytes, || decode(&frames));
}

fn num_bytes(frames: &[Vec<u8>]) -> usize {
    frames.iter().map(Vec::len).sum()
}

fn report<T>(case: &str, num_bytes: usize, mut work: impl FnMut() -> T) {
    let start = Instant::now();
    for _ in 0..ROUNDS {
        black_box(work());
    }
    let mean = start.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS);
    println!("{{\"case\": \"{case}\", \"mean\": {mean:.2}, \"bytes\": {num_bytes}}}");
}

fn decode_plan() -> Plan {
    Plan {
        step: 70_000,
        decode: (0..NUM_ROWS)
            .map(|slot| DecodeRow {
                length: 1,
                slot,
                start: 1000 + slot,
            })
            .collect(),
        appended_pages: (0..8)
            .map(|slot| AppendedPage {
                slot,
                page: 10_000 + slot,
            })
            .collect(),
        ..Plan::default()
    }
}

fn mixed_plan() -> Plan {
    let mut plan = decode_plan();
    plan.decode.pop();
    plan.new_slots.push(NewSlot {
        slot: NUM_ROWS - 1,
        next_output: 0,
        sampling: SamplingParams {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.95,
            seed: u64::MAX,
            ..SamplingParams::default()
        },
    });
    let (slot, length) = (NUM_ROWS - 1, CHUNK);
    plan.prefill.push(PrefillRow {
        slot,
        start: 0,
        length,
        is_last_chunk: true,
        lookahead: false,
    });
    plan.token_ids = (0..CHUNK).collect();
    plan.appended_pages
        .extend((0..CHUNK / 64).map(|page| AppendedPage { slot, page }));
    plan
}

fn step_result() -> StepResult {
    let num_accepted = vec![1; NUM_ROWS as usize];
    let token_ids = (0..NUM_ROWS).collect();
    StepResult {
        step: 70_000,
        elapsed_us: 20_000,
        num_accepted,
        token_ids,
        ..StepResult::default()
    }
}
