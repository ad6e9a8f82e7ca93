//! Which CURVE keys may connect. libzmq asks about each key over its authentication protocol (ZAP, ZeroMQ
//! RFC 27).

use super::settings::Key;

/// Where libzmq asks.
const ENDPOINT: &str = "inproc://zeromq.zap.01";
const VERSION: &[u8] = b"1.0";

/// Frames of a request that carries a CURVE key: version, request id, domain, address, routing id,
/// mechanism, key.
const NUM_FRAMES: usize = 7;

/// Requests that are answered in one pass of the event loop.
const MAX_ANSWERS_A_PASS: usize = 64;

/// Answers for one context. Without it CURVE admits any peer that knows the server's key.
pub struct Allowlist {
    socket: zmq::Socket,
    keys: Vec<Key>,
}

impl Allowlist {
    /// Answers from now on. Create it before the context's sockets listen.
    pub fn new(context: &zmq::Context, keys: Vec<Key>) -> Result<Self, zmq::Error> {
        let socket = context.socket(zmq::REP)?;
        socket.set_linger(0)?;
        socket.bind(ENDPOINT)?;
        Ok(Self { socket, keys })
    }

    /// Readable when a request waits.
    pub fn socket(&self) -> &zmq::Socket {
        &self.socket
    }

    /// Answers the waiting requests.
    pub fn answer(&self) {
        for _ in 0..MAX_ANSWERS_A_PASS {
            let Ok(request) = self.socket.recv_multipart(zmq::DONTWAIT) else {
                return;
            };
            let request_id = request.get(1).map_or(&[][..], Vec::as_slice);
            let (status, text): (&[u8], &[u8]) = if self.allows(&request) {
                (b"200", b"OK")
            } else {
                (b"400", b"this key is not on the list")
            };
            let reply: [&[u8]; 6] = [VERSION, request_id, status, text, b"", b""];
            // libzmq asks, and is gone only with the context.
            let _told = self.socket.send_multipart(reply, zmq::DONTWAIT);
        }
    }

    fn allows(&self, request: &[Vec<u8>]) -> bool {
        request.len() == NUM_FRAMES
            && request[0] == VERSION
            && request[5] == b"CURVE"
            && self.keys.iter().any(|key| request[6] == key)
    }
}
