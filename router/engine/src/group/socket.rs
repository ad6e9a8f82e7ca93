//! The two ends of the link between engines.

use plait_proto::{MAX_FRAME_BYTES, Malformed, Message};
use zmq::SocketEvent;

use crate::frames::{next_frame, rest_of_message};

use super::allowlist::Allowlist;
use super::settings::{ClientKeys, GroupProblem, ServerKeys};

/// Messages that wait for one peer at most. A round has one vote of each replica; a peer that has not
/// read those of several rounds has stopped reading.
const HIGH_WATER_MARK: i32 = 4096;
/// How long a closing engine's last words may take to leave.
const LINGER_MILLIS: i32 = 500;

/// What was dropped, by why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Strays {
    /// Messages of somebody who is no engine of this group.
    pub num_strangers: u64,
    /// Frames that are no message.
    pub num_malformed: u64,
    /// Votes on a step, or verdicts, that are out already.
    pub num_late: u64,
    /// Votes of a replica that had voted.
    pub num_repeated: u64,
    /// Anything else that nobody asked for.
    pub num_unasked: u64,
}

/// What a peer sent.
pub enum Received {
    /// A message of this engine.
    Message(u32, Message),
    /// Frames of this engine that are no message.
    Malformed(u32, Malformed),
    /// Something from a peer that is no engine of the group.
    Stranger,
}

/// The first engine's end.
pub struct Listener {
    socket: zmq::Socket,
    monitor: zmq::Socket,
    allowlist: Option<Allowlist>,
    endpoint: String,
}

impl Listener {
    /// Listens; `keys` shut out everybody who is not on their list.
    pub fn bind(endpoint: &str, keys: Option<ServerKeys>) -> Result<Self, GroupProblem> {
        Self::try_bind(endpoint, keys).map_err(|error| problem(endpoint, error))
    }

    fn try_bind(endpoint: &str, keys: Option<ServerKeys>) -> Result<Self, zmq::Error> {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::ROUTER)?;
        configure(&socket)?;
        socket.set_router_mandatory(true)?;
        if let Some(keys) = &keys {
            socket.set_curve_server(true)?;
            socket.set_curve_secretkey(&keys.secret)?;
        }
        let allowlist = keys.map(|keys| Allowlist::new(&context, keys.allowed));
        let allowlist = allowlist.transpose()?;
        let monitor = monitor(&context, &socket, &[SocketEvent::DISCONNECTED])?;
        socket.bind(endpoint)?;
        let bound = socket.get_last_endpoint()?;
        Ok(Self {
            socket,
            monitor,
            allowlist,
            endpoint: bound.unwrap_or_else(|_| endpoint.to_owned()),
        })
    }

    /// What the others dial.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// What wakes the engine.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        let asked = self.allowlist.as_ref().map(Allowlist::socket);
        let sockets = [&self.socket, &self.monitor].into_iter().chain(asked);
        sockets
            .map(|socket| socket.as_poll_item(zmq::POLLIN))
            .collect()
    }

    /// Whether somebody's connection was closed since the last call.
    pub fn has_lost_somebody(&self) -> bool {
        events(&self.monitor).count() > 0
    }

    /// The next message that has come, if any; never blocks.
    pub fn receive(&self) -> Option<Received> {
        if let Some(allowlist) = &self.allowlist {
            allowlist.answer();
        }
        let peer = next_frame(&self.socket)?;
        let frames = rest_of_message(&self.socket);
        let Some(engine) = engine_of(&peer) else {
            return Some(Received::Stranger);
        };
        Some(match plait_proto::decode(&frames) {
            Ok(message) => Received::Message(engine, message),
            Err(malformed) => Received::Malformed(engine, malformed),
        })
    }

    /// Sends to one engine; an error means that it is gone or has stopped reading.
    pub fn send(&self, engine: u32, frames: &[Vec<u8>]) -> Result<(), zmq::Error> {
        let flags = zmq::DONTWAIT;
        self.socket
            .send(routing_id(engine).as_bytes(), flags | zmq::SNDMORE)?;
        let frames = frames.iter().map(Vec::as_slice);
        self.socket.send_multipart(frames, flags)
    }
}

