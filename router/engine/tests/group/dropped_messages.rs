//! Claims about messages that belong to no round, and engines that belong to no group.

use plait_engine::group::{DropCounts, GroupSettings};
use plait_proto::{Drain, ExitCode, Fail, Join, Message, PROTOCOL, Vote, schema_fingerprint};
use tempfile::TempDir;

use crate::engines::{
    CONFIG, Devices, Engine, FOREVER, Log, MAX_TOKENS, Order, group_settings, socket_directory,
};
use crate::harness::Spec;

const REPLICAS: [u32; 3] = [1, 1, 1];

/// A coordinator, and engine 1 played by the test; engine 2 is a real one.
struct Stage {
    first: Engine,
    good: Engine,
    endpoint: String,
    _directory: TempDir,
}

fn stage() -> Stage {
    let (directory, endpoint) = socket_directory();
    let [first, good] = [0, 2].map(|engine| {
        let settings: GroupSettings = group_settings(engine, &endpoint, &REPLICAS);
        Engine::start(settings, Devices::default())
    });
    Stage {
        first,
        good,
        endpoint,
        _directory: directory,
    }
}

struct Peer(zmq::Socket);

impl Peer {
    fn dial(endpoint: &str) -> Self {
        let socket = zmq::Context::new().socket(zmq::DEALER).unwrap();
        socket.set_linger(100).unwrap();
        socket
            .set_rcvtimeo(i32::try_from(FOREVER.as_millis()).unwrap())
            .unwrap();
        socket.connect(endpoint).unwrap();
        Self(socket)
    }

    fn say(&self, message: impl Into<Message>) {
        self.say_frames(&plait_proto::encode(&message.into()));
    }

    fn say_frames(&self, frames: &[Vec<u8>]) {
        self.0.send_multipart(frames, 0).unwrap();
    }

    fn receive(&self) -> Message {
        plait_proto::decode(&self.0.recv_multipart(0).unwrap()).unwrap()
    }
}

fn join(engine: u32) -> Join {
    Join {
        protocol: PROTOCOL,
        schema: schema_fingerprint(),
        config: CONFIG,
        engine,
        num_engines: 3,
        first_replica: engine,
        num_replicas: 1,
        facts: Vec::new(),
    }
}

