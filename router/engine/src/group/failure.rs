//! Why a group failed.

use std::time::Duration;

use plait_proto::ExitCode;

use super::socket::HandshakeFailure;

/// The engine's group has failed: no step follows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupFailure {
    /// Engines that did not join in time.
    #[error(
        "{} of the group did not join within {waited:?}: see whether it runs and can reach this one, or raise \
         --load-timeout-seconds",
        join_numbers("engine", .engines)
    )]
    NeverJoined {
        /// Which.
        engines: Vec<u32>,
        /// For how long.
        waited: Duration,
    },
    /// Votes that did not come in time. There is no decision without them.
    #[error(
        "{} ({}) did not vote on step {step} within {waited:?}: it hangs or cannot be reached",
        join_numbers("replica", .replicas), join_numbers("engine", .engines)
    )]
    MissingVotes {
        /// Whose.
        replicas: Vec<u32>,
        /// The engines that own them.
        engines: Vec<u32>,
        /// On which step.
        step: u64,
        /// For how long.
        waited: Duration,
    },
    /// No decision came in time.
    #[error(
        "engine 0 gave no decision on step {step} within {waited:?}: it hangs or cannot be reached"
    )]
    NoDecision {
        /// Which.
        step: u64,
        /// For how long.
        waited: Duration,
    },
    /// An engine's link was closed without a reason.
    #[error("engine {engine} ({}) is gone: its link was closed", join_numbers("replica", .replicas))]
    Disconnected {
        /// Which.
        engine: u32,
        /// Those that it owned.
        replicas: Vec<u32>,
    },
    /// A replica of this engine gave up.
    #[error("replica {replica} gave up: {reason}")]
    ReplicaFailed {
        /// Which.
        replica: u32,
        /// What this engine exits with.
        code: ExitCode,
        /// In its words.
        reason: String,
    },
    /// An engine gave up.
    #[error("engine {engine} gave up: {reason}")]
    PeerFailed {
        /// Which.
        engine: u32,
        /// In its words.
        reason: String,
    },
    /// An engine does not read its messages, and its queue is full.
    #[error("engine {engine} ({}) does not read its messages: it hangs", join_numbers("replica", .replicas))]
    NotReading {
        /// Which.
        engine: u32,
        /// Those that it owns.
        replicas: Vec<u32>,
    },
    /// A second engine with a number that is in use.
    #[error(
        "two engines say that they are engine {engine} ({}): start each with a number of its own, and all anew where \
         one of them ended",
        join_numbers("replica", .replicas)
    )]
    DuplicateEngine {
        /// Which.
        engine: u32,
        /// Those that both would own.
        replicas: Vec<u32>,
    },
    /// A decision that cannot follow from this engine's vote.
    #[error(
        "engine 0 sent a decision on step {step} that cannot follow from its votes: {why}; install all engines from one release"
    )]
    InvalidDecision {
        /// Which.
        step: u64,
        /// In words.
        why: String,
    },
    /// The handshake with the coordinator failed.
    #[error("engine 0 at {endpoint} cannot be reached: {handshake}")]
    ConnectFailed {
        /// Where.
        endpoint: String,
        /// What is known.
        handshake: HandshakeFailure,
    },
    /// The coordinator ended the group.
    #[error("{reason}")]
    FromCoordinator {
        /// What this engine exits with.
        code: ExitCode,
        /// In its words.
        reason: String,
    },
}

impl GroupFailure {
    /// The process's exit code.
    pub fn code(&self) -> ExitCode {
        match self {
            Self::ConnectFailed { handshake, .. } => handshake.code(),
            Self::DuplicateEngine { .. } => ExitCode::Settings,
            Self::FromCoordinator { code, .. } | Self::ReplicaFailed { code, .. } => *code,
            _ => ExitCode::RankLost,
        }
    }
}

/// `replica 1`, `replicas 1 and 2`, `replicas 1, 2 and 3`.
fn join_numbers(noun: &str, numbers: &[u32]) -> String {
    let words: Vec<String> = numbers.iter().map(u32::to_string).collect();
    match words.as_slice() {
        [] => format!("no {noun}"),
        [one] => format!("{noun} {one}"),
        [most @ .., last] => format!("{noun}s {} and {last}", most.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_are_named() {
        let end = GroupFailure::MissingVotes {
            replicas: vec![4, 5, 6],
            engines: vec![2],
            step: 17,
            waited: Duration::from_secs(60),
        };
        assert_eq!(
            end.to_string(),
            "replicas 4, 5 and 6 (engine 2) did not vote on step 17 within 60s: it hangs or cannot be reached"
        );
    }
}
