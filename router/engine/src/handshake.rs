//! The handshake: ranks say Hello, get a Welcome, and answer the warm-up step.

use plait_proto::{ExitCode, Fingerprint, Hello, PROTOCOL, schema_fingerprint};

/// The ranks that have said Hello so far.
#[derive(Debug)]
pub struct Handshake {
    hellos: Vec<Option<Hello>>,
}

/// Why a rank was rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedPeer {
    /// The code that it should exit with.
    pub code: ExitCode,
    /// What differs and what to do.
    pub reason: String,
}

impl Handshake {
    /// No rank yet.
    pub fn new(num_ranks: u32) -> Self {
        Self {
            hellos: vec![None; num_ranks as usize],
        }
    }

    /// Whether this rank is in.
    pub fn has(&self, rank: u32) -> bool {
        self.hellos.get(rank as usize).is_some_and(Option::is_some)
    }

    /// Lets `rank` in, or rejects it. `config` is the fingerprint that its configuration must have.
    pub fn add(
        &mut self,
        rank: u32,
        hello: Hello,
        config: Option<&Fingerprint>,
    ) -> Result<(), RejectedPeer> {
        let world = u32::try_from(self.hellos.len()).expect("the number of ranks is a u32");
        if let Some(reason) = mismatch(rank, world, &hello, config) {
            return Err(RejectedPeer {
                code: ExitCode::Settings,
                reason,
            });
        }
        if hello.num_pages == 0 {
            let reason = format!(
                "rank {rank} has no room for a single page of the KV cache; free memory or ask for a smaller model"
            );
            return Err(RejectedPeer {
                code: ExitCode::Hardware,
                reason,
            });
        }
        self.hellos[rank as usize] = Some(hello);
        Ok(())
    }

    /// All Hellos by rank, once none is missing.
    pub fn complete(&self) -> Option<Vec<Hello>> {
        self.hellos.iter().cloned().collect()
    }
}

/// How a Hello differs from what this engine expects.
fn mismatch(rank: u32, world: u32, hello: &Hello, config: Option<&Fingerprint>) -> Option<String> {
    if hello.protocol != PROTOCOL {
        Some(format!(
            "the worker speaks protocol {}, the engine {PROTOCOL}; install both from one release",
            hello.protocol
        ))
    } else if hello.schema != schema_fingerprint() {
        Some(
            "the worker's message schema is not the engine's; install both from one release"
                .to_owned(),
        )
    } else if Some(&hello.config) != config {
        Some("the worker's configuration is not the one that the engine wrote; it belongs to another run".to_owned())
    } else if (hello.rank, hello.world) != (rank, world) {
        Some(format!(
            "the worker says that it is rank {} of {}, it dialled as rank {rank} of {world}",
            hello.rank, hello.world
        ))
    } else if !hello.other_kinds.is_empty() {
        Some(format!(
            "the worker keeps {} kinds of pages, the engine's scheduler one; install both from one release",
            1 + hello.other_kinds.len()
        ))
    } else {
        None
    }
}

/// The least number of pages that any rank has room for.
pub fn num_pages(hellos: &[Hello]) -> u32 {
    hellos
        .iter()
        .map(|hello| hello.num_pages)
        .min()
        .expect("a replica has at least one rank")
}

/// The ranks that have answered step 0.
#[derive(Debug)]
pub struct WarmUp {
    answered: Vec<bool>,
}

impl WarmUp {
    /// No rank yet.
    pub fn new(num_ranks: u32) -> Self {
        Self {
            answered: vec![false; num_ranks as usize],
        }
    }

    /// Whether this rank has answered.
    pub fn has(&self, rank: u32) -> bool {
        self.answered[rank as usize]
    }

    /// Notes this rank's answer.
    pub fn add(&mut self, rank: u32) {
        self.answered[rank as usize] = true;
    }

    /// Whether all ranks have answered.
    pub fn is_complete(&self) -> bool {
        self.answered.iter().all(|answered| *answered)
    }
}

#[cfg(test)]
mod tests {
    use plait_proto::PageKind;

    use super::*;

    const CONFIG: Fingerprint = [7; 16];

    fn hello(rank: u32) -> Hello {
        Hello {
            protocol: PROTOCOL,
            schema: schema_fingerprint(),
            config: CONFIG,
            rank,
            world: 2,
            pid: 1,
            device: "cpu".to_owned(),
            dtype: "float32".to_owned(),
            num_pages: 10 - rank,
            page_bytes: 1,
            weight_bytes: 1,
            other_kinds: Vec::new(),
        }
    }

    #[test]
    fn the_replica_is_complete_with_its_last_rank_and_takes_the_least_pages() {
        let mut handshake = Handshake::new(2);
        handshake.add(1, hello(1), Some(&CONFIG)).unwrap();
        assert_eq!(handshake.complete(), None);
        handshake.add(0, hello(0), Some(&CONFIG)).unwrap();
        assert_eq!(num_pages(&handshake.complete().unwrap()), 9);
    }

    #[test]
    fn a_rejected_rank_learns_in_what_it_differs() {
        type Change = fn(&mut Hello);
        let cases: [(&str, Change); 6] = [
            ("protocol", |hello| hello.protocol = 9),
            ("schema", |hello| hello.schema[0] ^= 1),
            ("configuration", |hello| hello.config[0] ^= 1),
            ("rank 1 of 2, it dialled as rank 0", |hello| hello.rank = 1),
            ("of 3", |hello| hello.world = 3),
            ("2 kinds of pages", |hello| {
                hello.other_kinds.push(PageKind {
                    page_size: 64,
                    num_pages: 8,
                    page_bytes: 1,
                });
            }),
        ];
        for (word, change) in cases {
            let mut other = hello(0);
            change(&mut other);
            let refused = Handshake::new(2).add(0, other, Some(&CONFIG)).unwrap_err();
            assert!(refused.reason.contains(word), "{}", refused.reason);
            assert_eq!(refused.code, ExitCode::Settings);
        }
    }

    #[test]
    fn nobody_is_let_in_before_the_configuration_is_known() {
        assert!(Handshake::new(2).add(0, hello(0), None).is_err());
    }
}
