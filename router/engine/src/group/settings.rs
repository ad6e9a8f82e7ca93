//! The engines of a group, their sockets and keys, and how long they wait for each other.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use plait_proto::{Fact, Fingerprint};

use super::graphs::CapturedGraphs;
use crate::timeouts::LONGEST_STEP;

/// A CURVE key.
pub type Key = [u8; 32];

/// Engines, and replicas, of one group at most.
pub const MAX_REPLICAS: u32 = 1024;

/// This engine's role in its group.
#[derive(Clone)]
pub enum Role {
    /// The group has no other engine.
    Alone,
    /// Engine 0, which listens.
    Coordinator {
        /// A ZeroMQ address; `tcp://HOST:*` takes a free port.
        endpoint: String,
        /// Needed unless the address is an ipc path in a directory of mode 0700.
        keys: Option<ServerKeys>,
    },
    /// One that dials.
    Member {
        /// Which engine of the group, from 1.
        engine: u32,
        /// Where the coordinator listens.
        endpoint: String,
        /// Needed if the coordinator has some.
        keys: Option<ClientKeys>,
    },
}

/// The coordinator's CURVE keys.
#[derive(Clone)]
pub struct ServerKeys {
    /// Its own.
    pub secret: Key,
    /// Public keys of engine 1, 2 and so on. Each may join as that engine only.
    pub allowed: Vec<Key>,
}

/// A dialling engine's CURVE keys.
#[derive(Clone)]
pub struct ClientKeys {
    /// The coordinator's public key.
    pub server: Key,
    /// Its own.
    pub public: Key,
    /// Its own.
    pub secret: Key,
}

/// How long engines wait for each other.
#[derive(Clone, Copy, Debug)]
pub struct GroupTimeouts {
    /// For the others' first votes, from the start: they load their models.
    pub join: Duration,
    /// From a round's first vote to its last, plus [`GroupTimeouts::vote_token`] a token.
    pub vote: Duration,
    /// Added for each token of the last step, which the late engine may still compute; up to
    /// [`LONGEST_STEP`] in all.
    pub vote_token: Duration,
}

impl Default for GroupTimeouts {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(1800),
            vote: Duration::from_secs(60),
            vote_token: Duration::from_millis(100),
        }
    }
}

impl GroupTimeouts {
    /// From a round's first vote to its last, after a step of `num_tokens`.
    pub fn of_vote(&self, num_tokens: u32) -> Duration {
        (self.vote + self.vote_token * num_tokens).min(LONGEST_STEP.max(self.vote))
    }
}

/// What an engine knows of its group.
#[derive(Clone)]
pub struct GroupSettings {
    /// Its role.
    pub role: Role,
    /// Replicas of each engine; they are numbered in this order.
    pub num_replicas: Vec<u32>,
    /// Fingerprint of everything that all engines must share.
    pub config: Fingerprint,
    /// What that is the fingerprint of, so that an engine that differs is told in what.
    pub facts: Vec<Fact>,
    /// Sizes of the graphs that every rank of this engine has captured; in engine 0 of all engines.
    pub graphs: CapturedGraphs,
    /// Tokens of one replica's step at most. A larger vote or decision would have every rank allocate for it.
    pub max_tokens: u32,
    /// Limits on waiting.
    pub timeouts: GroupTimeouts,
}

/// What is wrong with a group's settings, or its socket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupProblem {
    /// The numbers of replicas make no group.
    #[error(
        "the engines have {given:?} replicas; a group has 1 to {MAX_REPLICAS} replicas, and each engine at least one"
    )]
    Replicas {
        /// Replicas of each engine.
        given: Vec<u32>,
    },
    /// The engine's number is not one of the group's.
    #[error("engine {engine} is not in a group of {num_engines}: engines are numbered from 0")]
    Role {
        /// Which.
        engine: u32,
        /// Engines of the group.
        num_engines: usize,
    },
    /// Other users could join and vote.
    #[error(
        "the engines of a group cannot meet at {endpoint} without CURVE keys: {why}; give keys, or an ipc:// path in \
         a directory of mode 0700"
    )]
    Unprotected {
        /// Where.
        endpoint: String,
        /// Who else could join.
        why: String,
    },
    /// Keys that are not one for each engine.
    #[error(
        "`allowed` has {given} keys{}; a group of {num_engines} engines needs {} different ones, in the order of the \
         engines: that of engine 1 first", if *.has_twins { ", one of them twice" } else { "" }, .num_engines - 1
    )]
    AllowedKeys {
        /// How many there are.
        given: usize,
        /// Two are equal.
        has_twins: bool,
        /// Engines of the group.
        num_engines: usize,
    },
    /// Not a key.
    #[error("{whose} is not a CURVE key: give its 32 bytes as 40 characters of Z85")]
    Key {
        /// Which of the settings.
        whose: &'static str,
    },
    /// ZeroMQ refused.
    #[error("cannot meet the group at {endpoint}: {reason}")]
    Socket {
        /// Where.
        endpoint: String,
        /// ZeroMQ's message.
        reason: String,
    },
}

