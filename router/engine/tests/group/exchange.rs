//! Claims about one engine's exchange, with the other end played by the test.

use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

use crossbeam_channel::bounded;
use plait_core::{Micros, Mode, StepId, Vote};
use plait_engine::group::{Exchange, GroupFailure};
use plait_proto::{Decision, Drain, ExitCode, Fail, Join, Message, PROTOCOL, schema_fingerprint};

use crate::engines::{
    CONFIG, Devices, Engine, FOREVER, MAX_TOKENS, group_settings, socket_directory,
};

fn idle(replica: u32) -> Vote {
    Vote {
        replica,
        step: StepId(1),
        num_prefill_tokens: 0,
        num_prefill_rows: 0,
        num_context_tokens: 0,
        num_decode_rows: 0,
        num_tokens: 0,
        can_graph: true,
        idle: true,
        draining: false,
    }
}

fn first_of_two(endpoint: &str) -> Exchange {
    Exchange::new(group_settings(0, endpoint, &[1, 1]), Micros(0)).unwrap()
}

fn dial(endpoint: &str) -> zmq::Socket {
    let socket = zmq::Context::new().socket(zmq::DEALER).unwrap();
    socket.set_linger(100).unwrap();
    let millis = i32::try_from(FOREVER.as_millis()).unwrap();
    socket.set_rcvtimeo(millis).unwrap();
    socket.connect(endpoint).unwrap();
    socket
}

fn say(socket: &zmq::Socket, message: impl Into<Message>) {
    let frames = plait_proto::encode(&message.into());
    socket.send_multipart(frames, 0).unwrap();
}

fn wire_vote(vote: &Vote) -> plait_proto::Vote {
    plait_proto::Vote {
        replica: vote.replica,
        step: vote.step.0,
        num_prefill_tokens: vote.num_prefill_tokens,
        num_decode_rows: vote.num_decode_rows,
        num_tokens: vote.num_tokens,
        wants_mixed: vote.is_mixed(),
        can_graph: vote.can_graph,
        idle: vote.idle,
        draining: vote.draining,
        prompts: None,
        graphs: Vec::new(),
    }
}

/// Engine 1 of two.
fn join() -> Join {
    Join {
        protocol: PROTOCOL,
        schema: schema_fingerprint(),
        config: CONFIG,
        engine: 1,
        num_engines: 2,
        first_replica: 1,
        num_replicas: 1,
        facts: Vec::new(),
    }
}

#[test]
fn a_decision_that_waits_is_due_at_once() {
    let mut alone = Exchange::new(group_settings(0, "", &[1]), Micros(0)).unwrap();
    assert_eq!(alone.next_deadline(), None);
    alone.cast(&[idle(0)], Micros(5)).unwrap();
    assert!(alone.next_deadline().is_some_and(|due| due <= Micros(5)));
    assert_eq!(alone.receive(Micros(5)).unwrap().unwrap().mode, Mode::Idle);
    assert_eq!(alone.next_deadline(), None);
}

#[test]
fn a_stop_that_waits_is_due_at_once() {
    let mut alone = Exchange::new(group_settings(0, "", &[1]), Micros(0)).unwrap();
    let draining = Vote {
        draining: true,
        ..idle(0)
    };
    alone.cast(&[draining], Micros(5)).unwrap();
    assert!(alone.next_deadline().is_some());
    assert!(alone.receive(Micros(5)).unwrap().unwrap().stop);
    assert_eq!(alone.next_deadline(), None);
}

/// Member 1 of two, whose vote has reached the socket that plays engine 0.
struct Played {
    member: Exchange,
    first: zmq::Socket,
    /// The member's routing id.
    peer: Vec<u8>,
    _directory: tempfile::TempDir,
}

fn played(vote: &Vote) -> Played {
    let (directory, endpoint) = socket_directory();
    let first = zmq::Context::new().socket(zmq::ROUTER).unwrap();
    first.bind(&endpoint).unwrap();
    let mut member = Exchange::new(group_settings(1, &endpoint, &[1, 1]), Micros(0)).unwrap();
    member.cast(&[*vote], Micros(0)).unwrap();
    let peer = first.recv_multipart(0).unwrap().swap_remove(0);
    first.recv_multipart(0).unwrap();
    Played {
        member,
        first,
        peer,
        _directory: directory,
    }
}

