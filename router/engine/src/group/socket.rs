//! The two ends of the link between engines.

use std::fmt;

use plait_proto::{ExitCode, Malformed, Message};
use rustc_hash::FxHashMap;
use zmq::SocketEvent;

use crate::allowlist::Allowlist;
use crate::receive_frames::{next_frame, rest_of_message};
use crate::socket_options::{close_half_open, is_left, report_disconnects};

use super::settings::{ClientKeys, GroupProblem, ServerKeys};

/// Messages that wait for one peer at most. A round has one vote of each replica, so a peer that leaves
/// this many has stopped reading.
const HIGH_WATER_MARK: i32 = 4096;
/// Bytes of a message at most. A Fail has up to 4 kB of reason, a decision one bit a replica.
const MAX_MESSAGE_BYTES: i64 = 64 << 10;
/// Grace period of a closing socket for the messages that it has queued.
const LINGER_MILLIS: i32 = 500;

/// Messages that were dropped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DropCounts {
    /// From peers that are no engine of this group.
    pub num_unknown_peers: u64,
    /// Frames that are no message, and votes that no plan gives.
    pub num_malformed: u64,
    /// Votes on a decided step, and decisions that came before.
    pub num_late: u64,
    /// Second votes of a replica on a step, and second Joins.
    pub num_duplicate: u64,
    /// Anything else that the round does not need.
    pub num_unexpected: u64,
}

/// One connection, by the name that libzmq gave it.
pub type PeerId = Vec<u8>;

/// What came through a connection.
pub struct Received {
    /// Whose connection it is.
    pub sender: Sender,
    /// What came.
    pub content: Content,
}

/// Whose a connection is.
pub enum Sender {
    /// Of the engine that joined through it.
    Engine(u32),
    /// No engine's so far.
    Unjoined(Connection),
}

/// A connection that no engine has joined through.
pub struct Connection {
    /// Its name.
    pub peer: PeerId,
    /// The engine whose CURVE key it came with; None without keys.
    pub key_of: Option<u32>,
}

/// What a peer did.
#[expect(
    clippy::large_enum_variant,
    reason = "messages are handled one at a time, where they are received"
)]
pub enum Content {
    /// It sent a message.
    Message(Message),
    /// It sent frames that are no message.
    Malformed(Malformed),
    /// Its connection was closed.
    Left,
}

/// Why a message could not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsent {
    /// The connection is closed.
    Gone,
    /// Too many messages wait for it.
    Full,
}

impl From<zmq::Error> for Unsent {
    fn from(error: zmq::Error) -> Self {
        if error == zmq::Error::EAGAIN {
            Self::Full
        } else {
            Self::Gone
        }
    }
}

/// The coordinator's end.
pub struct Listener {
    socket: zmq::Socket,
    /// Held while the socket listens.
    _allowlist: Option<Allowlist>,
    endpoint: String,
    /// Engine and connection of each other.
    engines: FxHashMap<PeerId, u32>,
    peers: FxHashMap<u32, PeerId>,
}

impl Listener {
    /// Listens. `keys` admit only peers on their list.
    pub fn bind(endpoint: &str, keys: Option<ServerKeys>) -> Result<Self, GroupProblem> {
        Self::try_bind(endpoint, keys).map_err(|error| socket_problem(endpoint, error))
    }

    fn try_bind(endpoint: &str, keys: Option<ServerKeys>) -> Result<Self, zmq::Error> {
        let context = zmq::Context::new();
        let mut socket = context.socket(zmq::ROUTER)?;
        configure(&mut socket)?;
        report_disconnects(&mut socket)?;
        socket.set_router_mandatory(true)?;
        if let Some(keys) = &keys {
            socket.set_curve_server(true)?;
            socket.set_curve_secretkey(&keys.secret)?;
        }
        let allowlist = keys.map(|keys| Allowlist::start(&context, keys.allowed));
        let allowlist = allowlist.transpose()?;
        socket.bind(endpoint)?;
        let bound = socket.get_last_endpoint()?;
        Ok(Self {
            socket,
            _allowlist: allowlist,
            endpoint: bound.unwrap_or_else(|_| endpoint.to_owned()),
            engines: FxHashMap::default(),
            peers: FxHashMap::default(),
        })
    }

