//! An engine of a group against another that the test plays by hand.

use std::sync::Arc;
use std::time::Duration;

use plait_engine::Timeouts;
use plait_engine::group::GroupTimeouts;
use plait_proto::{Decision, Join, Message, Mode, PROTOCOL, Vote};
use serde_json::json;

use crate::groups::{engine, place, socket_directory};
use crate::harness::Harness;

/// Another engine of a group of two, played by hand.
struct Played(zmq::Socket);

impl Played {
    fn say(&self, to: &[Vec<u8>], message: impl Into<Message>) {
        let frames = plait_proto::encode(&message.into());
        let frames = to.iter().cloned().chain(frames);
        self.0.send_multipart(frames, 0).unwrap();
    }

    fn receive(&self) -> Vec<Vec<u8>> {
        self.0.recv_multipart(0).unwrap()
    }
}

fn played(kind: zmq::SocketType) -> Played {
    let socket = zmq::Context::new().socket(kind).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_rcvtimeo(60_000).unwrap();
    Played(socket)
}

fn idle(replica: u32, step: u64) -> Vote {
    Vote {
        replica,
        step,
        num_prefill_tokens: 0,
        num_decode_rows: 0,
        num_tokens: 0,
        wants_mixed: false,
        can_graph: true,
        idle: true,
        draining: false,
        prompts: None,
        graphs: Vec::new(),
    }
}

fn idle_decision(step: u64) -> Decision {
    Decision {
        step,
        mode: Mode::Idle,
        pad_tokens: 0,
        graph_bucket: None,
        dummy_replicas: Vec::new(),
        stop: false,
        draining: false,
        tokens: Vec::new(),
    }
}

/// Admitted to a scheduler whose group has just stopped, it would never get an answer.
#[test]
fn a_request_between_a_vote_and_the_stop_is_refused_with_its_reason() {
    let (_directory, endpoint) = socket_directory();
    let first = played(zmq::ROUTER);
    first.0.bind(&endpoint).unwrap();
    let mut member = engine(&place(1, 2, &endpoint), Timeouts::default());
    let peer = first.receive()[..1].to_vec(); // its Join
    first.receive(); // its vote on step 1
    first.say(&peer, idle_decision(1));
    member.wait_for_phase("ready");
    first.say(&peer, idle(0, 2)); // somebody calls
    first.receive(); // it votes that it is idle
    member.submit(1, "abc", &json!({}));
    // The text threads take requests in order: when these are refused, that one is with the driver.
    for invalid in 2..6 {
        member.submit(invalid, "abc", &json!({"max_tokens": -1}));
    }
    for invalid in 2..6 {
        assert!(member.answer(invalid).error.is_some());
    }
    first.say(
        &peer,
        Decision {
            stop: true,
            draining: true,
            ..idle_decision(2)
        },
    );
    let answer = member.answer(1);
    assert_eq!(answer.error, Some((503, 0)));
    assert!(
        answer.message().contains("shutting down"),
        "{}",
        answer.message()
    );
    member.wait_for_phase("stopped");
}

#[test]
fn a_vote_that_does_not_come_ends_the_engine_with_the_replicas_name() {
    let (_directory, endpoint) = socket_directory();
    let timeouts = Timeouts {
        group: GroupTimeouts {
            vote: Duration::from_millis(300),
            ..GroupTimeouts::default()
        },
        ..Timeouts::default()
    };
    let clock = Arc::default();
    let mut first = Harness::on_clock(&place(0, 2, &endpoint), timeouts, &clock);
    first.dial(|_| {});
    let member = played(zmq::DEALER);
    member.0.connect(&endpoint).unwrap();
    member.say(&[], join());
    member.say(&[], idle(1, 1));
    first.wait_for_phase("ready");
    first.submit(1, "abc", &json!({}));
    let called = |frames: Vec<Vec<u8>>| matches!(plait_proto::decode(&frames), Ok(Message::Vote(call)) if call.step == 2);
    while !called(member.receive()) {}
    first.advance(timeouts.group.vote);
    assert_eq!(first.answer(1).error, Some((503, 0)));
    let status = first.status();
    let reason = status["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("replica 1 (engine 1) did not vote on step 2"),
        "{reason}"
    );
    assert_eq!(
        (&status["phase"], &status["exit_code"]),
        (&json!("failed"), &json!(5))
    );
}

/// The Join of a second engine with these settings.
fn join() -> Join {
    let (_directory, endpoint) = socket_directory();
    let listener = played(zmq::ROUTER);
    listener.0.bind(&endpoint).unwrap();
    let _same = Harness::alone(&place(1, 2, &endpoint), Timeouts::default());
    let frames = listener.receive();
    match plait_proto::decode(&frames[1..]).unwrap() {
        Message::Join(join) if join.protocol == PROTOCOL => join,
        other => panic!("{other:?}"),
    }
}
