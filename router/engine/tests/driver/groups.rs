//! Engines that step together, each with a rank of its own.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use plait_engine::{Engine, Timeouts};
use plait_proto::{Decision, ExitCode, Fail, Mode, Plan};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::failures::reports_a_lost_rank;
use crate::fake_worker::Fault;
use crate::harness::{Harness, settings};

/// A directory whose sockets need no keys.
pub fn socket_directory() -> (TempDir, String) {
    let owners_only = std::fs::Permissions::from_mode(0o700);
    let directory = tempfile::Builder::new().permissions(owners_only).tempdir();
    let directory = directory.unwrap();
    let endpoint = format!("ipc://{}", directory.path().join("group").display());
    (directory, endpoint)
}

pub fn place(engine: u32, num_engines: u32, endpoint: &str) -> Value {
    json!({"group": {
        "engine": engine, "num_engines": num_engines, "endpoint": endpoint, "keys": null,
        "facts": {"--dtype": "float32"},
    }})
}

/// An engine of a group with a rank that takes a millisecond a step.
pub fn engine(change: &Value, timeouts: Timeouts) -> Harness {
    let mut harness = Harness::alone(change, timeouts);
    harness.dial(|rank| {
        rank.step = Duration::from_millis(1);
        rank.graphs = vec![4, 8];
    });
    harness
}

fn group(num_engines: u32) -> (TempDir, Vec<Harness>) {
    group_of(num_engines, |change| engine(change, Timeouts::default()))
}

pub fn group_of(num_engines: u32, engine: impl Fn(&Value) -> Harness) -> (TempDir, Vec<Harness>) {
    let (directory, endpoint) = socket_directory();
    let engines = (0..num_engines).map(|number| engine(&place(number, num_engines, &endpoint)));
    let mut engines: Vec<Harness> = engines.collect();
    for harness in &mut engines {
        harness.wait_for_phase("ready");
    }
    (directory, engines)
}

/// The plans that the rank got after its warm-up.
pub fn plans(harness: &Harness) -> Vec<Plan> {
    harness.workers[0].log().plans.split_off(1)
}

fn has_rows(plan: &Plan) -> bool {
    !plan.prefill.is_empty() || !plan.decode.is_empty()
}

#[test]
fn engines_of_a_group_step_together_and_answer_as_alone() {
    let (_directory, mut engines) = group(3);
    engines[0].submit(1, "abc", &json!({"max_tokens": 20}));
    engines[1].submit(1, "xyz", &json!({"max_tokens": 5}));
    assert_eq!(engines[0].answer(1).text(), "defghijklmnopqrstuvw");
    assert_eq!(engines[1].answer(1).text(), "abcde");
    engines[2].engine.drain();
    for harness in &mut engines {
        harness.wait_for_phase("stopped");
    }
    let of_each: Vec<Vec<Plan>> = engines.iter().map(plans).collect();
    let decisions = |plans: &[Plan]| -> Vec<Decision> {
        let decisions = plans.iter().map(|plan| plan.decision.clone().unwrap());
        decisions.collect()
    };
    let agreed = decisions(&of_each[0]);
    assert!(agreed.len() >= 20);
    for (replica, plans) in of_each.iter().enumerate() {
        assert_eq!(decisions(plans), agreed, "replica {replica}");
        for (plan, decision) in plans.iter().zip(&agreed) {
            assert_eq!(plan.step, decision.step);
            let is_dummy = decision.dummy_replicas.first().unwrap_or(&0) >> replica & 1 == 1;
            assert_eq!(is_dummy, !has_rows(plan), "replica {replica}: {plan:?}");
        }
    }
    assert!(agreed.iter().all(|it| it.mode != Mode::Idle));
    assert!(
        agreed
            .iter()
            .all(|it| it.graph_bucket.is_none_or(|_| it.mode == Mode::Decode))
    );
    assert!(agreed.iter().any(|it| it.graph_bucket == Some(4)));
}

fn two_engines_of_two_replicas() -> (TempDir, Vec<Harness>) {
    group_of(2, |change| {
        let mut change = change.clone();
        change["num_replicas"] = 2.into();
        let mut harness = Harness::alone(&change, Timeouts::default());
        dial_replicas(&mut harness, 2);
        harness
    })
}

