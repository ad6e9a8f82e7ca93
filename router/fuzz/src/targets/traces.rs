//! Files of `plait simulate` and `plait plan`: traces, step traces and configurations.

use std::fs;
use std::path::Path;

use plait_core::{PageSettings, SchedulerSettings};
use plait_sim::{ModelSize, Settings};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::Target;

const CSV: &[&[u8]] = &[
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
    b"\n",
    b",",
    b"\"",
    b"2023-11-16 18:17:03.9799600",
    b"2024-02-30",
    b"-1",
];
const JSONL: &[&[u8]] = &[
    b"{\"timestamp\": 0, \"input_length\": 512, \"output_length\": 1, \"hash_ids\": [0]}\n",
    b"\n",
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b"\"hash_ids\"",
    b"\"timestamp\"",
    b"\"input_length\"",
    b"\"output_length\"",
    b"null",
];
const CONFIG: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"null",
    b"\"num_hidden_layers\"",
    b"\"hidden_size\"",
    b"\"num_attention_heads\"",
    b"\"num_key_value_heads\"",
    b"\"n_routed_experts\"",
    b"\"quantization_config\"",
    b"\"model_type\"",
    b"\"vocab_size\"",
];

pub fn all() -> [Target; 4] {
    let target = |name, words, decode| Target {
        name,
        words,
        max_mib: 64,
        num_reduced: 100,
        decode,
    };
    [
        target("azure_trace", CSV, |input| read_trace("trace.csv", input)),
        target("mooncake_trace", JSONL, |input| {
            read_trace("trace.jsonl", input)
        }),
        target("step_trace", JSONL, |input| {
            in_file("steps.jsonl", input, |path| {
                set_up(&synthetic(), Some(path))
            })
        }),
        target("plan_config", CONFIG, |input| {
            in_file("config.json", input, |path| {
                ModelSize::read(&path.to_string_lossy()).is_ok()
            })
        }),
    ]
}

fn in_file(name: &str, input: &[u8], read: impl FnOnce(&Path) -> bool) -> bool {
    thread_local! {
        static FOLDER: TempDir = TempDir::new().expect("there is room for a folder");
    }
    FOLDER.with(|folder| {
        let path = folder.path().join(name);
        fs::write(&path, input).expect("a file can be written");
        read(&path)
    })
}

fn read_trace(name: &str, input: &[u8]) -> bool {
    in_file(name, input, |path| set_up(&json!({"trace": path}), None))
}

fn synthetic() -> Value {
    json!({"poisson": {"rate": 1.0, "num_prompts": 2, "input_len": 8, "output_len": 2, "seed": 0}})
}

fn set_up(source: &Value, step_trace: Option<&Path>) -> bool {
    let hardware = step_trace.map_or_else(|| json!("h200"), |path| json!(path));
    let settings = json!({
        "load": {"source": source, "rate_scale": 1.0, "tenants": null, "seed": 0},
        "cluster": {
            "replicas": 1, "routing": "in-turn", "hardware": hardware, "model": "qwen3-8b", "tp": null,
            "dp_attention": false, "max_model_len": 4096, "threads": 1,
        },
        "scheduler": SchedulerSettings {
            max_batch_tokens: Some(8192), max_seqs: Some(256), ..SchedulerSettings::default()
        },
        "pages": PageSettings { memory_fraction: Some(0.85), num_pages: Some(4096), ..PageSettings::default() },
    });
    let settings =
        Settings::parse(settings.to_string().as_bytes()).expect("these settings are complete");
    settings.set_up().is_ok()
}
