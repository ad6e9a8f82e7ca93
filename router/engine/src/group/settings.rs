//! Who is in a group, where they meet, and how long they wait for each other.

use std::ops::Range;
use std::time::Duration;

use plait_proto::Fingerprint;

/// A CURVE key.
pub type Key = [u8; 32];

/// Engines, and replicas, of one group at most.
const MAX_REPLICAS: u32 = 1024;

/// Where this engine sits in its group.
#[derive(Clone)]
pub enum Seat {
    /// The group has no other engine.
    Alone,
    /// Engine 0, which listens.
    First {
        /// A ZeroMQ address; `tcp://HOST:*` takes a free port.
        endpoint: String,
        /// Needed where others than this machine's processes could connect.
        keys: Option<ServerKeys>,
    },
    /// One that dials.
    Member {
        /// Which engine of the group, from 1.
        engine: u32,
        /// Where the first one listens.
        endpoint: String,
        /// Needed where the first one has some.
        keys: Option<ClientKeys>,
    },
}

/// The first engine's CURVE keys.
#[derive(Clone)]
pub struct ServerKeys {
    /// Its own.
    pub secret: Key,
    /// Public keys of those that may join; without the list, knowing the server's key would do.
    pub allowed: Vec<Key>,
}

/// A dialling engine's CURVE keys.
#[derive(Clone)]
pub struct ClientKeys {
    /// The first engine's public key.
    pub server: Key,
    /// Its own.
    pub public: Key,
    /// Its own.
    pub secret: Key,
}

/// How long engines wait for each other.
#[derive(Clone, Copy, Debug)]
pub struct GroupPatience {
    /// For the others' first votes, from the start: they load their models.
    pub join: Duration,
    /// For the last vote of a round, from its first,
    pub vote: Duration,
    /// and this much for each token of the step before, which the late one may still compute.
    pub vote_token: Duration,
}

impl Default for GroupPatience {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(1800),
            vote: Duration::from_secs(60),
            vote_token: Duration::from_millis(100),
        }
    }
}

/// What an engine knows of its group.
#[derive(Clone)]
pub struct GroupSettings {
    /// Where it sits.
    pub seat: Seat,
    /// Replicas of each engine; they are numbered in this order.
    pub num_replicas: Vec<u32>,
    /// Of everything that all engines must have alike.
    pub config: Fingerprint,
    /// Sizes in tokens for which every replica has captured a graph.
    pub graph_buckets: Vec<u32>,
    /// For the others.
    pub patience: GroupPatience,
}

/// What is wrong with a group's settings, or its socket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupProblem {
    /// Not a group.
    #[error(
        "a group has 1 to {MAX_REPLICAS} replicas and each of its engines at least one; {given:?} were given, engine by engine"
    )]
    Replicas {
        /// Replicas of each engine.
        given: Vec<u32>,
    },
    /// The seat is none of the group's.
    #[error("engine {engine} has no seat in a group of {num_engines}")]
    Seat {
        /// Which.
        engine: u32,
        /// Engines of the group.
        num_engines: usize,
    },
    /// Anyone could vote.
    #[error(
        "{endpoint} can be reached from other machines: engines meet there with CURVE keys only"
    )]
    Unprotected {
        /// Where.
        endpoint: String,
    },
    /// ZeroMQ refused.
    #[error("cannot meet the group at {endpoint}: {reason}")]
    Socket {
        /// Where.
        endpoint: String,
        /// In ZeroMQ's words.
        reason: String,
    },
}

impl GroupSettings {
    /// Which engine of the group this is.
    pub fn engine(&self) -> u32 {
        match self.seat {
            Seat::Alone | Seat::First { .. } => 0,
            Seat::Member { engine, .. } => engine,
        }
    }

    /// Engines of the group.
    pub fn num_engines(&self) -> u32 {
        u32::try_from(self.num_replicas.len()).expect("the number of engines was checked")
    }

    /// Replicas of the whole group.
    pub fn num_replicas(&self) -> u32 {
        self.num_replicas.iter().sum()
    }

    /// The replicas of one engine.
    pub fn replicas_of(&self, engine: u32) -> Range<u32> {
        let (before, rest) = self.num_replicas.split_at(engine as usize);
        let first = before.iter().sum();
        first..first + rest[0]
    }