#[test]
fn a_replica_that_fails_ends_other_engines_with_its_reason() {
    for failing in [0, 1] {
        let (_directory, mut engines) = two_engines_of_two_replicas();
        engines[failing].engine.worker_lost(1, "killed by signal 9");
        for harness in &mut engines {
            harness.wait_for_phase("failed");
        }
        let reason = engines[1 - failing].status()["reason"].to_string();
        let cause = format!(
            "engine {failing} gave up: replica {} gave up",
            2 * failing + 1
        );
        assert!(reason.contains(&cause), "{reason}");
        assert!(
            reason.contains("rank 1 was lost: killed by signal 9"),
            "{reason}"
        );
    }
}

#[test]
fn replicas_of_one_engine_step_together_with_those_of_another() {
    let (_directory, mut engines) = two_engines_of_two_replicas();
    for (number, harness) in engines.iter().enumerate() {
        for stream in 0..=number as u64 {
            harness.submit(stream, "abc", &json!({"max_tokens": 20}));
        }
    }
    for (number, harness) in engines.iter_mut().enumerate() {
        for stream in 0..=number as u64 {
            assert_eq!(harness.answer(stream).text(), "defghijklmnopqrstuvw");
        }
    }
    engines[1].engine.drain();
    for harness in &mut engines {
        harness.wait_for_phase("stopped");
    }
    all_took_the_same_decisions(&engines, 4);
}

#[test]
fn replicas_of_one_engine_step_together_without_a_socket() {
    let mut change = place(0, 1, "");
    change["num_replicas"] = 3.into();
    let mut harness = Harness::alone(&change, Timeouts::default());
    dial_replicas(&mut harness, 3);
    harness.wait_for_phase("ready");
    harness.submit(1, "abc", &json!({"max_tokens": 20}));
    assert_eq!(harness.answer(1).text(), "defghijklmnopqrstuvw");
    let steps = "plait_group_step{replica=\"2\"}";
    harness.wait_until("the last replica has run along", |harness| {
        harness.metric(steps) >= 20.0
    });
    for stream in 2..8 {
        harness.submit(stream, "xyz", &json!({"max_tokens": 5}));
    }
    for stream in 2..8 {
        assert_eq!(harness.answer(stream).text(), "abcde");
    }
    harness.engine.drain();
    harness.wait_for_phase("stopped");
    all_took_the_same_decisions(&[harness], 3);
}

#[test]
fn a_replica_that_fails_ends_all_of_its_group_and_is_named() {
    let mut change = place(0, 1, "");
    change["num_replicas"] = 2.into();
    let mut harness = Harness::alone(&change, Timeouts::default());
    dial_replicas(&mut harness, 2);
    harness.wait_for_phase("ready");
    harness.engine.worker_lost(1, "killed by signal 9");
    harness.wait_for_phase("failed");
    let status = harness.status();
    assert_eq!(status["exit_code"], 5);
    let reason = status["reason"].as_str().unwrap();
    assert!(
        reason == "replica 1: rank 1 was lost: killed by signal 9",
        "{reason}"
    );
}

#[test]
fn a_replica_that_is_lost_while_the_group_drains_ends_every_engine_by_name() {
    let (_directory, mut engines) = two_engines_of_two_replicas();
    let endless = json!({"max_tokens": 400, "ignore_eos": true});
    engines[0].hold(0, 20);
    engines[0].submit(1, "abc", &endless);
    engines[0].wait_until("it works", |harness| {
        harness.metric("plait_generated_tokens_total{replica=\"0\"}") > 2.0
    });
    engines[1].engine.drain();
    engines[0].wait_for_phase("draining");
    engines[1].engine.worker_lost(1, "killed by signal 9");
    assert_eq!(engines[0].answer(1).error, Some((503, 0)));
    for harness in &mut engines {
        harness.wait_for_phase("failed");
        let reason = harness.status()["reason"].to_string();
        assert!(
            reason.contains("rank 1 was lost: killed by signal 9"),
            "{reason}"
        );
    }
}

#[test]
fn a_replica_that_is_lost_before_the_group_is_ready_ends_every_engine_by_name() {
    for has_hello in [false, true] {
        let (_directory, endpoint) = socket_directory();
        let mut engines = [0, 1].map(|engine| {
            let mut change = place(engine, 2, &endpoint);
            change["num_replicas"] = 2.into();
            Harness::alone(&change, Timeouts::default())
        });
        if has_hello {
            dial_replicas(&mut engines[1], 2);
            engines[1].wait_until("its ranks are ready", |harness| {
                harness
                    .workers
                    .iter()
                    .all(|rank| rank.log().plans.len() == 1)
            });
        }
        engines[1].engine.worker_lost(1, "killed by signal 9");
        for harness in &mut engines {
            harness.wait_for_phase("failed");
            let reason = harness.status()["reason"].to_string();
            assert!(
                reason.contains("rank 1 was lost: killed by signal 9"),
                "{reason}"
            );
        }
    }
}

