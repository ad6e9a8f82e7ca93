//! Ranks on other hosts, from the engine's settings: where they dial, and which key may speak for which of them.

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::group::{GroupProblem, Key};
use crate::rank_range::RankRange;
use crate::settings::key;

/// The JSON of `plait.settings.RemoteWorkers`.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteWorkers {
    /// Where each replica listens: `tcp://HOST:PORT`; `*` takes a free port.
    endpoints: Vec<String>,
    /// The engine's CURVE key, in Z85 as all keys.
    secret: String,
    /// The other hosts.
    allowed: Vec<RemoteHost>,
}

/// The JSON of `plait.settings.RemoteHost`: another host with ranks of this engine.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoteHost {
    /// The public key that its ranks come with.
    public: String,
    /// For which ranks the key speaks; through all replicas.
    ranks: Vec<u32>,
}

// Secrets stay out of logs.
impl std::fmt::Debug for RemoteWorkers {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.write_str("RemoteWorkers")
    }
}

/// What is wrong with the settings of ranks on other hosts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteProblem {
    /// Addresses that are not one for each replica.
    #[error(
        "remote_workers.endpoints has {given} addresses; {num_replicas} replicas need one each"
    )]
    Endpoints {
        /// How many there are.
        given: usize,
        /// Replicas of the engine.
        num_replicas: u32,
    },
    /// An address to which CURVE adds nothing, or that no other host reaches.
    #[error("remote_workers.endpoints has {0:?}; give tcp://HOST:PORT")]
    NotTcp(String),
    /// Not a rank, or one with two keys.
    #[error(
        "remote_workers.allowed gives rank {rank} {}; the engine has ranks 0 to {}, and each may be on one other host",
        if *.is_twice { "twice" } else { "" }, .world - 1
    )]
    Rank {
        /// Which.
        rank: u32,
        /// It is listed twice.
        is_twice: bool,
        /// Ranks of the engine.
        world: u32,
    },
    /// Two hosts with one key.
    #[error("remote_workers.allowed has one key twice; each host needs one of its own")]
    TwinKeys,
    /// Not a key.
    #[error(transparent)]
    Key(#[from] GroupProblem),
}

/// The other hosts with ranks of one replica.
pub struct RemoteHosts {
    /// Where the replica listens.
    pub endpoint: String,
    /// The engine's CURVE key.
    pub secret: Key,
    /// Each host's key, and the ranks that it speaks for.
    pub hosts: Vec<(Key, Vec<u32>)>,
}

impl RemoteWorkers {
    /// The hosts of one replica's ranks; None if all are on this host.
    pub fn of_replica(
        &self,
        replica: u32,
        ranks: RankRange,
        num_replicas: u32,
    ) -> Result<Option<RemoteHosts>, RemoteProblem> {
        self.check(ranks.world(), num_replicas)?;
        let mut hosts = Vec::new();
        for host in &self.allowed {
            let own = host.ranks.iter().copied();
            let own: Vec<u32> = own.filter(|rank| ranks.place(*rank).is_some()).collect();
            if !own.is_empty() {
                hosts.push((key(&host.public, "remote_workers.allowed.public")?, own));
            }
        }
        if hosts.is_empty() {
            return Ok(None);
        }
        Ok(Some(RemoteHosts {
            endpoint: self.endpoints[replica as usize].clone(),
            secret: key(&self.secret, "remote_workers.secret")?,
            hosts,
        }))
    }

    fn check(&self, world: u32, num_replicas: u32) -> Result<(), RemoteProblem> {
        let given = self.endpoints.len();
        if given != num_replicas as usize {
            return Err(RemoteProblem::Endpoints {
                given,
                num_replicas,
            });
        }
        let mut endpoints = self.endpoints.iter();
        if let Some(other) = endpoints.find(|endpoint| !endpoint.starts_with("tcp://")) {
            return Err(RemoteProblem::NotTcp(other.clone()));
        }
        let keys: BTreeSet<&str> = self.allowed.iter().map(|host| &*host.public).collect();
        if keys.len() < self.allowed.len() {
            return Err(RemoteProblem::TwinKeys);
        }
        let mut seen = BTreeSet::new();
        for rank in self
            .allowed
            .iter()
            .flat_map(|host| host.ranks.iter().copied())
        {
            let is_twice = !seen.insert(rank);
            if is_twice || rank >= world {
                return Err(RemoteProblem::Rank {
                    rank,
                    is_twice,
                    world,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const KEYS: [&str; 2] = [
        "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID",
        "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
    ];

    fn remote(endpoints: &[&str], ranks: &[(&str, &[u32])]) -> RemoteWorkers {
        let allowed = ranks.iter();
        let allowed: Vec<_> = allowed
            .map(|(public, ranks)| json!({"public": public, "ranks": ranks}))
            .collect();
        let json = json!({"endpoints": endpoints, "secret": KEYS[0], "allowed": allowed});
        serde_json::from_value(json).unwrap()
    }

    fn of(replica: u32, remote: &RemoteWorkers) -> Result<Option<RemoteHosts>, RemoteProblem> {
        remote.of_replica(replica, RankRange::of_replica(replica, 2, 2), 2)
    }

    const TWO: [&str; 2] = ["tcp://10.0.0.1:1", "tcp://10.0.0.1:2"];

    #[test]
    fn a_replica_listens_for_its_own_ranks_on_other_hosts_only() {
        let settings = remote(&TWO, &[(KEYS[0], &[2]), (KEYS[1], &[3])]);
        assert!(of(0, &settings).unwrap().is_none(), "all on this host");
        let second = of(1, &settings).unwrap().unwrap();
        assert_eq!(second.endpoint, TWO[1]);
        let ranks: Vec<_> = second.hosts.into_iter().map(|(_, ranks)| ranks).collect();
        assert_eq!(ranks, [[2], [3]]);
    }

    #[test]
    fn ranks_keys_and_addresses_that_do_not_fit_are_refused() {
        for (settings, words) in [
            (remote(&TWO[..1], &[]), "has 1 addresses; 2 replicas"),
            (remote(&["ipc:///tmp/x", TWO[0]], &[]), "give tcp://"),
            (remote(&TWO, &[(KEYS[0], &[4])]), "ranks 0 to 3"),
            (
                remote(&TWO, &[(KEYS[0], &[1]), (KEYS[1], &[1])]),
                "rank 1 twice",
            ),
            (
                remote(&TWO, &[(KEYS[0], &[1]), (KEYS[0], &[2])]),
                "one key twice",
            ),
            (remote(&TWO, &[("short", &[1])]), "is not a CURVE key"),
        ] {
            let problem = of(0, &settings).err().unwrap().to_string();
            assert!(problem.contains(words), "{problem}");
        }
    }

    #[test]
    fn secrets_stay_out_of_logs() {
        assert_eq!(format!("{:?}", remote(&TWO, &[])), "RemoteWorkers");
    }
}