    /// The engine that owns a replica of the group.
    pub fn engine_of(&self, replica: u32) -> u32 {
        (0..self.num_engines())
            .find(|engine| self.replicas_of(*engine).contains(&replica))
            .expect("the replica is one of the group's")
    }

    pub(super) fn check(&self) -> Result<(), GroupProblem> {
        let total: u64 = self.num_replicas.iter().map(|num| u64::from(*num)).sum();
        if self.num_replicas.contains(&0) || !(1..=u64::from(MAX_REPLICAS)).contains(&total) {
            return Err(GroupProblem::Replicas {
                given: self.num_replicas.clone(),
            });
        }
        self.check_seat()?;
        self.check_protection()
    }

    fn check_seat(&self) -> Result<(), GroupProblem> {
        let (engine, num_engines) = (self.engine(), self.num_replicas.len());
        let has_seat = match self.seat {
            Seat::Alone => num_engines == 1,
            Seat::First { .. } => num_engines > 1,
            Seat::Member { engine, .. } => (1..num_engines).contains(&(engine as usize)),
        };
        has_seat.then_some(()).ok_or(GroupProblem::Seat {
            engine,
            num_engines,
        })
    }

    fn check_protection(&self) -> Result<(), GroupProblem> {
        let (endpoint, has_keys) = match &self.seat {
            Seat::Alone => return Ok(()),
            Seat::First { endpoint, keys } => (endpoint, keys.is_some()),
            Seat::Member { endpoint, keys, .. } => (endpoint, keys.is_some()),
        };
        (has_keys || stays_here(endpoint))
            .then_some(())
            .ok_or_else(|| GroupProblem::Unprotected {
                endpoint: endpoint.clone(),
            })
    }
}

/// Only processes of this machine can be at the other end.
fn stays_here(endpoint: &str) -> bool {
    let Some(address) = endpoint.strip_prefix("tcp://") else {
        return endpoint.starts_with("ipc://");
    };
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.parse::<std::net::IpAddr>()
        .is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(seat: Seat, num_replicas: &[u32]) -> GroupSettings {
        GroupSettings {
            seat,
            num_replicas: num_replicas.to_vec(),
            config: [0; 16],
            graph_buckets: Vec::new(),
            patience: GroupPatience::default(),
        }
    }

    fn first_at(endpoint: &str) -> Seat {
        Seat::First {
            endpoint: endpoint.to_owned(),
            keys: None,
        }
    }

    #[test]
    fn replicas_are_numbered_engine_by_engine() {
        let group = of(first_at("ipc:///tmp/a"), &[2, 1, 3]);
        assert_eq!(group.replicas_of(2), 3..6);
        assert_eq!((group.engine_of(2), group.engine_of(3)), (1, 2));
    }

    #[test]
    fn engines_without_replicas_or_seat_are_refused() {
        assert!(of(first_at("ipc:///tmp/a"), &[1, 0]).check().is_err());
        assert!(of(Seat::Alone, &[1025]).check().is_err());
        assert!(of(Seat::Alone, &[1, 1]).check().is_err());
        assert!(of(first_at("ipc:///tmp/a"), &[1]).check().is_err());
        let member = Seat::Member {
            engine: 2,
            endpoint: "ipc:///tmp/a".to_owned(),
            keys: None,
        };
        let error = of(member, &[1, 1]).check().unwrap_err();
        assert_eq!(error.to_string(), "engine 2 has no seat in a group of 2");
    }

    #[test]
    fn without_keys_engines_meet_on_this_machine_only() {
        for endpoint in ["ipc:///tmp/a", "tcp://127.0.0.1:*", "tcp://[::1]:5555"] {
            assert_eq!(
                of(first_at(endpoint), &[1, 1]).check(),
                Ok(()),
                "{endpoint}"
            );
        }
        for endpoint in [
            "tcp://*:5555",
            "tcp://10.0.0.1:5555",
            "tcp://eth0:*",
            "tcp://[::]:1",
        ] {
            let error = of(first_at(endpoint), &[1, 1]).check().unwrap_err();
            assert!(error.to_string().contains("CURVE keys only"), "{error}");
        }
    }
}
