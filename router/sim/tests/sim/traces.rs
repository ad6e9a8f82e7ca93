//! Traces are read as they were recorded, and what is broken in them is named with its line.

use plait_sim::Arrival;
use serde_json::json;

use crate::setup::{complaint, file, poisson, set_up, trace};

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
";

const MOONCAKE: &str = r#"{"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 4000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]}
"#;

fn arrivals(name: &str, text: &str, rate_scale: f64) -> Vec<Arrival> {
    let folder = tempfile::tempdir().unwrap();
    let mut load = trace(&file(&folder, name, text));
    load["rate_scale"] = rate_scale.into();
    set_up(json!({"load": load})).unwrap().arrivals
}

#[test]
fn azures_requests_come_at_their_times_with_their_lengths() {
    let arrivals = arrivals("a.csv", AZURE, 1.0);
    let read: Vec<_> = arrivals
        .iter()
        .map(|it| (it.at.0, it.num_prompt, it.num_output))
        .collect();
    assert_eq!(read, [(0, 374, 44), (4_314_579, 396, 109)]);
}

#[test]
fn azures_prompts_share_nothing() {
    let arrivals = arrivals("a.csv", AZURE, 1.0);
    let (first, second) = (arrivals[0].prompt(), arrivals[1].prompt());
    assert_eq!((first.len(), second.len()), (374, 396));
    assert!(first.iter().zip(second.iter()).all(|(a, b)| a != b));
}

#[test]
fn mooncakes_equal_ids_are_equal_tokens() {
    let arrivals = arrivals("m.jsonl", MOONCAKE, 1.0);
    let (first, second) = (arrivals[0].prompt(), arrivals[1].prompt());
    assert_eq!((first.len(), second.len()), (1024, 700));
    assert_eq!(first[..512], second[..512]);
    assert_ne!(first[512], second[512]);
}

#[test]
fn a_scaled_trace_is_played_as_many_times_as_fast() {
    assert_eq!(arrivals("m.jsonl", MOONCAKE, 4.0)[1].at.0, 250_000);
}

#[test]
fn poisson_keeps_its_rate_and_its_seed() {
    let arrivals = |seed: u64| {
        let mut source = poisson(50.0, 20_000, 10, 2);
        source["poisson"]["seed"] = seed.into();
        set_up(json!({"load": {"source": source}}))
            .unwrap()
            .arrivals
    };
    let one = arrivals(1);
    let seconds = one.last().unwrap().at.0 as f64 / 1e6;
    assert!((380.0..420.0).contains(&seconds), "{seconds}");
    assert_eq!(one, arrivals(1));
    assert_ne!(one, arrivals(2));
}

#[test]
fn a_broken_line_is_named() {
    for (text, expected) in [
        (
            "noon,1,2",
            r#"a.csv:2: TIMESTAMP is "noon"; allowed: a time since 1970"#,
        ),
        (
            "2023-11-16 18:15:46,1.5,2",
            r#"a.csv:2: ContextTokens is "1.5"; allowed: a whole number"#,
        ),
        (
            "2023-11-16 18:15:46,5,0",
            "a.csv:2: GeneratedTokens is 0; allowed: 1 to 16777216",
        ),
        (
            "2023-11-16 18:15:46,5",
            "a.csv:2: it has 2 columns; allowed: 3",
        ),
    ] {
        let complaint = complaint(
            "a.csv",
            &format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{text}\n"),
        );
        assert!(complaint.starts_with(expected), "{complaint}");
    }
    for (line, expected) in [
        ("[]", "m.jsonl:3: "),
        (
            r#"{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#,
            "m.jsonl:3: invalid value",
        ),
        (
            r#"{"timestamp": 1, "input_length": 1, "output_length": 1}"#,
            "m.jsonl:3: missing field `hash_ids`",
        ),
        (
            r#"{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}"#,
            "m.jsonl:3: hash_ids holds 1 ids; an input_length of 513 has 2 blocks of 512 tokens",
        ),
    ] {
        let complaint = complaint("m.jsonl", &format!("{MOONCAKE}{line}\n"));
        assert!(complaint.starts_with(expected), "{complaint}");
    }
}

#[test]
fn lines_are_counted_whatever_ends_them() {
    for end in ["\n", "\r\n"] {
        let lines = [
            AZURE.lines().collect::<Vec<_>>().join(end),
            "noon,1,2".to_owned(),
        ];
        let expected = format!("a.csv:{}: ", AZURE.lines().count() + 2);
        let complaint = complaint("a.csv", &lines.join(&end.repeat(2)));
        assert!(complaint.starts_with(&expected), "{complaint}");
    }
}

#[test]
fn a_line_without_end_is_not_read_to_its_end() {
    for name in ["m.jsonl", "a.csv"] {
        assert_eq!(
            complaint(name, &"[".repeat(3 << 20)),
            format!("{name}:1: the line is longer than 1048576 bytes, which is allowed")
        );
    }
}

#[test]
fn a_trace_of_another_kind_or_without_requests_is_refused() {
    let other = complaint("a.csv", "time,tokens\n1,2\n");
    assert!(
        other.starts_with(r#"a.csv:1: the columns are ["time", "tokens"]; allowed: ["TIMESTAMP""#),
        "{other}"
    );
    assert!(complaint("t.txt", "").starts_with("--trace is t.txt; a trace ends in .csv"));
    assert_eq!(
        complaint("m.jsonl", ""),
        "m.jsonl: it holds no request; at least one is needed"
    );
}
