//! Ranks that die, send wrong answers or fall silent, and unknown peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plait_engine::Timeouts;
use plait_proto::{Bye, ExitCode, Fail, Message};
use serde_json::{Value, json};

use crate::fake_worker::{Fault, dial};
use crate::harness::Harness;

/// A harness whose rank shows a fault while two streams decode.
fn two_streams_and(fault: Fault) -> Harness {
    two_streams_on(1, fault)
}

/// The same on so many ranks; the first one shows the fault.
fn two_streams_on(num_ranks: u32, fault: Fault) -> Harness {
    let mut harness = Harness::alone(&json!({"num_ranks": num_ranks}), Timeouts::default());
    for number in 0..num_ranks {
        harness.dial(|rank| {
            (rank.rank, rank.world) = (number, num_ranks);
            rank.step = Duration::from_millis(10);
            if number > 0 {
                (rank.answers, rank.fault) = (false, Arc::default());
            }
        });
    }
    harness.wait_for_phase("ready");
    harness.submit(1, "abc", &json!({"max_tokens": 400}));
    harness.submit(2, "xyz", &json!({"max_tokens": 400}));
    harness.wait_until("both run", |harness| {
        harness.metric("plait_requests_running") == 2.0
    });
    harness.inject(fault);
    harness
}

/// A step is overdue after this long.
const STEP: Duration = Duration::from_millis(50);

fn short_steps() -> Timeouts {
    Timeouts {
        step: STEP,
        step_token: Duration::ZERO,
        ..Timeouts::default()
    }
}

/// A harness, on a clock of its own, whose rank has the step of stream 1 and never answers it.
fn waiting_for_a_silent_rank(timeouts: Timeouts) -> Harness {
    let mut harness = Harness::on_clock(&json!({}), timeouts, &Arc::default());
    harness.dial(|rank| rank.heartbeats = false);
    harness.wait_for_phase("ready");
    harness.inject(Fault::Silence);
    harness.submit(1, "abc", &json!({"max_tokens": 5}));
    harness.wait_until("the rank has the step", |harness| {
        harness.workers[0].log().plans.len() >= 2
    });
    harness
}

/// Both streams end with an error that says `reason`, and so does the engine with `exit_code`.
fn all_ends(mut harness: Harness, exit_code: u32, reason: &str) {
    for stream in [1, 2] {
        let answer = harness.answer(stream);
        assert_eq!(answer.error, Some((503, 0)));
        assert!(
            answer.message().contains("cannot go on"),
            "{}",
            answer.message()
        );
        assert!(
            !answer.message().contains(reason),
            "clients do not read the log"
        );
    }
    let status = harness.status();
    assert_eq!(status["phase"], "failed");
    assert_eq!(status["exit_code"], exit_code);
    assert!(
        status["reason"].as_str().unwrap().contains(reason),
        "{status}"
    );
    assert_eq!(
        harness.metric("plait_requests_finished_total{reason=\"error\"}"),
        2.0
    );
    harness.submit(3, "abc", &json!({}));
    assert_eq!(harness.answer(3).error, Some((503, 0)));
}

#[test]
fn a_rank_that_fails_gives_its_reason_to_everyone() {
    let fail = Fail {
        rank: 0,
        code: ExitCode::Hardware,
        reason: "out of memory".to_owned(),
    };
    all_ends(two_streams_and(Fault::Say(fail.into())), 3, "out of memory");
}

#[test]
fn a_rank_that_leaves_unasked_is_lost() {
    all_ends(
        two_streams_and(Fault::Say(
            Bye {
                rank: 0,
                num_steps: 2,
            }
            .into(),
        )),
        5,
        "left without being asked",
    );
}

#[test]
fn a_malformed_message_of_a_rank_ends_the_replica_not_the_process() {
    all_ends(
        two_streams_and(Fault::SayFrames(vec![vec![4], vec![0xC1]])),
        5,
        "malformed message",
    );
}

#[test]
fn a_token_outside_the_vocabulary_is_not_believed() {
    all_ends(
        two_streams_and(Fault::WrongToken),
        5,
        "the vocabulary has 257",
    );
}

