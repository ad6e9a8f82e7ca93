//! Crate `zmq` over this crate's libzmq: CURVE is there, encrypts, and shuts out a client with the wrong key.

#![allow(clippy::unwrap_used, reason = "a test ends with the error")]

use zmq::{Context, CurveKeyPair, Socket, SocketType};

const WAIT_MS: i32 = 5_000;
const REFUSED_WAIT_MS: i32 = 300;

#[test]
fn crate_zmq_sees_curve() {
    assert_eq!(zmq::has("curve"), Some(true));
}

#[test]
fn a_message_passes_between_peers_with_the_right_keys() {
    let context = Context::new();
    let keys = CurveKeyPair::new().unwrap();
    let (server, endpoint) = listen(&context, &keys);
    let client = dial(&context, &endpoint, &keys.public_key);
    client.send("a plan", 0).unwrap();
    assert_eq!(receive(&server, WAIT_MS).as_deref(), Some(&b"a plan"[..]));
}

#[test]
fn a_client_that_expects_another_server_key_gets_nothing_through() {
    let context = Context::new();
    let (server, endpoint) = listen(&context, &CurveKeyPair::new().unwrap());
    let client = dial(
        &context,
        &endpoint,
        &CurveKeyPair::new().unwrap().public_key,
    );
    client.send("a plan", 0).unwrap();
    assert_eq!(receive(&server, REFUSED_WAIT_MS), None);
}

fn listen(context: &Context, keys: &CurveKeyPair) -> (Socket, String) {
    let socket = context.socket(SocketType::PULL).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_curve_server(true).unwrap();
    socket.set_curve_secretkey(&keys.secret_key).unwrap();
    socket.bind("tcp://127.0.0.1:*").unwrap();
    let endpoint = socket.get_last_endpoint().unwrap().unwrap();
    (socket, endpoint)
}

fn dial(context: &Context, endpoint: &str, server_key: &[u8]) -> Socket {
    let keys = CurveKeyPair::new().unwrap();
    let socket = context.socket(SocketType::PUSH).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_curve_serverkey(server_key).unwrap();
    socket.set_curve_publickey(&keys.public_key).unwrap();
    socket.set_curve_secretkey(&keys.secret_key).unwrap();
    socket.connect(endpoint).unwrap();
    socket
}

fn receive(socket: &Socket, wait_ms: i32) -> Option<Vec<u8>> {
    socket.set_rcvtimeo(wait_ms).unwrap();
    socket.recv_bytes(0).ok()
}
