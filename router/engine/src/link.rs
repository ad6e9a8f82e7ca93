//! The engine's end of the wire: a ROUTER socket that the ranks of a replica dial, and one for ranks on other hosts.

use std::path::Path;
use std::time::Duration;

use plait_proto::{Frames, MAX_FRAMES, MAX_MESSAGE_BYTES, Malformed, Message};

use crate::rank_range::RankRange;
use crate::receive_frames::{next_frame, rest_of_message};
use crate::remote_link::{FromRemote, RemoteLink};
use crate::remote_workers::{RemoteHosts, RemoteProblem};
use crate::wakeup::Wakeup;

/// Messages that wait in a socket for one peer at most. Two plans are in flight, so only a peer that
/// has stopped reading gets there.
const HIGH_WATER_MARK: i32 = 256;
/// Bytes of a message at most. libzmq counts 64 for a frame that has fewer.
const MAX_QUEUED_BYTES: usize = MAX_MESSAGE_BYTES + 64 * MAX_FRAMES;
/// How long a send may wait for a peer that has stopped reading.
const SEND_TIMEOUT_MILLIS: i32 = 1000;
/// Longest name of a Unix socket (108 bytes with its end).
const MAX_IPC_PATH_BYTES: usize = 107;

/// Why the link cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The run directory's name is too long for a Unix socket.
    #[error(
        "the socket's path {path} has {bytes} bytes; {MAX_IPC_PATH_BYTES} are allowed: choose a shorter directory"
    )]
    PathTooLong {
        /// The path.
        path: String,
        /// Its length.
        bytes: usize,
    },
    /// ZeroMQ refused.
    #[error("cannot listen on {endpoint}: {reason}")]
    Bind {
        /// Where.
        endpoint: String,
        /// ZeroMQ's message.
        reason: String,
    },
    /// Ranks on other hosts that the settings do not fit.
    #[error(transparent)]
    Remote(#[from] RemoteProblem),
}

/// What a peer sent.
#[expect(
    clippy::large_enum_variant,
    reason = "messages are handled one at a time, where they are received"
)]
#[derive(Debug)]
pub enum Received {
    /// A message of this rank.
    Message(u32, Message),
    /// Frames of this rank that are no message.
    Malformed(u32, Malformed),
    /// The connection of this rank, which is on another host, was closed.
    Left(u32),
    /// Something from a peer that is no rank of this replica.
    UnknownPeer,
}

// A socket has nothing to show.
impl std::fmt::Debug for Link {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str(&self.endpoint)
    }
}

/// The sockets that workers dial; only the driver's thread uses them once they are bound.
pub struct Link {
    socket: zmq::Socket,
    endpoint: String,
    ranks: RankRange,
    remote: Option<RemoteLink>,
}

impl Link {
    /// Listens in `run_dir` for these ranks, on a socket of that name, and for those on other hosts.
    pub fn bind(
        run_dir: &Path,
        name: &str,
        ranks: RankRange,
        remote: Option<RemoteHosts>,
    ) -> Result<Self, LinkError> {
        let path = run_dir.join(name).display().to_string();
        if path.len() > MAX_IPC_PATH_BYTES {
            return Err(LinkError::PathTooLong {
                bytes: path.len(),
                path,
            });
        }
        let endpoint = format!("ipc://{path}");
        let socket = listen(&endpoint).map_err(|error| bind_error(&endpoint, error))?;
        let remote = remote.map(|remote| {
            listen_for_hosts(&remote).map_err(|error| bind_error(&remote.endpoint, error))
        });
        Ok(Self {
            socket,
            endpoint,
            ranks,
            remote: remote.transpose()?,
        })
    }

    /// What workers of this host dial, and those of other hosts if there are any.
    pub fn endpoints(&self) -> (String, Option<String>) {
        let remote = self.remote.as_ref();
        let remote = remote.map(|remote| remote.endpoint().to_owned());
        (self.endpoint.clone(), remote)
    }

    /// Blocks until a message comes, `wakeup` is signalled, one of `others` is readable or `timeout` has
    /// passed (None: no limit).
    pub fn wait(&self, wakeup: &Wakeup, others: Vec<zmq::PollItem<'_>>, timeout: Option<Duration>) {
        // Rounded up: rounding down would spin through the last millisecond.
        let millis = timeout.map_or(-1, |timeout| {
            i64::try_from(timeout.as_micros().div_ceil(1000)).expect("deadlines are minutes away")
        });
        let mut items = vec![
            zmq::PollItem::from_fd(wakeup.fd(), zmq::POLLIN),
            self.socket.as_poll_item(zmq::POLLIN),
        ];
        let remote = self.remote.as_ref();
        items.extend(remote.map(|remote| remote.socket().as_poll_item(zmq::POLLIN)));
        items.extend(others);
        match zmq::poll(&mut items, millis) {
            Ok(_) | Err(zmq::Error::EINTR) => {}
            Err(error) => panic!("polling two valid descriptors failed: {error}"),
        }
        if items[0].is_readable() {
            wakeup.clear();
        }
    }

    /// The next message that has come, if any; never blocks.
    pub fn receive(&mut self) -> Option<Received> {
        self.receive_here().or_else(|| self.receive_remote())
    }