#[test]
fn a_row_that_computed_nan_ends_its_request_alone() {
    let mut harness = two_streams_and(Fault::FailedRow);
    let (failed, others): (Vec<_>, Vec<_>) = [1, 2]
        .map(|stream| harness.answer(stream))
        .into_iter()
        .partition(|answer| answer.error.is_some());
    assert_eq!(failed[0].error, Some((500, 0)));
    assert!(failed[0].message().contains("NaN or infinity"));
    assert_eq!(others[0].finish_reason().as_deref(), Some("length"));
    harness.assert_metrics(&[
        ("plait_requests_finished_total{reason=\"error\"}", 1.0),
        ("plait_requests_finished_total{reason=\"length\"}", 1.0),
        ("plait_rank_losses_total", 0.0),
    ]);
    assert_eq!(harness.status()["phase"], "ready");
}

#[test]
fn a_rank_that_answers_a_step_nobody_sent_is_not_believed() {
    let result = plait_proto::StepResult {
        step: 99,
        ..Default::default()
    };
    all_ends(two_streams_and(Fault::Say(result.into())), 5, "step 99");
}

#[test]
fn a_rank_whose_process_ended_is_lost_with_the_launchers_words() {
    let harness = two_streams_and(Fault::Silence);
    harness.engine.worker_lost(0, "killed by signal 9");
    all_ends(harness, 5, "rank 0 was lost: killed by signal 9");
}

#[test]
fn a_killed_rank_is_lost_at_once() {
    let timeouts = Timeouts {
        error_grace: Duration::from_secs(3600),
        ..Timeouts::default()
    };
    let mut harness = Harness::alone(&json!({"num_ranks": 2}), timeouts);
    harness.engine.worker_killed(1, "killed by signal 9");
    harness.wait_for_phase("failed");
    let reason = harness.status()["reason"].to_string();
    assert!(
        reason.contains("rank 1 was lost: killed by signal 9"),
        "{reason}"
    );
}

/// The Fail of a rank whose collective broke off.
pub fn reports_a_lost_rank() -> Fault {
    let fail = Fail {
        rank: 0,
        code: ExitCode::RankLost,
        reason: "another rank cannot be reached".to_owned(),
    };
    Fault::SayThenSilence(fail.into())
}

#[test]
fn the_report_of_a_lost_rank_gives_way_to_its_process_end() {
    let harness = two_streams_on(2, reports_a_lost_rank());
    harness.engine.worker_lost(1, "killed by signal 9");
    harness.engine.worker_lost(0, "ended with exit code 5");
    all_ends(harness, 5, "rank 1 was lost: killed by signal 9");
}

#[test]
fn the_report_of_a_lost_rank_counts_if_nothing_else_comes() {
    let harness = two_streams_and(reports_a_lost_rank());
    harness.engine.worker_lost(0, "ended with exit code 5");
    all_ends(harness, 5, "rank 0: another rank cannot be reached");
}

#[test]
fn a_rank_that_fails_before_its_hello_gives_its_exit_code() {
    let timeouts = Timeouts {
        error_grace: Duration::from_secs(60),
        ..Timeouts::default()
    };
    let mut harness = Harness::alone(&json!({}), timeouts);
    let socket = dial(harness.endpoint(0), "rank-0");
    let fail = Fail {
        rank: 0,
        code: ExitCode::ModelFiles,
        reason: "no config.json".to_owned(),
    };
    socket
        .send_multipart(plait_proto::encode(&fail.into()), 0)
        .unwrap();
    harness.engine.worker_lost(0, "exited with code 4");
    harness.wait_for_phase("failed");
    assert_eq!(harness.status()["exit_code"], 4);
    assert!(
        harness.status()["reason"]
            .as_str()
            .unwrap()
            .contains("no config.json")
    );
}

#[test]
fn when_one_rank_fails_the_others_are_told() {
    let mut harness = Harness::alone(&json!({"num_ranks": 2}), Timeouts::default());
    harness.dial(|rank| rank.world = 2);
    harness.dial(|rank| (rank.rank, rank.world, rank.answers) = (1, 2, false));
    harness.wait_for_phase("ready");
    let fail = Fail {
        rank: 1,
        code: ExitCode::Hardware,
        reason: "out of memory".to_owned(),
    };
    harness.inject(Fault::Say(fail.into()));
    harness.submit(1, "abc", &json!({"max_tokens": 400}));
    for rank in [0, 1] {
        harness.wait_until("it is told", |harness| {
            harness.workers[rank].log().refusal.is_some()
        });
        assert!(
            harness.workers[rank]
                .log()
                .refusal
                .unwrap()
                .reason
                .contains("out of memory")
        );
    }
}