/// What became of the link to the first engine.
///
/// Ordered by how much it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Broken {
    /// It was closed.
    Closed,
    /// It was closed before the two understood each other.
    Unopened,
    /// The other end has other keys, or wants some.
    Keys,
}

/// A dialling engine's end.
pub struct Dialler {
    socket: zmq::Socket,
    monitor: zmq::Socket,
}

impl Dialler {
    /// Dials, again and again until somebody listens; returns at once.
    pub fn dial(
        engine: u32,
        endpoint: &str,
        keys: Option<&ClientKeys>,
    ) -> Result<Self, GroupProblem> {
        Self::try_dial(engine, endpoint, keys).map_err(|error| problem(endpoint, error))
    }

    fn try_dial(
        engine: u32,
        endpoint: &str,
        keys: Option<&ClientKeys>,
    ) -> Result<Self, zmq::Error> {
        let context = zmq::Context::new();
        let socket = context.socket(zmq::DEALER)?;
        configure(&socket)?;
        socket.set_identity(routing_id(engine).as_bytes())?;
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
        let monitor = monitor(&context, &socket, &watched)?;
        socket.connect(endpoint)?;
        Ok(Self { socket, monitor })
    }

    /// What wakes the engine.
    pub fn poll_items(&self) -> Vec<zmq::PollItem<'_>> {
        [&self.socket, &self.monitor]
            .map(|socket| socket.as_poll_item(zmq::POLLIN))
            .into()
    }

    /// What has become of the link since the last call.
    pub fn broken(&self) -> Option<Broken> {
        let kinds = events(&self.monitor).map(|event| match event {
            SocketEvent::DISCONNECTED => Broken::Closed,
            SocketEvent::HANDSHAKE_FAILED_NO_DETAIL => Broken::Unopened,
            _ => Broken::Keys,
        });
        kinds.max()
    }

    /// The next message that has come, if any; never blocks.
    pub fn receive(&self) -> Option<Result<Message, Malformed>> {
        let first = next_frame(&self.socket)?;
        let mut frames = vec![first];
        frames.extend(rest_of_message(&self.socket));
        Some(plait_proto::decode(&frames))
    }

    /// Sends to the first engine; an error means that it has stopped reading.
    pub fn send(&self, message: &Message) -> Result<(), zmq::Error> {
        self.socket
            .send_multipart(plait_proto::encode(message), zmq::DONTWAIT)
    }
}

fn configure(socket: &zmq::Socket) -> Result<(), zmq::Error> {
    socket.set_linger(LINGER_MILLIS)?;
    socket.set_sndhwm(HIGH_WATER_MARK)?;
    socket.set_rcvhwm(HIGH_WATER_MARK)?;
    socket.set_maxmsgsize(i64::try_from(MAX_FRAME_BYTES).expect("the cap is 16 MiB"))
}

/// A socket that tells what happens to the connections of `socket`.
fn monitor(
    context: &zmq::Context,
    socket: &zmq::Socket,
    watched: &[SocketEvent],
) -> Result<zmq::Socket, zmq::Error> {
    const ENDPOINT: &str = "inproc://monitor";
    let mask = watched.iter().map(|event| i32::from(event.to_raw()));
    socket.monitor(ENDPOINT, mask.sum())?;
    let monitor = context.socket(zmq::PAIR)?;
    monitor.set_linger(0)?;
    monitor.connect(ENDPOINT)?;
    Ok(monitor)
}

/// The events that have come.
fn events(monitor: &zmq::Socket) -> impl Iterator<Item = SocketEvent> {
    std::iter::from_fn(|| {
        let frames = monitor.recv_multipart(zmq::DONTWAIT).ok()?;
        let event = frames.first()?.first_chunk().copied()?;
        Some(SocketEvent::from_raw(u16::from_ne_bytes(event)))
    })
}

fn problem(endpoint: &str, error: zmq::Error) -> GroupProblem {
    GroupProblem::Socket {
        endpoint: endpoint.to_owned(),
        reason: error.to_string(),
    }
}

fn routing_id(engine: u32) -> String {
    format!("engine-{engine}")
}

/// The engine in a routing id, written as [`routing_id`] writes it.
fn engine_of(routing_id: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(routing_id).ok()?;
    let digits = digits.strip_prefix("engine-")?;
    let engine: u32 = digits.parse().ok()?;
    (engine.to_string() == digits).then_some(engine)
}