impl Played {
    fn answer(&self, decision: Decision) {
        let mut frames = plait_proto::encode(&decision.into());
        frames.insert(0, self.peer.clone());
        self.first.send_multipart(frames, 0).unwrap();
    }
}

fn decision(mode: plait_proto::Mode) -> Decision {
    Decision {
        step: 1,
        mode,
        pad_tokens: 0,
        graph_bucket: None,
        dummy_replicas: Vec::new(),
        stop: false,
        draining: false,
        tokens: Vec::new(),
    }
}

/// Waits until a message and a link event are there.
fn wait_until_all_are_readable(exchange: &Exchange) {
    let mut items = exchange.poll_items();
    let deadline = Instant::now() + FOREVER;
    loop {
        zmq::poll(&mut items, 60_000).unwrap();
        if items.iter().all(zmq::PollItem::is_readable) {
            return;
        }
        assert!(Instant::now() < deadline, "something never comes");
        thread::yield_now();
    }
}

#[test]
fn a_link_that_broke_after_a_decision_is_checked_again_at_once() {
    let played = played(&idle(1));
    played.answer(decision(plait_proto::Mode::Idle));
    let mut member = played.member;
    drop(played.first);
    wait_until_all_are_readable(&member);
    assert!(member.receive(Micros(1)).unwrap().is_some());
    assert_eq!(member.next_deadline(), Some(Micros(0)));
    let lost = member.receive(Micros(1)).unwrap_err();
    assert!(
        matches!(lost, GroupFailure::Disconnected { engine: 0, .. }),
        "{lost}"
    );
}

#[test]
fn a_decision_that_cannot_be_ends_the_engine_by_name() {
    type Change = fn(&mut Decision);
    let cases: [(&str, Change); 7] = [
        ("does not count", |it| it.tokens.clear()),
        ("counts other tokens", |it| it.tokens[12] = 1),
        ("leaves out rows", |it| it.mode = plait_proto::Mode::Idle),
        ("dummy for more replicas", |it| {
            it.dummy_replicas = vec![255; 60_000];
        }),
        ("no graph has its size", |it| it.graph_bucket = Some(7)),
        ("it pads to more tokens than a step may have", |it| {
            it.pad_tokens = MAX_TOKENS + 1;
        }),
        ("too few tokens", |it| it.pad_tokens = 1),
    ];
    let decoding = Vote {
        num_decode_rows: 2,
        num_tokens: 2,
        idle: false,
        ..idle(1)
    };
    for (words, change) in cases {
        let mut played = played(&decoding);
        let mut broken = Decision {
            pad_tokens: 4,
            graph_bucket: Some(4),
            tokens: vec![0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0],
            ..decision(plait_proto::Mode::Decode)
        };
        change(&mut broken);
        played.answer(broken);
        zmq::poll(&mut played.member.poll_items(), 60_000).unwrap();
        let end = played.member.receive(Micros(1)).unwrap_err();
        let told = end.to_string();
        assert!(
            told.contains("engine 0 sent a decision on step 1"),
            "{told}"
        );
        assert!(told.contains(words), "{told}");
    }
}

#[test]
fn strangers_who_hang_up_before_the_handshake_wake_nobody() {
    let (directory, endpoint) = socket_directory();
    let path = directory.path().join("group");
    let mut first = first_of_two(&endpoint);
    let member = dial(&endpoint);
    say(&member, join());
    zmq::poll(&mut first.poll_items(), 60_000).unwrap();
    first.receive(Micros(0)).unwrap();
    for _ in 0..300 {
        drop(UnixStream::connect(&path).unwrap());
    }
    first.cast(&[idle(0)], Micros(0)).unwrap();
    say(&member, wire_vote(&idle(1)));
    assert_eq!(zmq::poll(&mut first.poll_items(), 60_000), Ok(1));
    let decision = first.receive(Micros(0)).unwrap();
    assert!(
        decision.is_some(),
        "the first thing that wakes the engine is the vote"
    );
    assert_eq!(first.drop_counts(), Default::default());
    let next = plait_proto::decode(&member.recv_multipart(0).unwrap()).unwrap();
    assert!(
        matches!(next, Message::Decision(_)),
        "nobody calls for the missing: {next:?}"
    );
}

