//! Claims about CURVE between engines.

use plait_core::Micros;
use plait_engine::group::{
    ClientKeys, Exchange, GroupFailure, GroupProblem, HandshakeFailure, Role, ServerKeys,
};
use plait_proto::ExitCode;
use zmq::CurveKeyPair;

use crate::engines::{Devices, Engine, Log, Order, group_settings};
use crate::harness::Spec;

const REPLICAS: [u32; 2] = [1, 1];

fn first(pair: &CurveKeyPair, allowed: &CurveKeyPair) -> Engine {
    let mut settings = group_settings(0, "", &REPLICAS);
    settings.role = Role::Coordinator {
        endpoint: "tcp://127.0.0.1:*".to_owned(),
        keys: Some(ServerKeys {
            secret: pair.secret_key,
            allowed: vec![allowed.public_key],
        }),
    };
    Engine::start(settings, Devices::default())
}

fn member(endpoint: &str, keys: Option<ClientKeys>) -> Engine {
    let mut settings = group_settings(1, "", &REPLICAS);
    settings.role = Role::Member {
        engine: 1,
        endpoint: endpoint.to_owned(),
        keys,
    };
    Engine::start(settings, Devices::default())
}

fn keys(server: &CurveKeyPair, own: &CurveKeyPair) -> Option<ClientKeys> {
    Some(ClientKeys {
        server: server.public_key,
        public: own.public_key,
        secret: own.secret_key,
    })
}

fn pairs() -> [CurveKeyPair; 3] {
    [(); 3].map(|()| CurveKeyPair::new().unwrap())
}

fn heard_nothing(first: Engine) -> Log {
    first.tell(Order::Vanish);
    let log = first.finish();
    assert!(log.decisions.is_empty());
    assert_eq!(log.drop_counts, Default::default());
    log
}

#[test]
fn engines_with_the_right_keys_agree() {
    let [server, own, _] = pairs();
    let first = first(&server, &own);
    let member = member(first.endpoint.as_ref().unwrap(), keys(&server, &own));
    member.submit(0, Spec::new(3, 9));
    member.wait_until("its request is served", |log| log.num_tokens == 3 + 8);
    member.tell(Order::Drain);
    assert_eq!((first.finish().end, member.finish().end), (None, None));
}

fn handshake(log: Log) -> HandshakeFailure {
    match log.end {
        Some(GroupFailure::ConnectFailed { handshake, .. }) => handshake,
        other => panic!("the link was opened, or {other:?}"),
    }
}

#[test]
fn an_engine_whose_key_is_not_on_the_list_gets_nothing_through() {
    let [server, listed, other] = pairs();
    let first = first(&server, &listed);
    let refused = member(first.endpoint.as_ref().unwrap(), keys(&server, &other)).finish();
    let end = refused.end.clone().unwrap();
    assert!(
        end.to_string()
            .contains("refused this engine's CURVE key (400)"),
        "{end}"
    );
    assert_eq!(handshake(refused), HandshakeFailure::Denied(400));
    assert_eq!(end.code(), ExitCode::Settings);
    heard_nothing(first);
}

#[test]
fn a_key_joins_as_its_own_engine_only() {
    let [server, first_key, second_key] = pairs();
    let three = [1, 1, 1];
    let mut settings = group_settings(0, "", &three);
    settings.role = Role::Coordinator {
        endpoint: "tcp://127.0.0.1:*".to_owned(),
        keys: Some(ServerKeys {
            secret: server.secret_key,
            allowed: vec![first_key.public_key, second_key.public_key],
        }),
    };
    let first = Engine::start(settings, Devices::default());
    let mut settings = group_settings(1, "", &three);
    settings.role = Role::Member {
        engine: 1,
        endpoint: first.endpoint.clone().unwrap(),
        keys: keys(&server, &second_key),
    };
    let end = Engine::start(settings, Devices::default())
        .finish()
        .end
        .unwrap();
    assert_eq!(end.code(), ExitCode::Settings);
    let told = end.to_string();
    assert!(
        told.contains("engine 1 came with the key of engine 2"),
        "{told}"
    );
    first.tell(Order::Vanish);
    // Its Join, and often the farewell behind it.
    let num_unknown = first.finish().drop_counts.num_unknown_peers;
    assert!((1..=2).contains(&num_unknown), "{num_unknown}");
}

#[test]
fn an_engine_that_expects_another_first_one_gets_nothing_through() {
    let [server, own, other] = pairs();
    let first = first(&server, &own);
    let refused = member(first.endpoint.as_ref().unwrap(), keys(&other, &own)).finish();
    // The coordinator cannot decrypt the message and hangs up: no more is known here.
    assert_eq!(
        handshake(refused),
        HandshakeFailure::HungUp { has_keys: true }
    );
    heard_nothing(first);
}

/// A closed connection does not prove wrong keys.
#[test]
fn an_engine_that_is_hung_up_on_says_so_and_blames_nothing() {
    let [server, own, _] = pairs();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", other.local_addr().unwrap());
    let member = member(&endpoint, keys(&server, &own));
    drop(other.accept().unwrap());
    let end = member.finish().end.unwrap();
    let told = end.to_string();
    assert!(
        told.contains("hung up") && told.contains("it ended, or"),
        "{told}"
    );
    assert!(told.contains(&endpoint), "{told}");
    assert_eq!(end.code(), ExitCode::RankLost, "it may be tried again");
}

#[test]
fn an_engine_without_keys_gets_nothing_through() {
    let [server, own, _] = pairs();
    let first = first(&server, &own);
    let context = zmq::Context::new();
    let bare = context.socket(zmq::DEALER).unwrap();
    bare.set_linger(0).unwrap();
    let ended = i32::from(zmq::SocketEvent::DISCONNECTED.to_raw())
        | i32::from(zmq::SocketEvent::HANDSHAKE_FAILED_PROTOCOL.to_raw());
    bare.monitor("inproc://bare", ended).unwrap();
    let events = context.socket(zmq::PAIR).unwrap();
    events.connect("inproc://bare").unwrap();
    bare.connect(first.endpoint.as_ref().unwrap()).unwrap();
    bare.send("a word", 0).unwrap();
    assert_eq!(events.poll(zmq::POLLIN, 60_000), Ok(1), "it hangs up");
    heard_nothing(first);
}

#[test]
fn an_address_that_others_can_reach_needs_keys() {
    let mut settings = group_settings(0, "", &REPLICAS);
    settings.role = Role::Coordinator {
        endpoint: "tcp://*:5555".to_owned(),
        keys: None,
    };
    let problem = Exchange::new(settings, Micros(0)).err().unwrap();
    assert!(
        matches!(problem, GroupProblem::Unprotected { .. }),
        "{problem}"
    );
}

#[test]
fn an_address_that_cannot_be_had_is_an_error_that_names_it() {
    let settings = group_settings(0, "ipc:///tmp/plait-no-such-directory/group", &REPLICAS);
    let problem = Exchange::new(settings, Micros(0)).err().unwrap();
    assert!(
        problem.to_string().contains("plait-no-such-directory"),
        "{problem}"
    );
}