    fn receive_here(&self) -> Option<Received> {
        let peer = next_frame(&self.socket)?;
        let frames = rest_of_message(&self.socket);
        let rank = rank_of(&peer).filter(|rank| self.is_here(*rank));
        Some(rank.map_or(Received::UnknownPeer, |rank| decoded(rank, &frames)))
    }

    fn receive_remote(&mut self) -> Option<Received> {
        Some(match self.remote.as_mut()?.receive(rank_of)? {
            FromRemote::Frames(rank, frames) => decoded(rank, &frames),
            FromRemote::Left(rank) => Received::Left(rank),
            FromRemote::UnknownPeer => Received::UnknownPeer,
        })
    }

    /// Whether the rank is on another host.
    pub fn is_remote(&self, rank: u32) -> bool {
        self.remote.as_ref().is_some_and(|remote| remote.has(rank))
    }

    /// Whether it is a rank of this replica, on this host.
    fn is_here(&self, rank: u32) -> bool {
        self.ranks.place(rank).is_some() && !self.is_remote(rank)
    }

    /// Sends to one rank; an error means that it is gone or has stopped reading.
    pub fn send<F: AsRef<[u8]>>(&self, rank: u32, frames: &[F]) -> Result<(), zmq::Error> {
        let remote = self.remote.as_ref().filter(|remote| remote.has(rank));
        let socket = remote.map_or(&self.socket, RemoteLink::socket);
        socket.send(routing_id(rank).as_bytes(), zmq::SNDMORE)?;
        socket.send_multipart(frames.iter().map(AsRef::as_ref), 0)
    }

    /// Sends the same frames to all ranks; an error names the rank that is gone.
    pub fn send_all<F: AsRef<[u8]>>(&self, frames: &[F]) -> Result<(), (u32, zmq::Error)> {
        self.ranks
            .iter()
            .try_for_each(|rank| self.send(rank, frames).map_err(|error| (rank, error)))
    }
}

fn decoded(rank: u32, frames: &Frames) -> Received {
    match plait_proto::decode(frames) {
        Ok(message) => Received::Message(rank, message),
        Err(malformed) => Received::Malformed(rank, malformed),
    }
}

fn bind_error(endpoint: &str, error: zmq::Error) -> LinkError {
    LinkError::Bind {
        endpoint: endpoint.to_owned(),
        reason: error.to_string(),
    }
}

fn listen(endpoint: &str) -> Result<zmq::Socket, zmq::Error> {
    let socket = router(&zmq::Context::new())?;
    socket.bind(endpoint)?;
    Ok(socket)
}

fn listen_for_hosts(remote: &RemoteHosts) -> Result<RemoteLink, zmq::Error> {
    let context = zmq::Context::new();
    let socket = router(&context)?;
    RemoteLink::bind(&context, socket, remote)
}

fn router(context: &zmq::Context) -> Result<zmq::Socket, zmq::Error> {
    let socket = context.socket(zmq::ROUTER)?;
    socket.set_linger(0)?;
    socket.set_router_mandatory(true)?;
    socket.set_sndtimeo(SEND_TIMEOUT_MILLIS)?;
    socket.set_sndhwm(HIGH_WATER_MARK)?;
    socket.set_rcvhwm(HIGH_WATER_MARK)?;
    socket.set_maxmsgsize(i64::try_from(MAX_QUEUED_BYTES).expect("the cap is 32 MiB"))?;
    Ok(socket)
}

fn routing_id(rank: u32) -> String {
    format!("rank-{rank}")
}

/// The rank in a routing id, written as [`routing_id`] writes it.
fn rank_of(routing_id: &[u8]) -> Option<u32> {
    let digits = std::str::from_utf8(routing_id)
        .ok()?
        .strip_prefix("rank-")?;
    let rank: u32 = digits.parse().ok()?;
    (rank.to_string() == digits).then_some(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> RankRange {
        RankRange::of_replica(0, 1, 1)
    }

    #[test]
    fn a_routing_id_names_its_rank() {
        assert_eq!(rank_of(routing_id(12).as_bytes()), Some(12));
    }

    #[test]
    fn other_routing_ids_name_no_rank() {
        for id in [
            &b"rank-"[..],
            b"rank-01",
            b"rank-+1",
            b"rank-x",
            b"\x00\x80\x12\x34\x56",
            b"Rank-1",
        ] {
            assert_eq!(rank_of(id), None, "{id:?}");
        }
    }

    #[test]
    fn a_long_run_directory_is_refused_with_its_length() {
        let error = Link::bind(
            Path::new(&format!("/tmp/{}", "x".repeat(120))),
            "link",
            one(),
            None,
        )
        .err()
        .unwrap();
        assert!(
            error.to_string().contains("130 bytes; 107 are allowed"),
            "{error}"
        );
    }

    #[test]
    fn a_missing_run_directory_is_an_error_with_the_endpoint() {
        let error = Link::bind(
            Path::new("/tmp/plait-no-such-directory"),
            "link",
            one(),
            None,
        )
        .err()
        .unwrap();
        assert!(
            error
                .to_string()
                .contains("ipc:///tmp/plait-no-such-directory/link"),
            "{error}"
        );
    }
}