#[test]
fn an_engine_that_says_much_is_heard_a_little_at_a_time() {
    let (_directory, endpoint) = socket_directory();
    let mut first = first_of_two(&endpoint);
    let member = dial(&endpoint);
    say(&member, join());
    let deadline = Instant::now() + FOREVER;
    let (mut num_sent, mut num_heard, mut most_at_once) = (0, 0, 0);
    // Until so many messages wait that a call ends at its limit.
    while most_at_once < 256 || num_heard < num_sent {
        assert!(Instant::now() < deadline, "{num_heard} of {num_sent} came");
        if most_at_once < 256 {
            (0..1000).for_each(|_| say(&member, Drain {}));
            num_sent += 1000;
        }
        zmq::poll(&mut first.poll_items(), 60_000).unwrap();
        first.receive(Micros(0)).unwrap();
        let heard = first.drop_counts().num_unexpected - num_heard;
        assert!(heard < 300, "{heard} messages at once");
        most_at_once = most_at_once.max(heard);
        num_heard += heard;
    }
}

#[test]
fn after_the_end_nothing_wakes_the_engine_and_it_closes() {
    let (directory, endpoint) = socket_directory();
    let path = directory.path().join("group");
    let mut first = first_of_two(&endpoint);
    let member = dial(&endpoint);
    say(&member, join());
    let reason = "its device is on fire".to_owned();
    let (rank, code) = (1, ExitCode::Hardware);
    say(&member, Fail { rank, code, reason });
    let end = loop {
        zmq::poll(&mut first.poll_items(), 60_000).unwrap();
        if let Err(end) = first.receive(Micros(0)) {
            break end;
        }
    };
    assert_eq!(end.to_string(), "engine 1 gave up: its device is on fire");
    (0..2500).for_each(|_| drop(UnixStream::connect(&path)));
    assert!(first.poll_items().is_empty());
    assert_eq!(first.next_deadline(), None);
    assert_eq!(first.receive(Micros(0)), Ok(None));
    let (closed, is_closed) = bounded(1);
    thread::spawn(move || {
        drop(first);
        closed.send(()).unwrap();
    });
    assert_eq!(is_closed.recv_timeout(FOREVER), Ok(()), "it hangs");
}

#[test]
fn an_unknown_peer_that_hangs_up_ends_nothing() {
    let (_directory, endpoint) = socket_directory();
    let mut first = first_of_two(&endpoint);
    let member = dial(&endpoint);
    say(&member, join());
    zmq::poll(&mut first.poll_items(), 60_000).unwrap();
    first.receive(Micros(0)).unwrap();
    let stranger = dial(&endpoint);
    say(&stranger, Drain {});
    while first.drop_counts().num_unknown_peers == 0 {
        zmq::poll(&mut first.poll_items(), 60_000).unwrap();
        first.receive(Micros(0)).unwrap();
    }
    drop(stranger);
    say(&member, wire_vote(&idle(1)));
    first.cast(&[idle(0)], Micros(0)).unwrap();
    let decision = loop {
        zmq::poll(&mut first.poll_items(), 60_000).unwrap();
        if let Some(decision) = first.receive(Micros(0)).unwrap() {
            break decision;
        }
    };
    assert_eq!(decision.mode, Mode::Idle, "the member is served");
}

#[test]
fn a_second_engine_of_one_number_ends_the_group_which_names_it() {
    let (_directory, endpoint) = socket_directory();
    let [first, right] = [0, 1].map(|engine| {
        let settings = group_settings(engine, &endpoint, &[1, 1]);
        Engine::start(settings, Devices::default())
    });
    first.wait_until("both are there", |log| !log.decisions.is_empty());
    let second = dial(&endpoint);
    say(&second, join());
    let answer = plait_proto::decode(&second.recv_multipart(0).unwrap()).unwrap();
    let end = first.finish().end.unwrap();
    assert!(
        end.to_string()
            .starts_with("two engines say that they are engine 1 (replica 1)"),
        "{end}"
    );
    let told = |message: &Message| match message {
        Message::Fail(fail) => fail.reason.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(told(&answer), end.to_string());
    assert_eq!(right.finish().end.unwrap().to_string(), end.to_string());
}