/// The answer to a peer that is rejected.
fn refusal(endpoint: &str, stranger: &Join) -> Fail {
    let peer = Peer::dial(endpoint);
    peer.say(stranger.clone());
    peer.say(idle(1, 1));
    match peer.receive() {
        Message::Fail(fail) => fail,
        other => panic!("a rejected peer got {other:?}"),
    }
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

#[test]
fn a_vote_that_contradicts_its_rows_is_dropped_and_counted() {
    let stage = stage();
    let peer = Peer::dial(&stage.endpoint);
    peer.say(join(1));
    peer.say(Vote {
        wants_mixed: true, // without rows of both kinds
        ..idle(1, 1)
    });
    stage
        .first
        .wait_until("it is counted", |log| log.drop_counts.num_malformed == 1);
    assert_eq!(stage.first.log().decisions, []);
    for engine in [stage.first, stage.good] {
        engine.tell(Order::Vanish);
        engine.finish();
    }
}

#[test]
fn late_repeated_foreign_and_malformed_votes_are_dropped_and_counted() {
    let stage = stage();
    let (peer, stranger) = (Peer::dial(&stage.endpoint), Peer::dial(&stage.endpoint));
    peer.say(idle(1, 1)); // it has not joined
    peer.say(join(1));
    peer.say(join(1));
    peer.say(idle(0, 1)); // of another engine
    peer.say(idle(7, 1)); // of nobody
    peer.say(idle(1, 2)); // of the future
    peer.say(Drain {});
    peer.say_frames(&[vec![5], vec![0xc1]]);
    peer.say(Vote {
        num_tokens: u32::MAX, // without rows
        ..idle(1, 1)
    });
    peer.say(Vote {
        num_prefill_tokens: 1,
        num_tokens: MAX_TOKENS + 1, // for all to make room for
        idle: false,
        ..idle(1, 1)
    });
    stranger.say(idle(1, 1));
    stage.first.wait_until("all but one vote is there", |log| {
        log.drop_counts.num_unknown_peers == 2
    });
    stage.good.submit(0, Spec::new(3, 2));
    stage.good.wait_until("it has voted", |log| log.has_voted);
    stranger.say(idle(1, 1));
    stage.first.wait_until("what came after is there", |log| {
        log.drop_counts.num_unknown_peers == 3
    });
    assert_eq!(
        stage.first.log().decisions.len(),
        0,
        "replica 1 has not voted"
    );
    peer.say(idle(1, 1));
    peer.say(idle(1, 1)); // again
    let Message::Decision(decision) = peer.receive() else {
        panic!("a decision")
    };
    let mut step = decision.step;
    while stage.good.log().num_tokens < 4 {
        step += 1;
        peer.say(idle(1, step));
        while !matches!(peer.receive(), Message::Decision(decision) if decision.step == step) {}
    }
    peer.say(idle(1, 1)); // of the past
    let num_twice_or_late = |log: &Log| log.drop_counts.num_duplicate + log.drop_counts.num_late;
    stage
        .first
        .wait_until("a join, a vote twice and a late one are counted", |log| {
            num_twice_or_late(log) == 3
        });
    let drop_counts = stage.first.log().drop_counts;
    let counted = DropCounts {
        num_unknown_peers: 3,
        num_malformed: 3,
        num_unexpected: 4,
        ..drop_counts
    };
    assert_eq!(drop_counts, counted);
    assert!(stage.first.log().end.is_none() && stage.good.log().end.is_none());
    for engine in [stage.first, stage.good] {
        engine.tell(Order::Vanish);
        engine.finish();
    }
}

#[test]
fn a_rejected_engine_learns_in_what_it_differs() {
    type Change = fn(&mut Join);
    let cases: [(&str, Change); 7] = [
        ("speaks protocol 9, engine 0 1", |join| join.protocol = 9),
        (
            "message schema of engine 1 is not that of engine 0",
            |join| join.schema[0] ^= 1,
        ),
        ("same model and settings", |join| join.config[0] ^= 1),
        ("says that it is engine 7 of 3", |join| join.engine = 7),
        ("engine 0 is this one", |join| join.engine = 0),
        ("engine 1 of 8; the group has 3", |join| {
            join.num_engines = 8;
        }),
        (
            "has 2 replicas from number 1 on; engine 0 expects 1..2",
            |join| join.num_replicas = 2,
        ),
    ];
    let stage = stage();
    for (words, change) in cases {
        let mut stranger = join(1);
        change(&mut stranger);
        let Fail { rank, code, reason } = refusal(&stage.endpoint, &stranger);
        assert!(reason.contains(words), "{reason}");
        assert_eq!((rank, code), (stranger.engine, ExitCode::Settings));
    }
    // Number 1 is still free.
    let settings = group_settings(1, &stage.endpoint, &REPLICAS);
    let late = Engine::start(settings, Devices::default());
    late.submit(0, Spec::new(3, 2));
    late.wait_until("its request is served", |log| log.num_tokens == 4);
    assert!(
        stage.first.log().drop_counts.num_unknown_peers >= 13,
        "each Join and each vote"
    );
    late.tell(Order::Drain);
    for engine in [stage.first, stage.good, late] {
        assert_eq!(engine.finish().end, None);
    }
}

#[test]
fn an_engine_of_another_configuration_ends_with_the_reason() {
    let stage = stage();
    let mut settings = group_settings(1, &stage.endpoint, &REPLICAS);
    settings.config = [8; 16];
    let refused = Engine::start(settings, Devices::default()).finish();
    let end = refused.end.unwrap();
    assert!(
        end.to_string().starts_with("the configuration of engine 1"),
        "{end}"
    );
    assert_eq!(end.code(), ExitCode::Settings);
    for engine in [stage.first, stage.good] {
        engine.tell(Order::Vanish);
        engine.finish();
    }
}