    /// What the others dial.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// What wakes the engine.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        vec![self.socket.as_poll_item(zmq::POLLIN)]
    }

    /// The next thing that has come, if any; never blocks. What a connection sent comes before its end.
    pub fn receive(&self) -> Option<Received> {
        let mut peer = self.socket.recv_msg(zmq::DONTWAIT).ok()?;
        let frames = rest_of_message(&self.socket);
        let sender = match self.engines.get(&*peer) {
            Some(engine) => Sender::Engine(*engine),
            None => Sender::Unjoined(Connection {
                key_of: Allowlist::key_of(&mut peer),
                peer: peer.to_vec(),
            }),
        };
        let content = match plait_proto::decode(&frames) {
            _ if is_left(&frames) => Content::Left,
            Ok(message) => Content::Message(message),
            Err(malformed) => Content::Malformed(malformed),
        };
        Some(Received { sender, content })
    }

    /// From now on this connection is the engine's.
    pub fn register(&mut self, engine: u32, connection: Connection) {
        let peer = connection.peer;
        self.peers.insert(engine, peer.clone());
        self.engines.insert(peer, engine);
    }

    /// Whether an engine has joined.
    pub fn is_registered(&self, engine: u32) -> bool {
        self.peers.contains_key(&engine)
    }

    /// Sends to an engine. One that has not joined counts as gone.
    pub fn send(&self, engine: u32, frames: &[Vec<u8>]) -> Result<(), Unsent> {
        let peer = self.peers.get(&engine).ok_or(Unsent::Gone)?;
        self.send_to(peer, frames)
    }

    /// Sends through a connection.
    pub fn send_to(&self, peer: &PeerId, frames: &[Vec<u8>]) -> Result<(), Unsent> {
        let flags = zmq::DONTWAIT;
        self.socket.send(peer.as_slice(), flags | zmq::SNDMORE)?;
        let frames = frames.iter().map(Vec::as_slice);
        Ok(self.socket.send_multipart(frames, flags)?)
    }
}

/// How the link to the coordinator ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// It was closed.
    Closed,
    /// Its handshake failed.
    Unopened(HandshakeFailure),
}

/// Why a handshake failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeFailure {
    /// The other end hung up.
    HungUp {
        /// This end has CURVE keys.
        has_keys: bool,
    },
    /// A protocol error, with libzmq's number.
    Protocol(u32),
    /// The other end rejected this engine's key, with its status.
    Denied(u32),
}

impl HandshakeFailure {
    /// Decryption failed (`ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC`).
    const CRYPTOGRAPHIC: u32 = 0x1100_0001;
    /// One side has keys (`ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH`).
    const MECHANISM_MISMATCH: u32 = 0x1100_0002;

    /// The process's exit code. Settings are named only if they are the cause, for then a retry is no use.
    pub fn code(self) -> ExitCode {
        match self {
            Self::HungUp { .. } => ExitCode::RankLost,
            Self::Protocol(_) | Self::Denied(_) => ExitCode::Settings,
        }
    }
}

impl fmt::Display for HandshakeFailure {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HungUp { has_keys: false } => to.write_str(
                "it hung up during the handshake; it ended, or is not an engine of a group",
            ),
            Self::HungUp { has_keys: true } => to.write_str(
                "it hung up during the handshake; it ended, or is not an engine of a group, or its CURVE key is not \
                 the one that was given here",
            ),
            Self::Denied(status) => write!(
                to,
                "it refused this engine's CURVE key ({status}): put the public key on its list"
            ),
            Self::Protocol(Self::CRYPTOGRAPHIC) => {
                to.write_str("its CURVE key is not the one that was given here")
            }
            Self::Protocol(Self::MECHANISM_MISMATCH) => {
                to.write_str("one of the two has CURVE keys and the other has none")
            }
            Self::Protocol(number) => write!(to, "the handshake failed (libzmq's {number:#010x})"),
        }
    }
}

/// A dialling engine's end.
pub struct Dialler {
    // Closed before the socket that it watches.
    watch: Watch,
    socket: zmq::Socket,
    has_keys: bool,
}

impl Dialler {
    /// Dials until the coordinator listens; returns at once.
    pub fn dial(endpoint: &str, keys: Option<&ClientKeys>) -> Result<Self, GroupProblem> {
        Self::try_dial(endpoint, keys).map_err(|error| socket_problem(endpoint, error))
    }