#[test]
fn a_rank_that_still_loads_is_told_when_another_fails() {
    let mut harness = Harness::alone(&json!({"num_ranks": 2}), Timeouts::default());
    let [loading, failing] = ["rank-0", "rank-1"].map(|id| dial(harness.endpoint(0), id));
    loading
        .send_multipart([&b"\x01"[..], b"garbage"], 0)
        .unwrap();
    // The answer to it shows that the engine knows this rank.
    harness.wait_until("it is there", |harness| {
        harness.metric("plait_link_malformed_total") == 1.0
    });
    assert_eq!(loading.poll(zmq::POLLIN, 60_000), Ok(1));
    loading.recv_multipart(0).unwrap();
    let fail = Fail {
        rank: 1,
        code: ExitCode::Hardware,
        reason: "out of memory".to_owned(),
    };
    failing
        .send_multipart(plait_proto::encode(&fail.into()), 0)
        .unwrap();
    harness.wait_for_phase("failed");
    assert_eq!(loading.poll(zmq::POLLIN, 60_000), Ok(1));
    let told = plait_proto::decode(&loading.recv_multipart(0).unwrap()).unwrap();
    let Message::Fail(told) = told else {
        panic!("the rank was told {told:?}");
    };
    assert!(told.reason.contains("out of memory"), "{}", told.reason);
}

#[test]
fn a_worker_of_another_run_is_refused_and_told_why() {
    let mut harness = Harness::alone(&json!({}), Timeouts::default());
    harness.dial(|rank| rank.config = [9; 16]);
    harness.wait_until("it is refused", |harness| {
        harness.workers[0].log().refusal.is_some()
    });
    let refusal = harness.workers[0].log().refusal.unwrap();
    assert_eq!(refusal.code, ExitCode::Settings);
    assert!(refusal.reason.contains("another run"));
    harness.dial_until_ready();
}

#[test]
fn unknown_peers_are_counted_and_change_nothing() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    let unknown = ["rank-1", "rank-00", "someone"].map(|id| dial(harness.endpoint(0), id));
    for stranger in &unknown {
        stranger
            .send_multipart([&b"\x01"[..], b"garbage"], 0)
            .unwrap();
        stranger
            .send_multipart(vec![vec![0_u8; 100]; 50], 0)
            .unwrap();
    }
    harness.wait_until("they are counted", |harness| {
        harness.metric("plait_link_malformed_total") >= 6.0
    });
    harness.submit(1, "abc", &json!({"max_tokens": 5}));
    assert_eq!(harness.answer(1).text(), "defgh");
}

#[test]
fn garbage_under_a_ranks_name_before_its_hello_is_dropped() {
    let mut harness = Harness::alone(&json!({}), Timeouts::default());
    let stranger = dial(harness.endpoint(0), "rank-0");
    stranger
        .send_multipart([&b"\x01"[..], b"garbage"], 0)
        .unwrap();
    harness.wait_until("it is counted", |harness| {
        harness.metric("plait_link_malformed_total") == 1.0
    });
    drop(stranger);
    harness.dial_until_ready();
}

#[test]
fn a_rank_that_does_not_load_or_warm_up_in_time_ends_the_engine_by_name() {
    for (num_dialled, flag, problem) in [
        (
            0,
            "load",
            "ranks 0, 1 have not loaded the model 30 s after the start",
        ),
        (
            2,
            "load",
            "ranks 0, 1 have not answered the warm-up step 30 s after the start",
        ),
        (
            2,
            "capture",
            "ranks 0, 1 have not answered the warm-up step 30 s after all had loaded",
        ),
    ] {
        let reason = reason_after_silence(num_dialled, &format!("{flag}_timeout_seconds"));
        assert!(reason.starts_with(problem), "{reason}");
        let advice = format!("raise --{flag}-timeout-seconds");
        assert!(reason.contains(&advice), "{reason}");
    }
}

