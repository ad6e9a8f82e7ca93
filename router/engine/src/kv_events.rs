//! KV events: which pages prompts find in this replica's cache, published for routers. docs/kv-events.md has
//! the format.
//!
//! The driver puts events into a queue and goes on. A thread of its own encodes and sends them. It keeps the
//! stored pages, so that a listener that has missed something gets them all.

mod message;
mod publisher;
mod queue;
mod stored_pages;

pub use message::Origin;
pub use publisher::Publisher;
pub use queue::{KvEventQueue, KvEventSender};

use serde::Deserialize;

use crate::group::who_else_comes;

/// The JSON of `plait.settings.KvEventsSettings`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvEventsSettings {
    /// Where events are published; None publishes none.
    pub kv_events_endpoint: Option<String>,
    /// Where listeners ask for all stored pages.
    pub kv_events_replay_endpoint: Option<String>,
    /// First frame of each message.
    pub kv_events_topic: String,
    /// The endpoints may be ones that other users or machines reach.
    pub kv_events_public: bool,
}

/// Why events cannot be published.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvEventsProblem {
    /// Others could listen.
    #[error(
        "{setting} is {endpoint}, where others could read the tokens of every prompt: {why}; give \
         tcp://127.0.0.1:PORT or an ipc:// path in a directory of mode 0700, or add --kv-events-public"
    )]
    Exposed {
        /// The flag.
        setting: &'static str,
        /// As given.
        endpoint: String,
        /// Who could listen.
        why: String,
    },
    /// A setting that has no effect without another.
    #[error("{setting} needs {needed}: give both or neither")]
    Needs {
        /// The flag.
        setting: &'static str,
        /// The one that is missing.
        needed: &'static str,
    },
    /// `ZeroMQ` refused.
    #[error("{setting} is {endpoint}, which cannot be listened on: {reason}")]
    Socket {
        /// The flag.
        setting: &'static str,
        /// As given.
        endpoint: String,
        /// `ZeroMQ`'s message.
        reason: String,
    },
}

const ENDPOINT: &str = "--kv-events-endpoint";
const REPLAY_ENDPOINT: &str = "--kv-events-replay-endpoint";

impl KvEventsSettings {
    /// Where to publish; None publishes nothing.
    pub fn endpoint(&self, has_prefix_cache: bool) -> Result<Option<&str>, KvEventsProblem> {
        let (endpoint, replay) = (&self.kv_events_endpoint, &self.kv_events_replay_endpoint);
        let Some(endpoint) = endpoint else {
            return needs(REPLAY_ENDPOINT, replay.is_none(), ENDPOINT).map(|()| None);
        };
        needs(ENDPOINT, has_prefix_cache, "the prefix cache")?;
        self.check_exposure(ENDPOINT, endpoint)?;
        if let Some(replay) = replay {
            self.check_exposure(REPLAY_ENDPOINT, replay)?;
        }
        Ok(Some(endpoint))
    }

    /// The settings of one of an engine's replicas: its endpoints are those of the first, moved on by its number.
    #[must_use]
    pub fn of_replica(&self, replica: u32) -> Self {
        let moved = |endpoint: &Option<String>| {
            let endpoint = endpoint.as_deref()?;
            Some(endpoint_of_replica(endpoint, replica))
        };
        Self {
            kv_events_endpoint: moved(&self.kv_events_endpoint),
            kv_events_replay_endpoint: moved(&self.kv_events_replay_endpoint),
            ..self.clone()
        }
    }

    fn check_exposure(&self, setting: &'static str, endpoint: &str) -> Result<(), KvEventsProblem> {
        check_port(setting, endpoint)?;
        let others = who_else_listens(endpoint).filter(|_| !self.kv_events_public);
        others.map_or(Ok(()), |why| {
            let endpoint = endpoint.to_owned();
            Err(KvEventsProblem::Exposed {
                setting,
                endpoint,
                why,
            })
        })
    }
}

/// A TCP port grows by the replica's number, which other paths end with; `*` takes a free port for each.
fn endpoint_of_replica(endpoint: &str, replica: u32) -> String {
    let port = endpoint
        .strip_prefix("tcp://")
        .and_then(|address| address.rsplit_once(':'));
    match port {
        _ if replica == 0 => endpoint.to_owned(),
        Some((_, "*")) => endpoint.to_owned(),
        Some((host, port)) => match port.parse::<u32>() {
            Ok(port) => format!("tcp://{host}:{}", port + replica),
            Err(_) => endpoint.to_owned(),
        },
        None => format!("{endpoint}_dp{replica}"),
    }
}

