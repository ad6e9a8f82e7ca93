//! The settings' structs are the same as Python's: names, order, types and defaults.

use std::path::Path;

use plait_core::{PageSettings, SchedulerSettings};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The file that `tests/contract/test_settings_mirror.py` checks Python against.
fn golden(name: &str, which: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/contract/settings.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    golden[name][which].clone()
}

fn check<T: Default + Serialize + DeserializeOwned>(name: &str) {
    let defaults = serde_json::to_string(&T::default()).unwrap();
    assert_eq!(defaults, golden(name, "defaults").to_string());
    let others = golden(name, "others");
    let read: T = serde_json::from_value(others.clone()).unwrap();
    assert_eq!(serde_json::to_value(read).unwrap(), others);
}

#[test]
fn scheduler_settings_mirror_pythons() {
    check::<SchedulerSettings>("scheduler");
}

#[test]
fn page_settings_mirror_pythons() {
    check::<PageSettings>("pages");
}

#[test]
fn an_unknown_setting_is_refused_by_name() {
    let error = serde_json::from_str::<SchedulerSettings>(r#"{"max_row": 1}"#).unwrap_err();
    assert!(error.to_string().contains("unknown field `max_row`"));
}