/// Why an engine of two ranks ends 30 s after so many dialled, which say only Hello.
fn reason_after_silence(num_dialled: u32, setting: &str) -> String {
    let limit = Duration::from_secs(30);
    let change = json!({"num_ranks": 2, setting: limit.as_secs()});
    let mut harness = Harness::on_clock(&change, Timeouts::default(), &Arc::default());
    harness.inject(Fault::Silence);
    for rank in 0..num_dialled {
        harness.dial(|it| (it.rank, it.world) = (rank, 2));
    }
    harness.wait_until("all that dialled have the warm-up step", |harness| {
        let mut workers = harness.workers.iter();
        workers.all(|worker| worker.log().plans.len() == 1)
    });
    harness.advance(limit - Duration::from_secs(1));
    assert_eq!(harness.status()["phase"], "loading");
    harness.advance(Duration::from_secs(1));
    harness.wait_for_phase("failed");
    let status = harness.status();
    assert_eq!(status["exit_code"], u32::from(ExitCode::RankLost));
    status["reason"].as_str().unwrap().to_owned()
}

#[test]
fn an_overdue_step_is_stuck_until_its_result_comes() {
    let mut harness = waiting_for_a_silent_rank(short_steps());
    assert_eq!(harness.status()["stuck"], false);
    harness.advance(STEP);
    harness.wait_until("it is stuck", |harness| harness.status()["stuck"] == true);
    harness.clear_fault();
    assert_eq!(harness.answer(1).text(), "defgh");
    harness.wait_until("it goes on", |harness| harness.status()["stuck"] == false);
}

/// The usual limits, and a rank that hangs after five answers in a step of `request`.
fn hanging_after_five_answers(request: &Value) -> Harness {
    let mut harness = Harness::on_clock(&json!({}), Timeouts::default(), &Arc::default());
    harness.dial(|rank| rank.heartbeats = false);
    harness.wait_for_phase("ready");
    for stream in 0..5 {
        harness.submit(stream, "abc", &json!({"max_tokens": 5}));
        harness.answer(stream);
    }
    harness.inject(Fault::Silence);
    let num_plans = harness.workers[0].log().plans.len();
    harness.submit(5, "abc", request);
    harness.wait_until("the rank has the step", |harness| {
        harness.workers[0].log().plans.len() > num_plans
    });
    harness
}

/// A step unlike those measured has a minute and more, one that is known ten seconds.
#[test]
fn a_hang_is_seen_in_ten_seconds_once_steps_were_measured() {
    let mut harness = hanging_after_five_answers(&json!({"max_tokens": 5}));
    harness.advance(Duration::from_secs(9));
    assert_eq!(harness.status()["stuck"], false);
    harness.advance(Duration::from_secs(1));
    harness.wait_until("it is stuck", |harness| harness.status()["stuck"] == true);
    assert_eq!(harness.status()["phase"], "ready");
}

#[test]
fn the_first_step_that_samples_in_a_new_way_may_compile_for_longer() {
    let new = [
        json!({"max_tokens": 5, "sampling": {"top_p": 0.5}}),
        json!({"max_tokens": 5, "logit_bias": {"4": 1.0}}),
    ];
    for new in new {
        let mut harness = hanging_after_five_answers(&new);
        harness.advance(Duration::from_secs(30));
        assert!(harness.holds_for(Duration::from_millis(100), |harness| {
            harness.status()["stuck"] == false
        }));
        harness.clear_fault();
        harness.answer(5);
    }
}

#[test]
fn a_step_that_never_ends_ends_the_engine() {
    let timeouts = Timeouts {
        stuck_grace: Duration::from_millis(100),
        ..short_steps()
    };
    let mut harness = waiting_for_a_silent_rank(timeouts);
    harness.submit(2, "abc", &json!({"max_tokens": 5}));
    harness.wait_until("both are with the scheduler", |harness| {
        let counts = ["plait_requests_running", "plait_requests_waiting"];
        counts.iter().map(|name| harness.metric(name)).sum::<f64>() == 2.0
    });
    harness.advance(STEP);
    harness.wait_until("it is stuck", |harness| harness.status()["stuck"] == true);
    assert_eq!(harness.status()["phase"], "ready");
    harness.advance(timeouts.stuck_grace);
    all_ends(harness, 5, "no result in time");
}