    fn try_dial(endpoint: &str, keys: Option<&ClientKeys>) -> Result<Self, zmq::Error> {
        let context = zmq::Context::new();
        let mut socket = context.socket(zmq::DEALER)?;
        configure(&mut socket)?;
        if let Some(keys) = keys {
            socket.set_curve_serverkey(&keys.server)?;
            socket.set_curve_publickey(&keys.public)?;
            socket.set_curve_secretkey(&keys.secret)?;
        }
        let watched = [
            SocketEvent::DISCONNECTED,
            SocketEvent::HANDSHAKE_FAILED_NO_DETAIL,
            SocketEvent::HANDSHAKE_FAILED_PROTOCOL,
            SocketEvent::HANDSHAKE_FAILED_AUTH,
        ];
        let watch = Watch::new(&context, &socket, &watched)?;
        socket.connect(endpoint)?;
        Ok(Self {
            watch,
            socket,
            has_keys: keys.is_some(),
        })
    }

    /// What wakes the engine.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        [&self.socket, &self.watch.events]
            .map(|socket| socket.as_poll_item(zmq::POLLIN))
            .into()
    }

    /// How the link has broken since the last call; the most specific reason wins.
    pub fn broken(&self) -> Option<Broken> {
        let has_keys = self.has_keys;
        self.watch
            .take()
            .map(|(event, value)| match event {
                SocketEvent::DISCONNECTED => Broken::Closed,
                SocketEvent::HANDSHAKE_FAILED_NO_DETAIL => {
                    Broken::Unopened(HandshakeFailure::HungUp { has_keys })
                }
                SocketEvent::HANDSHAKE_FAILED_AUTH => {
                    Broken::Unopened(HandshakeFailure::Denied(value))
                }
                _ => Broken::Unopened(HandshakeFailure::Protocol(value)),
            })
            .reduce(|first, next| if first == Broken::Closed { next } else { first })
    }

    /// The next message that has come, if any; never blocks.
    pub fn receive(&self) -> Option<Result<Message, Malformed>> {
        let first = next_frame(&self.socket)?;
        let mut frames = vec![first];
        frames.extend(rest_of_message(&self.socket));
        Some(plait_proto::decode(&frames))
    }

    /// Sends to the coordinator.
    pub fn send(&self, message: &Message) -> Result<(), Unsent> {
        let frames = plait_proto::encode(message);
        Ok(self.socket.send_multipart(frames, zmq::DONTWAIT)?)
    }

    /// Stops watching the link.
    pub fn stop_watching(&self) {
        self.watch.stop(&self.socket);
    }
}

impl Drop for Dialler {
    fn drop(&mut self) {
        self.stop_watching();
    }
}

fn configure(socket: &mut zmq::Socket) -> Result<(), zmq::Error> {
    socket.set_linger(LINGER_MILLIS)?;
    socket.set_sndhwm(HIGH_WATER_MARK)?;
    socket.set_rcvhwm(HIGH_WATER_MARK)?;
    socket.set_ipv6(true)?;
    close_half_open(socket)?;
    socket.set_maxmsgsize(MAX_MESSAGE_BYTES)
}

/// Connection events of a socket.
struct Watch {
    events: zmq::Socket,
}

/// Events handled in one pass of the event loop.
const MAX_EVENTS_A_PASS: usize = 256;

impl Watch {
    fn new(
        context: &zmq::Context,
        socket: &zmq::Socket,
        watched: &[SocketEvent],
    ) -> Result<Self, zmq::Error> {
        const ENDPOINT: &str = "inproc://watch";
        let mask = watched.iter().map(|event| i32::from(event.to_raw()));
        socket.monitor(ENDPOINT, mask.sum())?;
        let events = context.socket(zmq::PAIR)?;
        events.set_linger(0)?;
        // A full event queue would block libzmq's I/O thread.
        events.set_rcvhwm(0)?;
        events.connect(ENDPOINT)?;
        Ok(Self { events })
    }

    /// The events that have come, each with its value.
    fn take(&self) -> impl Iterator<Item = (SocketEvent, u32)> {
        let next = || {
            let frames = self.events.recv_multipart(zmq::DONTWAIT).ok()?;
            let (event, value) = frames.first()?.split_first_chunk()?;
            let event = SocketEvent::from_raw(u16::from_ne_bytes(*event));
            Some((event, u32::from_ne_bytes(*value.first_chunk()?)))
        };
        std::iter::from_fn(next).take(MAX_EVENTS_A_PASS)
    }

    /// Ends the socket's events.
    fn stop(&self, socket: &zmq::Socket) {
        // An error means that the socket is not watched.
        let _unwatched = socket.monitor("inproc://nobody", 0);
    }
}