#[test]
fn a_replica_whose_rank_was_killed_is_named_though_another_reports_it_first() {
    let mut change = place(0, 1, "");
    change["num_replicas"] = 2.into();
    let timeouts = Timeouts {
        peer_lost_grace: Duration::from_secs(60),
        ..Timeouts::default()
    };
    let mut harness = Harness::alone(&change, timeouts);
    harness.dial_to(0, |rank| rank.world = 2);
    harness.dial_to(1, |rank| {
        (rank.rank, rank.world, rank.fault) = (1, 2, Arc::default());
    });
    harness.wait_for_phase("ready");
    harness.inject(reports_a_lost_rank());
    harness.submit(1, "abc", &json!({}));
    harness.engine.worker_lost(1, "killed by signal 9");
    harness.wait_for_phase("failed");
    let status = harness.status();
    let reason = status["reason"].as_str().unwrap();
    assert!(
        reason == "replica 1: rank 1 was lost: killed by signal 9",
        "{reason}"
    );
}

#[test]
fn an_engine_whose_output_nobody_takes_holds_up_no_other() {
    let (_directory, mut engines) = group(2);
    engines[0].fill_outbox(500);
    engines[1].submit(1, "abc", &json!({"max_tokens": 20}));
    assert_eq!(engines[1].answer(1).text(), "defghijklmnopqrstuvw");
    for stream in 1..=32 {
        assert_eq!(engines[0].answer(stream).text().len(), 500);
    }
    for harness in &engines {
        assert_eq!(harness.status()["phase"], "ready");
    }
}

#[test]
fn an_engine_whose_text_threads_are_busy_holds_up_no_other() {
    let (_directory, mut engines) = group(2);
    let long = "abc".repeat(1 << 20);
    for stream in 1..=20 {
        engines[0].submit(stream, &long, &json!({}));
    }
    engines[1].submit(1, "abc", &json!({"max_tokens": 20}));
    assert_eq!(engines[1].answer(1).text(), "defghijklmnopqrstuvw");
    for stream in 1..=20 {
        assert_eq!(engines[0].answer(stream).error, Some((400, 0)));
    }
    engines[0].submit(21, "abc", &json!({"max_tokens": 3}));
    assert_eq!(engines[0].answer(21).text(), "def");
}

/// A rank for each replica, with a millisecond a step.
fn dial_replicas(harness: &mut Harness, num_replicas: u32) {
    for replica in 0..num_replicas {
        harness.dial_to(replica, |rank| {
            (rank.rank, rank.world) = (replica, num_replicas);
            (rank.step, rank.fault) = (Duration::from_millis(1), Arc::default());
        });
    }
}

fn all_took_the_same_decisions(engines: &[Harness], num_replicas: u32) {
    let logs = engines.iter().flat_map(|harness| &harness.workers);
    let decisions: Vec<Vec<Decision>> = logs
        .map(|worker| {
            let plans = worker.log().plans.split_off(1);
            plans
                .into_iter()
                .map(|plan| plan.decision.unwrap())
                .collect()
        })
        .collect();
    assert_eq!(decisions.len(), num_replicas as usize);
    assert!(decisions[0].len() >= 20);
    assert!(
        decisions
            .iter()
            .all(|of_replica| *of_replica == decisions[0])
    );
}

#[test]
fn dummy_rows_are_none_of_the_users() {
    let (_directory, mut engines) = group(2);
    engines[0].submit(1, "abc", &json!({"max_tokens": 9}));
    engines[0].answer(1);
    let num_dummies = "plait_group_dummy_steps_total";
    engines[1].wait_until("it has run along", |harness| {
        harness.metric(num_dummies) >= 9.0
    });
    let idle = &engines[1];
    assert!(
        plans(idle)
            .iter()
            .all(|plan| !has_rows(plan) && plan.appended_pages.is_empty())
    );
    for name in [
        "plait_steps_total{kind=\"prefill\"}",
        "plait_steps_total{kind=\"decode\"}",
        "plait_step_tokens_total{phase=\"decode\"}",
        "plait_generated_tokens_total",
        "plait_kv_pages{state=\"leased\"}",
        "plait_kv_pages{state=\"cached\"}",
    ] {
        assert_eq!(idle.metric(name), 0.0, "{name}");
    }
    assert_eq!(engines[0].metric(num_dummies), 0.0);
}