/// What stops this process (a signal, a paused machine) stops its ranks too: time jumps.
#[test]
fn an_engine_that_was_stopped_gives_its_ranks_their_time_anew() {
    let timeouts = Timeouts {
        stuck_grace: Duration::from_secs(1),
        heartbeat: Duration::from_millis(300),
        ..short_steps()
    };
    let mut harness = waiting_for_a_silent_rank(timeouts);
    harness.advance(STEP);
    harness.wait_until("it is stuck", |harness| harness.status()["stuck"] == true);
    assert_eq!(harness.status()["late"], false);
    harness.advance(Duration::from_secs(10));
    harness.wait_until("it has seen the time", |harness| {
        harness.status()["late"] == true
    });
    harness.advance(timeouts.stuck_grace - Duration::from_millis(1));
    harness.clear_fault();
    assert_eq!(harness.answer(1).text(), "defgh");
}

#[test]
fn an_engine_that_was_stopped_gives_up_when_the_new_time_is_over() {
    let timeouts = Timeouts {
        stuck_grace: Duration::from_millis(200),
        heartbeat: Duration::from_millis(300),
        ..short_steps()
    };
    let mut harness = waiting_for_a_silent_rank(timeouts);
    harness.advance(Duration::from_secs(10));
    harness.wait_until("it has seen the time", |harness| {
        harness.status()["late"] == true
    });
    assert_eq!(harness.status()["phase"], "ready");
    harness.advance(timeouts.stuck_grace);
    harness.wait_for_phase("failed");
}

#[test]
fn a_full_outbox_pauses_generation_and_nothing_else_until_somebody_takes_tokens() {
    let timeouts = Timeouts {
        step: Duration::from_secs(3600),
        watchdog: Duration::from_millis(200),
        ..Timeouts::default()
    };
    let mut harness = Harness::on_clock(&json!({}), timeouts, &Arc::default());
    harness.dial(|_| {});
    harness.wait_for_phase("ready");
    harness.submit(0, "abc", &json!({"max_tokens": 500, "ignore_eos": true}));
    let whole = harness.answer(0).text();
    harness.fill_outbox(500);
    // The last one: the pool is small, so that the first ones have ended.
    harness.engine.abort(32);
    harness.advance(timeouts.watchdog + Duration::from_micros(1));
    let is_well = |harness: &Harness| harness.status()["hung"] == false;
    harness.wait_until("the driver has seen the time", is_well);
    assert!(harness.holds_for(Duration::from_millis(250), is_well));
    let deadline = Instant::now() + Duration::from_secs(60);
    while harness.metric("plait_requests_finished_total{reason=\"abort\"}") < 1.0 {
        assert!(Instant::now() < deadline, "the abort is not read");
    }
    for stream in 1..=31 {
        assert_eq!(harness.answer(stream).text(), whole);
    }
}

#[test]
fn a_rank_without_heartbeats_is_late_but_not_lost() {
    let timeouts = Timeouts::default();
    let mut harness = Harness::on_clock(&json!({}), timeouts, &Arc::default());
    harness.dial(|rank| rank.heartbeats = false);
    harness.wait_for_phase("ready");
    assert_eq!(harness.status()["late"], false);
    harness.advance(timeouts.heartbeat);
    harness.wait_until("it is late", |harness| harness.status()["late"] == true);
    harness.submit(1, "abc", &json!({"max_tokens": 5}));
    assert_eq!(harness.answer(1).text(), "defgh");
}

#[test]
fn closing_answers_every_stream_wherever_it_is() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.hold(0, 20);
    let prompt = "abc".repeat(20);
    for stream in 1..=60 {
        harness.submit(stream, &prompt, &json!({"max_tokens": 400}));
    }
    harness.engine.close();
    for stream in 1..=60 {
        assert_eq!(harness.answer(stream).error, Some((503, 0)), "{stream}");
    }
    assert_eq!(harness.status()["phase"], "stopped");
}