impl GroupSettings {
    /// Which engine of the group this is.
    pub fn engine(&self) -> u32 {
        match self.role {
            Role::Alone | Role::Coordinator { .. } => 0,
            Role::Member { engine, .. } => engine,
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

    /// Who owns which replica.
    pub fn owners(&self) -> Owners {
        let ends = self.num_replicas.iter().scan(0, |end, num| {
            *end += num;
            Some(*end)
        });
        Owners {
            bounds: std::iter::once(0).chain(ends).collect(),
        }
    }

    pub(super) fn check(&self) -> Result<(), GroupProblem> {
        let total: u64 = self.num_replicas.iter().map(|num| u64::from(*num)).sum();
        if self.num_replicas.contains(&0) || !(1..=u64::from(MAX_REPLICAS)).contains(&total) {
            return Err(GroupProblem::Replicas {
                given: self.num_replicas.clone(),
            });
        }
        self.check_role()?;
        self.check_allowed_keys()?;
        self.check_protection()
    }

    fn check_allowed_keys(&self) -> Result<(), GroupProblem> {
        let Role::Coordinator {
            keys: Some(keys), ..
        } = &self.role
        else {
            return Ok(());
        };
        let (given, num_engines) = (keys.allowed.len(), self.num_replicas.len());
        let distinct: std::collections::BTreeSet<&Key> = keys.allowed.iter().collect();
        let has_twins = distinct.len() < given;
        if given + 1 == num_engines && !has_twins {
            return Ok(());
        }
        Err(GroupProblem::AllowedKeys {
            given,
            has_twins,
            num_engines,
        })
    }

    fn check_role(&self) -> Result<(), GroupProblem> {
        let (engine, num_engines) = (self.engine(), self.num_replicas.len());
        let is_member = match self.role {
            Role::Alone => num_engines == 1,
            Role::Coordinator { .. } => num_engines > 1,
            Role::Member { engine, .. } => (1..num_engines).contains(&(engine as usize)),
        };
        is_member.then_some(()).ok_or(GroupProblem::Role {
            engine,
            num_engines,
        })
    }

    fn check_protection(&self) -> Result<(), GroupProblem> {
        let (endpoint, has_keys) = match &self.role {
            Role::Alone => return Ok(()),
            Role::Coordinator { endpoint, keys } => (endpoint, keys.is_some()),
            Role::Member { endpoint, keys, .. } => (endpoint, keys.is_some()),
        };
        let others = (!has_keys).then(|| who_else_comes(endpoint)).flatten();
        others.map_or(Ok(()), |why| {
            Err(GroupProblem::Unprotected {
                endpoint: endpoint.clone(),
                why,
            })
        })
    }
}

/// Which engine owns which replica.
#[derive(Clone, Debug)]
pub struct Owners {
    /// The first replica of each engine, and the number of all.
    bounds: Vec<u32>,
}

impl Owners {
    /// The replicas of one engine.
    pub fn replicas_of(&self, engine: u32) -> Range<u32> {
        let engine = engine as usize;
        self.bounds[engine]..self.bounds[engine + 1]
    }

    /// The engine that owns a replica of the group.
    pub fn engine_of(&self, replica: u32) -> u32 {
        let num_after = self.bounds.iter().rev();
        let num_after = num_after.take_while(|bound| **bound > replica).count();
        u32::try_from(self.bounds.len() - num_after - 1).expect("engines are a u32")
    }
}

/// Who else than this user's processes could connect without keys; None if no one.
pub(crate) fn who_else_comes(endpoint: &str) -> Option<String> {
    let Some(path) = endpoint.strip_prefix("ipc://") else {
        return Some("every user of a machine that reaches it could join".to_owned());
    };
    let directory = Path::new(path).parent().filter(|_| path.starts_with('/'));
    let Some(directory) = directory else {
        return Some("a name that is no absolute path is open to every user".to_owned());
    };
    match fs::metadata(directory) {
        Err(error) => Some(format!("{}: {error}", directory.display())),
        Ok(found) if found.permissions().mode() & 0o077 != 0 => {
            let mode = found.permissions().mode() & 0o777;
            Some(format!("{} has mode {mode:04o}", directory.display()))
        }
        Ok(found) => (found.uid() != rustix::process::geteuid().as_raw())
            .then(|| format!("{} is another user's", directory.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(role: Role, num_replicas: &[u32]) -> GroupSettings {
        GroupSettings {
            role,
            num_replicas: num_replicas.to_vec(),
            config: [0; 16],
            facts: Vec::new(),
            graphs: CapturedGraphs::default(),
            max_tokens: 1,
            timeouts: GroupTimeouts::default(),
        }
    }

    fn first_at(endpoint: &str) -> Role {
        Role::Coordinator {
            endpoint: endpoint.to_owned(),
            keys: None,
        }
    }

    #[test]
    fn replicas_are_numbered_engine_by_engine() {
        let owners = of(first_at("ipc:///tmp/a"), &[2, 1, 3]).owners();
        assert_eq!(owners.replicas_of(2), 3..6);
        let engines: Vec<u32> = (0..6).map(|replica| owners.engine_of(replica)).collect();
        assert_eq!(engines, [0, 0, 1, 2, 2, 2]);
    }

    #[test]
    fn engines_without_replicas_or_seat_are_refused() {
        assert!(of(first_at("ipc:///tmp/a"), &[1, 0]).check().is_err());
        assert!(of(Role::Alone, &[1025]).check().is_err());
        assert!(of(Role::Alone, &[1, 1]).check().is_err());
        assert!(of(first_at("ipc:///tmp/a"), &[1]).check().is_err());
        let member = Role::Member {
            engine: 2,
            endpoint: "ipc:///tmp/a".to_owned(),
            keys: None,
        };
        let error = of(member, &[1, 1]).check().unwrap_err();
        assert_eq!(
            error.to_string(),
            "engine 2 is not in a group of 2: engines are numbered from 0"
        );
    }

    #[test]
    fn each_other_engine_needs_a_key_of_its_own() {
        let check = |allowed: &[Key]| {
            let keys = ServerKeys {
                secret: [9; 32],
                allowed: allowed.to_vec(),
            };
            let role = Role::Coordinator {
                endpoint: "tcp://*:5555".to_owned(),
                keys: Some(keys),
            };
            of(role, &[1, 1, 1]).check()
        };
        assert_eq!(check(&[[1; 32], [2; 32]]), Ok(()));
        for (allowed, words) in [
            (&[[1; 32]][..], "has 1 keys; a group of 3 engines needs 2"),
            (&[[1; 32], [1; 32]], "has 2 keys, one of them twice"),
            (&[[1; 32], [2; 32], [3; 32]], "has 3 keys; a group of 3"),
        ] {
            let problem = check(allowed).unwrap_err().to_string();
            assert!(
                problem.contains(words) && problem.contains("engine 1 first"),
                "{problem}"
            );
        }
    }

    #[test]
    fn without_keys_engines_meet_in_a_directory_of_their_own_only() {
        let directory = tempfile::tempdir().unwrap();
        let may = |mode| {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(directory.path(), mode).unwrap();
        };
        may(0o700);
        let path = directory.path().join("group");
        let endpoint = format!("ipc://{}", path.display());
        assert_eq!(of(first_at(&endpoint), &[1, 1]).check(), Ok(()));
        may(0o750);
        for (endpoint, why) in [
            (endpoint.as_str(), "has mode 0750"),
            ("ipc:///no-such-directory/group", "No such file"),
            ("ipc://@plait-group", "no absolute path"),
            ("ipc://group", "no absolute path"),
            ("ipc://*", "no absolute path"),
            ("tcp://127.0.0.1:*", "could join"),
            ("tcp://[::1]:5555", "could join"),
            ("tcp://10.0.0.1:5555", "could join"),
        ] {
            for role in [
                first_at(endpoint),
                Role::Member {
                    engine: 1,
                    endpoint: endpoint.to_owned(),
                    keys: None,
                },
            ] {
                let error = of(role, &[1, 1]).check().unwrap_err().to_string();
                assert!(
                    error.contains(why) && error.contains("CURVE keys"),
                    "{error}"
                );
            }
        }
    }
}
