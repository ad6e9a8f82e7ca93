//! The engine's end of the wire to ranks on other hosts: TCP with CURVE. Only listed keys connect, each as its own ranks.

use plait_proto::Frames;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::allowlist::Allowlist;
use crate::receive_frames::rest_of_message;
use crate::remote_workers::RemoteHosts;
use crate::socket_options::{close_half_open, is_left, report_disconnects};

/// What came from another host.
pub enum FromRemote {
    /// Frames of this rank.
    Frames(u32, Frames),
    /// This rank's connection was closed.
    Left(u32),
    /// Something from a peer that is none of the ranks that its key speaks for.
    UnknownPeer,
}

/// The socket that ranks on other hosts dial.
pub struct RemoteLink {
    socket: zmq::Socket,
    /// Held while the socket listens.
    _allowlist: Allowlist,
    endpoint: String,
    /// The host whose key speaks for each rank, counted from 1.
    hosts: FxHashMap<u32, u32>,
    /// Ranks that have sent something through a connection that is open.
    connected: FxHashSet<u32>,
}

impl RemoteLink {
    /// Listens on `socket`, which has the options of all links.
    pub fn bind(
        context: &zmq::Context,
        mut socket: zmq::Socket,
        remote: &RemoteHosts,
    ) -> Result<Self, zmq::Error> {
        socket.set_ipv6(true)?;
        socket.set_curve_server(true)?;
        socket.set_curve_secretkey(&remote.secret)?;
        report_disconnects(&mut socket)?;
        close_half_open(&mut socket)?;
        let keys = remote.hosts.iter().map(|(key, _)| *key).collect();
        let allowlist = Allowlist::start(context, keys)?;
        socket.bind(&remote.endpoint)?;
        let bound = socket.get_last_endpoint()?;
        let hosts = (1..).zip(&remote.hosts);
        Ok(Self {
            socket,
            _allowlist: allowlist,
            endpoint: bound.unwrap_or_else(|_| remote.endpoint.clone()),
            hosts: hosts
                .flat_map(|(host, (_, ranks))| ranks.iter().map(move |rank| (*rank, host)))
                .collect(),
            connected: FxHashSet::default(),
        })
    }

    /// What the ranks dial.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Whether the rank is on another host.
    pub fn has(&self, rank: u32) -> bool {
        self.hosts.contains_key(&rank)
    }

    /// What is polled and sent through.
    pub fn socket(&self) -> &zmq::Socket {
        &self.socket
    }

    /// The next thing that has come, if any; never blocks. What a connection sent comes before its end.
    pub fn receive(&mut self, rank_of: impl Fn(&[u8]) -> Option<u32>) -> Option<FromRemote> {
        let mut peer = self.socket.recv_msg(zmq::DONTWAIT).ok()?;
        let frames = rest_of_message(&self.socket);
        let rank = rank_of(&peer);
        if is_left(&frames) {
            // The end of a connection comes without its key.
            let left = rank.filter(|rank| self.connected.remove(rank));
            return Some(left.map_or(FromRemote::UnknownPeer, FromRemote::Left));
        }
        let host = Allowlist::key_of(&mut peer);
        let is_own = |rank: &u32| host.is_some() && self.hosts.get(rank).copied() == host;
        let Some(rank) = rank.filter(is_own) else {
            return Some(FromRemote::UnknownPeer);
        };
        self.connected.insert(rank);
        Some(FromRemote::Frames(rank, frames))
    }
}
