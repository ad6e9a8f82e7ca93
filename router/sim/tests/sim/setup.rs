//! Settings as the command line sends them, and files for them to name.

use std::path::{Path, PathBuf};

use plait_core::{PageSettings, SchedulerSettings};
use plait_sim::{Report, Settings, Setup, SimError, Summary, simulate};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Settings of one H200 and Poisson arrivals; `change` is merged in, each field where it belongs.
pub fn settings(change: Value) -> Value {
    let mut settings = json!({
        "load": {"source": poisson(10.0, 100, 64, 8), "rate_scale": 1.0, "tenants": null, "seed": 0},
        "cluster": {
            "replicas": 1, "routing": "in-turn", "hardware": "h200", "model": "qwen3-8b", "tp": null, "dp_attention": false, "max_model_len": null, "threads": 1,
        },
        "scheduler": SchedulerSettings {
            max_batch_tokens: Some(8192), max_seqs: Some(256), ..SchedulerSettings::default()
        },
        "pages": PageSettings { memory_fraction: Some(0.85), ..PageSettings::default() },
    });
    let Value::Object(changes) = change else {
        panic!("changes are an object")
    };
    for (asked, fields) in changes {
        let Value::Object(fields) = fields else {
            panic!("a component's changes are an object")
        };
        for (name, value) in fields {
            let has = |component: &&str| settings[*component].get(&name).is_some();
            let component = ["scheduler", "pages", "cluster"].into_iter().find(has);
            settings[component.unwrap_or(&asked)][name] = value;
        }
    }
    settings
}

pub fn poisson(rate: f64, num_prompts: u32, input_len: u32, output_len: u32) -> Value {
    json!({"poisson": {
        "rate": rate, "num_prompts": num_prompts, "input_len": input_len, "output_len": output_len, "seed": 0,
    }})
}

pub fn set_up(change: Value) -> Result<Setup, SimError> {
    Settings::parse(settings(change).to_string().as_bytes())?.set_up()
}

pub fn report(change: Value) -> Report {
    simulate(&set_up(change).unwrap(), &mut |_| true).unwrap()
}

pub fn summary(change: Value) -> Summary {
    report(change).summary
}

/// A file in a folder that goes with the test.
pub fn file(folder: &TempDir, name: &str, text: &str) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

pub fn trace(path: &Path) -> Value {
    json!({"source": {"trace": path}})
}

/// What is wrong with a trace file.
pub fn complaint(name: &str, text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder, name, text);
    let error = set_up(json!({"load": trace(&path)})).unwrap_err();
    error
        .to_string()
        .replace(&format!("{}/", folder.path().display()), "")
}
