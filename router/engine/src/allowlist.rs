//! Which CURVE keys may connect, and whose they are: engines', or those of hosts with ranks. libzmq asks about each key
//! over its authentication protocol (ZAP, ZeroMQ RFC 27).
//!
//! A thread of its own answers, so strangers wait for nobody and wake nobody.

use std::thread::{self, JoinHandle};

use crate::group::Key;

/// Where libzmq asks.
const ENDPOINT: &str = "inproc://zeromq.zap.01";
const VERSION: &[u8] = b"1.0";
/// Where the thread is told to end.
const STOP: &str = "inproc://stop-allowlist";

/// Frames of a request that carries a CURVE key: version, request id, domain, address, routing id,
/// mechanism, key.
const NUM_FRAMES: usize = 7;

/// Answers for one context until it is dropped. Without it CURVE admits any peer that knows the server's
/// key.
pub struct Allowlist {
    stop: zmq::Socket,
    thread: Option<JoinHandle<()>>,
}

impl Allowlist {
    /// Answers from now on. `keys` are those of owner 1, 2 and so on. Start it before the context's sockets
    /// listen.
    pub fn start(context: &zmq::Context, keys: Vec<Key>) -> Result<Self, zmq::Error> {
        let requests = context.socket(zmq::REP)?;
        requests.set_linger(0)?;
        requests.bind(ENDPOINT)?;
        let stop = context.socket(zmq::PAIR)?;
        stop.bind(STOP)?;
        let stopped = context.socket(zmq::PAIR)?;
        stopped.connect(STOP)?;
        let thread = thread::Builder::new()
            .name("plait-keys".to_owned())
            .spawn(move || answer_until(&stopped, &requests, &keys))
            .map_err(|_| zmq::Error::EMTHREAD)?;
        let thread = Some(thread);
        Ok(Self { stop, thread })
    }

    /// The owner whose key the sender of a message came with; None without keys.
    pub fn key_of(message: &mut zmq::Message) -> Option<u32> {
        message.gets("User-Id")?.parse().ok()
    }
}

impl Drop for Allowlist {
    fn drop(&mut self) {
        let told = self.stop.send("", zmq::DONTWAIT);
        if let (Ok(()), Some(thread)) = (told, self.thread.take()) {
            // A panic was reported where it happened.
            let _panicked = thread.join();
        }
    }
}

fn answer_until(stopped: &zmq::Socket, requests: &zmq::Socket, keys: &[Key]) {
    loop {
        let mut items = [stopped, requests].map(|socket| socket.as_poll_item(zmq::POLLIN));
        match zmq::poll(&mut items, -1) {
            Ok(_) | Err(zmq::Error::EINTR) => {}
            Err(_) => return,
        }
        if items[0].is_readable() {
            return;
        }
        if let Ok(request) = requests.recv_multipart(zmq::DONTWAIT) {
            // libzmq asks, and is gone only with the context.
            let _told = requests.send_multipart(answer(&request, keys), zmq::DONTWAIT);
        }
    }
}

/// Version, request id, status, text, user id and metadata. The user id is the owner's number.
fn answer(request: &[Vec<u8>], keys: &[Key]) -> [Vec<u8>; 6] {
    let (status, text, user) = match owner(request, keys) {
        Some(owner) => ("200", "OK", owner.to_string()),
        None => ("400", "this key is not on the list", String::new()),
    };
    let request_id = request.get(1).map_or(&[][..], Vec::as_slice);
    [
        VERSION,
        request_id,
        status.as_bytes(),
        text.as_bytes(),
        user.as_bytes(),
        b"",
    ]
    .map(<[u8]>::to_vec)
}

/// Whose key a request carries.
fn owner(request: &[Vec<u8>], keys: &[Key]) -> Option<usize> {
    let is_asked = request.len() == NUM_FRAMES && request[0] == VERSION && request[5] == b"CURVE";
    let place = keys.iter().position(|key| is_asked && request[6] == key)?;
    Some(place + 1)
}
