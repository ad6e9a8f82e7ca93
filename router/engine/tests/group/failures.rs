//! Claims about groups that lose an engine: they end and name it.

use std::process::{Child, Command};
use std::time::Duration;

use plait_engine::group::{GroupFailure, GroupSettings, GroupTimeouts};
use plait_proto::ExitCode;

use crate::engines::{
    Devices, Engine, Group, Log, Order, group_settings, long_timeouts, socket_directory,
};
use crate::harness::Spec;

/// Engine 0 alone ends the group when votes are this late: on a stalled machine the members must not time out
/// first.
const SHORT: Duration = Duration::from_secs(1);

fn short_timeouts() -> GroupTimeouts {
    GroupTimeouts {
        vote: SHORT,
        ..long_timeouts()
    }
}

fn hurry_the_first(settings: &mut GroupSettings) {
    if settings.engine() == 0 {
        settings.timeouts = short_timeouts();
    }
}

fn end(log: &Log) -> String {
    log.end.as_ref().expect("the group ended").to_string()
}

/// More work than any test waits for.
fn endless() -> Spec {
    Spec::new(3, 70)
}

fn slow() -> Devices {
    Devices {
        step: Duration::from_millis(20),
        ..Devices::default()
    }
}

/// A process that does not outlive its test.
struct Process(Child);