fn needs(setting: &'static str, has_it: bool, needed: &'static str) -> Result<(), KvEventsProblem> {
    has_it
        .then_some(())
        .ok_or(KvEventsProblem::Needs { setting, needed })
}

/// libzmq takes a port modulo 65,536.
fn check_port(setting: &'static str, endpoint: &str) -> Result<(), KvEventsProblem> {
    let address = endpoint.strip_prefix("tcp://");
    match address.and_then(|address| address.rsplit_once(':')) {
        Some((_, port)) if port != "*" && port.parse::<u16>().is_err() => {
            Err(KvEventsProblem::Socket {
                setting,
                endpoint: endpoint.to_owned(),
                reason: "a port is a number up to 65535, or * for a free one".to_owned(),
            })
        }
        _ => Ok(()),
    }
}

/// Who else than this user's processes and this machine's could listen.
fn who_else_listens(endpoint: &str) -> Option<String> {
    let Some(address) = endpoint.strip_prefix("tcp://") else {
        return who_else_comes(endpoint);
    };
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let is_loopback = host
        .parse()
        .is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
    (!is_loopback).then(|| format!("{host} is no loopback address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(endpoint: &str) -> KvEventsSettings {
        KvEventsSettings {
            kv_events_endpoint: Some(endpoint.to_owned()),
            kv_events_replay_endpoint: None,
            kv_events_topic: String::new(),
            kv_events_public: false,
        }
    }

    #[test]
    fn others_may_listen_only_if_the_user_says_so() {
        for endpoint in [
            "tcp://*:5557",
            "tcp://10.0.0.1:5557",
            "tcp://eth0:5557",
            "ipc:///tmp/x",
            "ipc://@x",
        ] {
            let problem = at(endpoint).endpoint(true).unwrap_err().to_string();
            assert!(problem.contains("--kv-events-public"), "{problem}");
            let public = KvEventsSettings {
                kv_events_public: true,
                ..at(endpoint)
            };
            assert_eq!(public.endpoint(true), Ok(Some(endpoint)));
        }
        for endpoint in ["tcp://127.0.0.1:*", "tcp://[::1]:5557"] {
            assert_eq!(at(endpoint).endpoint(true), Ok(Some(endpoint)));
        }
    }

    #[test]
    fn a_port_past_the_last_is_refused() {
        for port in ["65536", "99999", "-1", "http"] {
            let settings = at(&format!("tcp://127.0.0.1:{port}"));
            let problem = settings.endpoint(true).unwrap_err().to_string();
            assert!(
                problem.contains("a port is a number up to 65535"),
                "{problem}"
            );
        }
    }

    #[test]
    fn each_replica_has_endpoints_of_its_own() {
        let at_replica = |endpoint: &str, replica| {
            let moved = at(endpoint).of_replica(replica);
            moved.kv_events_endpoint.unwrap()
        };
        for (endpoint, first, third) in [
            (
                "tcp://127.0.0.1:5557",
                "tcp://127.0.0.1:5557",
                "tcp://127.0.0.1:5559",
            ),
            ("tcp://[::1]:5557", "tcp://[::1]:5557", "tcp://[::1]:5559"),
            (
                "tcp://127.0.0.1:*",
                "tcp://127.0.0.1:*",
                "tcp://127.0.0.1:*",
            ),
            ("ipc:///run/x", "ipc:///run/x", "ipc:///run/x_dp2"),
        ] {
            assert_eq!(at_replica(endpoint, 0), first);
            assert_eq!(at_replica(endpoint, 2), third);
        }
        let past_the_last = at("tcp://127.0.0.1:65535").of_replica(1);
        let problem = past_the_last.endpoint(true).unwrap_err().to_string();
        assert!(problem.contains("is tcp://127.0.0.1:65536"), "{problem}");
    }

    #[test]
    fn the_replay_endpoint_is_checked_too() {
        let settings = KvEventsSettings {
            kv_events_replay_endpoint: Some("tcp://*:5558".to_owned()),
            ..at("tcp://127.0.0.1:5557")
        };
        assert!(
            matches!(settings.endpoint(true), Err(KvEventsProblem::Exposed { setting, .. }) if setting == REPLAY_ENDPOINT)
        );
        let alone = KvEventsSettings {
            kv_events_endpoint: None,
            ..settings
        };
        let problem = alone.endpoint(true).unwrap_err().to_string();
        assert!(problem.contains("needs --kv-events-endpoint"), "{problem}");
    }

    #[test]
    fn without_a_prefix_cache_there_is_nothing_to_publish() {
        let problem = at("tcp://127.0.0.1:*")
            .endpoint(false)
            .unwrap_err()
            .to_string();
        assert!(problem.contains("needs the prefix cache"), "{problem}");
    }
}