fn socket_problem(endpoint: &str, error: zmq::Error) -> GroupProblem {
    GroupProblem::Socket {
        endpoint: endpoint.to_owned(),
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use plait_proto::Heartbeat;

    use super::*;

    /// A listener, and a connection that sends `word` and reads nothing.
    fn connected() -> (tempfile::TempDir, Listener, Connection, zmq::Socket) {
        let directory = tempfile::tempdir().unwrap();
        let endpoint = format!("ipc://{}", directory.path().join("group").display());
        let listener = Listener::bind(&endpoint, None).unwrap();
        let socket = zmq::Context::new().socket(zmq::DEALER).unwrap();
        socket.set_rcvhwm(1).unwrap();
        socket.set_linger(0).unwrap();
        socket.connect(&endpoint).unwrap();
        socket.send("a word", 0).unwrap();
        zmq::poll(&mut listener.poll_items(), 60_000).unwrap();
        let connection = sender_of(&listener);
        (directory, listener, connection, socket)
    }

    fn sender_of(listener: &Listener) -> Connection {
        match listener.receive().unwrap().sender {
            Sender::Unjoined(connection) => connection,
            Sender::Engine(engine) => panic!("engine {engine} has joined"),
        }
    }

    #[test]
    fn who_reads_nothing_is_not_gone() {
        let (_directory, mut listener, connection, socket) = connected();
        assert_eq!(
            listener.send(1, &[]),
            Err(Unsent::Gone),
            "nobody sits there"
        );
        listener.register(1, connection);
        let heartbeat = plait_proto::encode(&Heartbeat { rank: 0, step: 0 }.into());
        let unsent = (0..1_000_000).find_map(|_| listener.send(1, &heartbeat).err());
        assert_eq!(unsent, Some(Unsent::Full));
        drop(socket);
    }

    /// What comes next.
    fn content(listener: &Listener) -> Content {
        zmq::poll(&mut listener.poll_items(), 60_000).unwrap();
        listener.receive().unwrap().content
    }

    #[test]
    fn a_message_over_the_cap_is_dropped_with_its_sender() {
        let parts = vec![vec![0; 4 << 10]; 17];
        for frames in [vec![vec![0; (64 << 10) + 1]], parts] {
            let (_directory, listener, _, socket) = connected();
            socket.send_multipart(frames, 0).unwrap();
            assert!(matches!(content(&listener), Content::Left));
            assert!(listener.receive().is_none());
        }
    }

    #[test]
    fn who_leaves_is_named() {
        let (_directory, mut listener, connection, socket) = connected();
        listener.register(1, connection);
        drop(socket);
        zmq::poll(&mut listener.poll_items(), 60_000).unwrap();
        let Received { sender, content } = listener.receive().unwrap();
        assert!(matches!(
            (sender, content),
            (Sender::Engine(1), Content::Left)
        ));
    }

    #[test]
    fn a_stranger_who_hangs_up_before_the_handshake_leaves_nothing_to_read() {
        let (_directory, listener, _, socket) = connected();
        let path = listener.endpoint().strip_prefix("ipc://").unwrap();
        for _ in 0..1000 {
            drop(std::os::unix::net::UnixStream::connect(path).unwrap());
        }
        socket.send("another word", 0).unwrap();
        assert!(
            matches!(content(&listener), Content::Malformed(_)),
            "the word comes next"
        );
        assert!(listener.receive().is_none());
    }

    #[test]
    fn links_between_machines_are_probed() {
        let listener = Listener::bind("tcp://127.0.0.1:*", None).unwrap();
        let dialler = Dialler::dial(listener.endpoint(), None).unwrap();
        dialler
            .send(&Heartbeat { rank: 0, step: 0 }.into())
            .unwrap();
        zmq::poll(&mut listener.poll_items(), 60_000).unwrap();
        let (_, port) = listener.endpoint().rsplit_once(':').unwrap();
        let port = format!(":{:04X}", port.parse::<u16>().unwrap());
        for _ in 0..1000 {
            if timers(&port) == ["02", "02"] {
                return;
            }
            zmq::poll(&mut [], 5).unwrap();
        }
        panic!("not both ends keep alive: {:?}", timers(&port));
    }

    /// Which timer runs for each end of a connection: 02 is that of keepalive.
    fn timers(port: &str) -> Vec<String> {
        let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
        let timer = |line: &str| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_ours = fields[1].ends_with(port) || fields[2].ends_with(port);
            let is_established = fields[3] == "01";
            (is_ours && is_established).then(|| fields[5][..2].to_owned())
        };
        let lines = tables
            .iter()
            .flatten()
            .flat_map(|table| table.lines().skip(1));
        lines.filter_map(timer).collect()
    }
}