#[test]
fn a_drain_anywhere_closes_admission_and_all_finish_before_they_stop() {
    let (_directory, mut engines) = group(3);
    engines[0].hold(0, 20);
    engines[0].submit(1, "abc", &json!({"max_tokens": 200, "ignore_eos": true}));
    engines[0].wait_until("it works", |harness| {
        harness.metric("plait_generated_tokens_total") > 2.0
    });
    engines[1].engine.drain();
    engines[2].wait_for_phase("draining");
    engines[2].submit(2, "abc", &json!({}));
    assert_eq!(engines[2].answer(2).error, Some((503, 0)));
    engines[0].release(0);
    let answer = engines[0].answer(1);
    assert_eq!((answer.text().len(), answer.error), (200, None));
    for harness in &mut engines {
        harness.wait_for_phase("stopped");
        assert!(harness.workers[0].log().was_drained);
    }
}

#[test]
fn a_rank_that_fails_ends_every_engine_with_its_reason() {
    let (_directory, mut engines) = group(2);
    engines[1].inject(Fault::Say(
        Fail {
            rank: 0,
            code: ExitCode::Hardware,
            reason: "out of memory".to_owned(),
        }
        .into(),
    ));
    engines[0].submit(1, "abc", &json!({"max_tokens": 400}));
    assert_eq!(engines[0].answer(1).error, Some((503, 0)));
    engines[0].wait_for_phase("failed");
    let status = engines[0].status();
    assert_eq!(status["reason"], "engine 1 gave up: rank 0: out of memory");
    assert_eq!(status["exit_code"], 5);
}

#[test]
fn an_engine_of_other_settings_is_refused_with_the_reason() {
    let (_directory, endpoint) = socket_directory();
    let _first = Harness::alone(&place(0, 2, &endpoint), Timeouts::default());
    let mut change = place(1, 2, &endpoint);
    change["max_batch_tokens"] = json!(63);
    change["group"]["facts"] = json!({"--dtype": "bfloat16"});
    let mut other = Harness::alone(&change, Timeouts::default());
    other.wait_for_phase("failed");
    let status = other.status();
    assert_eq!(status["exit_code"], 2);
    let reason = status["reason"].as_str().unwrap();
    assert_eq!(
        reason,
        "the configuration of engine 1 is not that of engine 0 in 2 things: --dtype: float32 on engine 0, bfloat16 on \
         engine 1; --max-batch-tokens: 64 on engine 0, 63 on engine 1; start all engines of a group with the same model \
         and settings"
    );
}

#[test]
fn an_engine_that_is_told_to_stop_before_all_are_there_tells_the_others() {
    let (_directory, endpoint) = socket_directory();
    let mut first = engine(&place(0, 2, &endpoint), Timeouts::default());
    first.wait_until("its rank is ready", |harness| {
        harness.status()["ranks"] == 1
    });
    assert_eq!(first.status()["phase"], "loading", "engine 1 is not there");
    let mut member = Harness::alone(&place(1, 2, &endpoint), Timeouts::default());
    // Its Join comes before its Fail.
    member.engine.drain();
    member.wait_for_phase("stopped");
    first.wait_for_phase("failed");
    let reason = first.status()["reason"].as_str().unwrap().to_owned();
    assert_eq!(
        reason,
        "engine 1 gave up: it was stopped before all engines had joined"
    );
}

#[test]
fn groups_that_cannot_be_are_refused_at_the_start() {
    let cases = [
        (
            json!({"endpoint": "tcp://127.0.0.1:*"}),
            "without CURVE keys",
        ),
        (json!({"engine": 2}), "engine 2 is not in a group of 2"),
        (json!({"num_engines": 5000}), "1 to 1024 replicas"),
        (
            json!({"keys": {"of": "coordinator", "secret": "short", "allowed": []}}),
            "40 characters of Z85",
        ),
    ];
    let (folder, endpoint) = socket_directory();
    crate::model::write(folder.path());
    for (change, words) in cases {
        let mut group = place(0, 2, &endpoint);
        let fields = group["group"].as_object_mut().unwrap();
        fields.extend(change.as_object().unwrap().clone());
        let settings = settings(&folder, &group).to_string();
        let error = Engine::start(settings.as_bytes()).err();
        let told = error.expect("such a group cannot be").to_string();
        assert!(told.contains(words), "{told}");
    }
}
