//! `ZMQ_MAXMSGSIZE` limits a whole message, and a ROUTER learns which peer has left.

#![allow(clippy::unwrap_used, reason = "a test ends with the error")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use tempfile::TempDir;
use zmq::{Context, Socket, SocketType};

const CAP: usize = 64 << 10;
const WAIT_MS: i32 = 10_000;

/// A ROUTER with the cap, and where it listens.
fn router() -> (TempDir, Socket, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("router").display().to_string();
    let socket = Context::new().socket(SocketType::ROUTER).unwrap();
    socket.set_linger(0).unwrap();
    socket.set_maxmsgsize(i64::try_from(CAP).unwrap()).unwrap();
    socket.set_rcvtimeo(WAIT_MS).unwrap();
    socket.bind(&format!("ipc://{path}")).unwrap();
    (directory, socket, path)
}

/// A peer that has just passed ZMTP's handshake, without any library of ours between.
fn shake_hands(path: &str) -> UnixStream {
    let mut peer = UnixStream::connect(path).unwrap();
    let mut greeting = [0_u8; 64];
    greeting[0] = 0xFF;
    greeting[9..12].copy_from_slice(&[0x7F, 3, 0]);
    greeting[12..16].copy_from_slice(b"NULL");
    peer.write_all(&greeting).unwrap();
    peer.read_exact(&mut [0; 64]).unwrap();
    let ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER";
    peer.write_all(&[4, u8::try_from(ready.len()).unwrap()])
        .unwrap();
    peer.write_all(ready).unwrap();
    let mut size = [0; 2];
    peer.read_exact(&mut size).unwrap();
    peer.read_exact(&mut vec![0; size[1].into()]).unwrap();
    peer
}

/// Sends frames of one message until the other end hangs up; returns how many bytes it took.
fn send_without_end(mut peer: UnixStream, frame: &[u8]) -> usize {
    const MOST: usize = 64 << 20;
    let mut num_sent = 0;
    while num_sent < MOST && peer.write_all(frame).is_ok() {
        num_sent += frame.len();
    }
    num_sent
}

#[test]
fn a_message_that_never_ends_closes_its_connection() {
    let (_directory, _router, path) = router();
    // 200 bytes, and more to come.
    let frame = [&[1, 200][..], &[7; 200]].concat();
    let num_sent = send_without_end(shake_hands(&path), &frame);
    assert!(
        num_sent < 8 << 20,
        "{num_sent} bytes of one message were taken"
    );
}

#[test]
fn empty_frames_without_end_close_their_connection_too() {
    let (_directory, _router, path) = router();
    let num_sent = send_without_end(shake_hands(&path), &[1, 0]);
    assert!(
        num_sent < 8 << 20,
        "{num_sent} bytes of empty frames were taken"
    );
}

#[test]
fn messages_under_the_cap_pass_however_many_come() {
    let (_directory, router, path) = router();
    let dealer = Context::new().socket(SocketType::DEALER).unwrap();
    dealer.connect(&format!("ipc://{path}")).unwrap();
    let message = vec![vec![7_u8; 1000]; 60];
    for _ in 0..3 {
        dealer.send_multipart(&message, 0).unwrap();
    }
    for _ in 0..3 {
        assert_eq!(router.recv_multipart(0).unwrap()[1..], message);
    }
}
