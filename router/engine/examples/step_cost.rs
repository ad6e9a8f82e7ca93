//! What one decode step costs the engine: processor time of the driver's and the output thread, and
//! how many tokens a second reach Python's side. Run it in release:
//! `cargo run --release -p plait-engine --example step_cost`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

#[path = "../tests/driver/fake_worker.rs"]
#[allow(
    dead_code,
    reason = "a measurement needs little of what the tests share"
)]
mod fake_worker;
#[path = "../tests/driver/harness.rs"]
#[allow(
    dead_code,
    reason = "a measurement needs little of what the tests share"
)]
mod harness;
#[path = "../tests/driver/manual_clock.rs"]
#[allow(
    dead_code,
    clippy::unwrap_used,
    reason = "the tests' rig; this needs little of it"
)]
mod manual_clock;
#[path = "../tests/driver/model.rs"]
mod model;

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::json;

/// Processor time of this process's thread of that name.
fn processor_time(thread_name: &str) -> Duration {
    let tasks = fs::read_dir("/proc/self/task").expect("Linux lists threads");
    let tasks = tasks.map(|task| task.expect("Linux lists threads").path());
    let times = tasks.filter_map(|task| {
        let name = fs::read_to_string(task.join("comm")).ok()?;
        let schedstat = fs::read_to_string(task.join("schedstat")).ok()?;
        let nanos = schedstat.split(' ').next()?.parse().ok()?;
        (name.trim() == thread_name).then_some(Duration::from_nanos(nanos))
    });
    times.sum()
}

fn measure(num_streams: u64, out: &mut impl Write) -> std::io::Result<()> {
    const NUM_TOKENS: u64 = 500;
    let settings =
        json!({"max_seqs": 256, "max_batch_tokens": 2048, "max_queue": 512, "page_size": 64});
    let mut harness = harness::Harness::ready(&settings, |rank| rank.num_pages = 1 << 14);
    let names = ["plait-driver", "plait-output", "plait-text"];
    let (start, before) = (Instant::now(), names.map(processor_time));
    for stream in 0..num_streams {
        harness.submit(
            stream,
            "abc",
            &json!({"max_tokens": NUM_TOKENS, "ignore_eos": true}),
        );
    }
    for stream in 0..num_streams {
        harness.answer(stream);
    }
    let (wall, after) = (start.elapsed(), names.map(processor_time));
    let num_steps = harness.status()["step"]
        .as_f64()
        .expect("the engine counts steps");
    let micros = |thread: usize| (after[thread] - before[thread]).as_secs_f64() * 1e6;
    let num_tokens = (num_streams * NUM_TOKENS) as f64;
    writeln!(
        out,
        "{num_streams:4} streams: {num_steps:5} steps, driver {:6.1} us a step, output {:6.1} us a step ({:.2} us a token), \
         prepare {:.0} us a request, {:.0} tokens/s",
        micros(0) / num_steps,
        micros(1) / num_steps,
        micros(1) / num_tokens,
        micros(2) / num_streams as f64,
        num_tokens / wall.as_secs_f64(),
    )
}

fn main() -> std::io::Result<()> {
    [1, 64, 256]
        .into_iter()
        .try_for_each(|num_streams| measure(num_streams, &mut std::io::stdout()))
}