impl Process {
    /// `-KILL` or `-STOP`.
    fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args([name, &self.0.id().to_string()])
            .status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Runs `engine` of a group of three in a process of its own: this very test, which finds the place
/// in its environment and ends here when it is killed.
fn as_process(test: &str, engine: u32, endpoint: &str) -> Process {
    let this = std::env::current_exe().unwrap();
    let mut command = Command::new(this);
    command.args(["--exact", test, "--nocapture"]);
    command.env("PLAIT_TEST_ENGINE", format!("{engine} {endpoint}"));
    let spawned = command.stdout(std::process::Stdio::null()).spawn();
    Process(spawned.unwrap())
}

/// What the child of [`as_process`] does.
fn be_a_process_if_told() {
    let Ok(place) = std::env::var("PLAIT_TEST_ENGINE") else {
        return;
    };
    let (engine, endpoint) = place.split_once(' ').unwrap();
    let settings = group_settings(engine.parse().unwrap(), endpoint, &[1, 1, 2]);
    let engine = Engine::start(settings, slow());
    (0..100).for_each(|_| engine.submit(0, endless()));
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

fn works(log: &Log) -> bool {
    log.decisions.len() > 5
}

#[test]
fn a_killed_process_ends_the_group_with_its_replicas_names() {
    be_a_process_if_told();
    let (_directory, endpoint) = socket_directory();
    let [first, other] =
        [0, 1].map(|engine| Engine::start(group_settings(engine, &endpoint, &[1, 1, 2]), slow()));
    let test = "failures::a_killed_process_ends_the_group_with_its_replicas_names";
    let killed = as_process(test, 2, &endpoint);
    first.wait_until("the group works", works);
    killed.signal("-KILL");
    let (first, other) = (first.finish(), other.finish());
    let replicas = vec![2, 3];
    assert_eq!(
        first.end,
        Some(GroupFailure::Disconnected {
            engine: 2,
            replicas
        })
    );
    let reason = end(&first);
    assert_eq!(
        reason,
        "engine 2 (replicas 2 and 3) is gone: its link was closed"
    );
    let code = ExitCode::RankLost;
    assert_eq!(
        other.end,
        Some(GroupFailure::FromCoordinator { code, reason })
    );
}

#[test]
fn a_stopped_process_is_named_when_its_votes_are_overdue() {
    be_a_process_if_told();
    let (_directory, endpoint) = socket_directory();
    let [first, other] = [0, 1].map(|engine| {
        let mut settings = group_settings(engine, &endpoint, &[1, 1, 2]);
        hurry_the_first(&mut settings);
        Engine::start(settings, slow())
    });
    let test = "failures::a_stopped_process_is_named_when_its_votes_are_overdue";
    let stopped = as_process(test, 2, &endpoint);
    first.wait_until("the group works", works);
    stopped.signal("-STOP");
    first.submit(0, endless());
    let (first, other) = (first.finish(), other.finish());
    drop(stopped);
    assert!(
        end(&first).starts_with("replicas 2 and 3 (engine 2) did not vote on step"),
        "{}",
        end(&first)
    );
    assert_eq!(end(&other), end(&first), "the others say who it was, too");
    assert!(matches!(
        other.end,
        Some(GroupFailure::FromCoordinator { .. })
    ));
}

#[test]
fn a_stalled_member_is_named_and_no_decision_is_drawn_without_it() {
    let group = Group::start_with(&[1, 1, 1], |_| slow(), hurry_the_first);
    group.wait_until_idle();
    group.engines[1].tell(Order::Stall);
    group.engines[1].wait_until("it stalls", |log| log.is_stalled);
    group.engines[2].submit(0, endless());
    for engine in [0, 2] {
        group.engines[engine].wait_until("the group ended", |log| log.end.is_some());
    }
    group.engines[1].tell(Order::Vanish);
    let logs = group.finish();
    assert!(end(&logs[0]).contains("replica 1 (engine 1) did not vote on step"));
    assert_eq!(end(&logs[2]), end(&logs[0]));
    assert_eq!(
        (logs[2].num_tokens, logs[0].decisions.len()),
        (0, 1),
        "only the idle decision"
    );
}

#[test]
fn a_stalled_first_engine_is_named_by_the_others() {
    let group = Group::start_with(&[1, 1], |_| slow(), |it| it.timeouts = short_timeouts());
    group.wait_until_idle();
    group.engines[0].tell(Order::Stall);
    group.engines[0].wait_until("it stalls", |log| log.is_stalled);
    group.engines[1].submit(0, endless());
    group.engines[1].wait_until("the group ended", |log| log.end.is_some());
    group.engines[0].tell(Order::Vanish);
    let logs = group.finish();
    assert!(
        end(&logs[1]).starts_with("engine 0 gave no decision on step 2 within 2s"),
        "{}",
        end(&logs[1])
    );
    assert_eq!(logs[1].end.as_ref().unwrap().code(), ExitCode::RankLost);
}

#[test]
fn a_member_that_vanishes_from_an_idle_group_is_missed_at_once() {
    let group = Group::start(&[1, 1, 1], |_| slow());
    group.wait_until_idle();
    group.engines[2].tell(Order::Vanish);
    let logs = group.finish();
    assert!(
        end(&logs[0]).starts_with("engine 2 (replica 2) is gone"),
        "{}",
        end(&logs[0])
    );
    assert_eq!(end(&logs[1]), end(&logs[0]));
}

#[test]
fn a_first_engine_that_vanishes_is_missed_at_once() {
    let group = Group::start(&[2, 1], |_| slow());
    group.wait_until_idle();
    group.engines[0].tell(Order::Vanish);
    let logs = group.finish();
    assert!(end(&logs[1]).starts_with("engine 0 (replicas 0 and 1) is gone"));
}

#[test]
fn the_reason_of_an_engine_that_gives_up_reaches_all() {
    for giver in [0, 1] {
        let group = Group::start(&[1, 1, 1], |_| slow());
        group.wait_until_idle();
        group.engines[giver].tell(Order::GiveUp("its device is on fire"));
        let logs = group.finish();
        for (engine, log) in logs
            .iter()
            .enumerate()
            .filter(|(engine, _)| *engine != giver)
        {
            let expected = format!("engine {giver} gave up: its device is on fire");
            assert_eq!(end(log), expected, "engine {engine}");
            assert_eq!(log.end.as_ref().unwrap().code(), ExitCode::RankLost);
        }
    }
}

#[test]
fn engines_that_never_join_are_named() {
    let (_directory, endpoint) = socket_directory();
    let [first, second] = [0, 2].map(|engine| {
        let mut settings = group_settings(engine, &endpoint, &[1, 1, 1, 1]);
        if engine == 0 {
            settings.timeouts.join = SHORT;
        }
        Engine::start(settings, slow())
    });
    let (first, second) = (first.finish(), second.finish());
    assert!(end(&first).starts_with("engines 1 and 3 of the group did not join within"));
    assert_eq!(end(&second), end(&first));
}
