//! The handshake: ranks say Hello, get a Welcome, and answer the warm-up step.

use plait_proto::{ExitCode, Fingerprint, Hello, PROTOCOL, schema_fingerprint};

use crate::rank_range::RankRange;
use crate::replica_pools::AskedPools;

/// Page kinds of a replica at most, the first one apart.
const MAX_OTHER_KINDS: usize = 15;

/// The ranks that have said Hello so far.
#[derive(Debug)]
pub struct Handshake {
    ranks: RankRange,
    hellos: Vec<Option<Hello>>,
    /// What the settings ask for.
    asked: AskedPools,
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
    /// No rank yet. A rank has at most what is `asked` for.
    pub fn new(ranks: RankRange, asked: AskedPools) -> Self {
        Self {
            ranks,
            hellos: vec![None; ranks.len()],
            asked,
        }
    }

    /// Whether this rank is in.
    pub fn has(&self, rank: u32) -> bool {
        let place = self.ranks.place(rank);
        place.is_some_and(|place| self.hellos[place].is_some())
    }

    /// Lets `rank` in, or rejects it. `config` is the fingerprint that its configuration must have.
    pub fn add(
        &mut self,
        rank: u32,
        hello: Hello,
        config: Option<&Fingerprint>,
    ) -> Result<(), RejectedPeer> {
        if let Some(reason) = mismatch(rank, self.ranks.world(), &hello, config) {
            return Err(RejectedPeer {
                code: ExitCode::Settings,
                reason,
            });
        }
        if let Some(reason) = self.kinds_mismatch(rank, &hello) {
            return Err(RejectedPeer {
                code: ExitCode::Settings,
                reason,
            });
        }
        if hello.num_pages == 0 || hello.other_kinds.iter().any(|kind| kind.num_pages == 0) {
            let reason = format!(
                "rank {rank} has no memory for a single page of the KV cache; free memory or serve a smaller model"
            );
            return Err(RejectedPeer {
                code: ExitCode::Hardware,
                reason,
            });
        }
        if let Some(reason) = self.asked.problem(rank, &hello) {
            return Err(RejectedPeer {
                code: ExitCode::Settings,
                reason,
            });
        }
        let place = self.ranks.place(rank);
        self.hellos[place.expect("the link knows its ranks")] = Some(hello);
        Ok(())
    }

    /// How a rank's page kinds differ from those of the ranks that are in.
    fn kinds_mismatch(&self, rank: u32, hello: &Hello) -> Option<String> {
        let sizes = other_page_sizes(hello);
        if sizes.len() > MAX_OTHER_KINDS || sizes.contains(&0) {
            return Some(format!(
                "rank {rank} keeps further kinds of pages of {sizes:?} tokens; up to {MAX_OTHER_KINDS} of at least 1 \
                 token are allowed: install worker and engine from one release"
            ));
        }
        let mut in_already = self.hellos.iter().flatten();
        if let Some(other) =
            in_already.find(|it| it.slot_state.is_some() != hello.slot_state.is_some())
        {
            let which = if hello.slot_state.is_some() {
                rank
            } else {
                other.rank
            };
            return Some(format!(
                "only rank {which} keeps state for each slot, of rank {rank} and rank {}; install both from one release",
                other.rank
            ));
        }
        let mut others = self.hellos.iter().flatten().map(other_page_sizes);
        let expected = others.find(|expected| *expected != sizes)?;
        Some(format!(
            "rank {rank} keeps further kinds of pages of {sizes:?} tokens, another rank of {expected:?}; install both \
             from one release"
        ))
    }

    /// The ranks that are not in.
    pub fn missing(&self) -> Vec<u32> {
        self.ranks.iter().filter(|rank| !self.has(*rank)).collect()
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
    } else {
        None
    }
}

fn other_page_sizes(hello: &Hello) -> Vec<u32> {
    hello
        .other_kinds
        .iter()
        .map(|kind| kind.page_size)
        .collect()
}

/// The ranks that have answered step 0.
#[derive(Debug)]
pub struct WarmUp {
    ranks: RankRange,
    answered: Vec<bool>,
}

impl WarmUp {
    /// No rank yet.
    pub fn new(ranks: RankRange) -> Self {
        Self {
            ranks,
            answered: vec![false; ranks.len()],
        }
    }

    /// Whether this rank has answered.
    pub fn has(&self, rank: u32) -> bool {
        self.ranks
            .place(rank)
            .is_some_and(|place| self.answered[place])
    }

    /// Notes this rank's answer.
    pub fn add(&mut self, rank: u32) {
        if let Some(place) = self.ranks.place(rank) {
            self.answered[place] = true;
        }
    }

    /// The ranks that have not answered.
    pub fn missing(&self) -> Vec<u32> {
        self.ranks.iter().filter(|rank| !self.has(*rank)).collect()
    }

    /// Whether all ranks have answered.
    pub fn is_complete(&self) -> bool {
        self.answered.iter().all(|answered| *answered)
    }
}

#[cfg(test)]
mod tests {
    use plait_core::PageSettings;
    use plait_proto::{PageKind, SlotState};

    use super::*;
    use crate::replica_pools::ReplicaPools;

    const CONFIG: Fingerprint = [7; 16];

    fn two() -> RankRange {
        RankRange::of_replica(0, 2, 1)
    }

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
            graphs: Vec::new(),
            slot_state: None,
        }
    }

    #[test]
    fn the_replica_is_complete_with_its_last_rank_and_takes_the_least_pages() {
        let mut handshake = Handshake::new(two(), AskedPools::default());
        handshake.add(1, hello(1), Some(&CONFIG)).unwrap();
        assert_eq!(handshake.complete(), None);
        assert_eq!(handshake.missing(), [0]);
        handshake.add(0, hello(0), Some(&CONFIG)).unwrap();
        let pools = ReplicaPools::of(&handshake.complete().unwrap());
        assert_eq!(pools, ReplicaPools::of_pages(9));
    }

    #[test]
    fn a_rejected_rank_learns_in_what_it_differs() {
        type Change = fn(&mut Hello);
        let cases: [(&str, Change); 5] = [
            ("protocol", |hello| hello.protocol = 9),
            ("schema", |hello| hello.schema[0] ^= 1),
            ("configuration", |hello| hello.config[0] ^= 1),
            ("rank 1 of 2, it dialled as rank 0", |hello| hello.rank = 1),
            ("of 3", |hello| hello.world = 3),
        ];
        for (word, change) in cases {
            let mut other = hello(0);
            change(&mut other);
            let refused = Handshake::new(two(), AskedPools::default())
                .add(0, other, Some(&CONFIG))
                .unwrap_err();
            assert!(refused.reason.contains(word), "{}", refused.reason);
            assert_eq!(refused.code, ExitCode::Settings);
        }
    }

    #[test]
    fn a_pool_beyond_any_device_is_refused_with_what_to_do() {
        type Change = fn(&mut Hello);
        let cases: [(&str, Change); 5] = [
            ("4294967295 pages", |hello| hello.num_pages = u32::MAX),
            ("asks for 100", |hello| hello.num_pages = 101),
            ("--num-snapshots asks for 100", |hello| {
                hello.slot_state = Some(snapshots(101));
            }),
            ("18446744073709551615 bytes", |hello| {
                hello.page_bytes = u64::MAX;
            }),
            ("67108874 pages", |hello| {
                let (page_size, num_pages, page_bytes) = (64, 1 << 26, 1);
                hello.other_kinds = vec![PageKind {
                    page_size,
                    num_pages,
                    page_bytes,
                }];
            }),
        ];
        for (words, change) in cases {
            let mut huge = hello(0);
            change(&mut huge);
            let asked = words.contains("asks").then_some(100);
            let asked = AskedPools::new(&PageSettings {
                num_pages: asked,
                num_snapshots: asked,
                ..PageSettings::default()
            });
            let refused = Handshake::new(two(), asked)
                .add(0, huge, Some(&CONFIG))
                .unwrap_err();
            assert!(refused.reason.contains(words), "{}", refused.reason);
        }
    }

    fn with_pages(rank: u32, page_size: u32, num_pages: u32) -> Hello {
        let page_bytes = 1;
        Hello {
            other_kinds: vec![PageKind {
                page_size,
                num_pages,
                page_bytes,
            }],
            ..hello(rank)
        }
    }

    #[test]
    fn each_page_kind_takes_the_least_pages() {
        let mut handshake = Handshake::new(two(), AskedPools::default());
        for (rank, num_pages) in [(0, 7), (1, 5)] {
            let hello = with_pages(rank, 64, num_pages);
            handshake.add(rank, hello, Some(&CONFIG)).unwrap();
        }
        let kinds = ReplicaPools::of(&handshake.complete().unwrap()).other_kinds;
        assert_eq!((kinds.len(), kinds[0].num_pages), (1, 5));
    }

    fn snapshots(num_snapshots: u32) -> SlotState {
        SlotState {
            slot_bytes: 8,
            snapshot_bytes: 4,
            num_snapshots,
        }
    }

    #[test]
    fn slot_state_takes_the_least_snapshots_and_all_ranks_keep_it() {
        let of = |rank, slot_state| Hello {
            slot_state,
            ..hello(rank)
        };
        let mut handshake = Handshake::new(two(), AskedPools::default());
        let first = of(0, Some(snapshots(7)));
        handshake.add(0, first, Some(&CONFIG)).unwrap();
        let rejected = handshake.add(1, hello(1), Some(&CONFIG)).unwrap_err();
        let words = "only rank 0 keeps state for each slot";
        assert!(rejected.reason.contains(words), "{}", rejected.reason);
        let second = of(1, Some(snapshots(0)));
        handshake.add(1, second, Some(&CONFIG)).unwrap();
        let pools = ReplicaPools::of(&handshake.complete().unwrap());
        assert_eq!(pools.num_snapshots, Some(0));
    }

    #[test]
    fn ranks_keep_the_same_page_kinds() {
        for (other, words) in [
            (with_pages(1, 32, 7), "[32] tokens, another rank of [64]"),
            (hello(1), "[] tokens, another rank of [64]"),
            (with_pages(1, 0, 7), "[0] tokens; up to 15"),
            (with_pages(1, 64, 0), "no memory for a single page"),
        ] {
            let mut handshake = Handshake::new(two(), AskedPools::default());
            handshake
                .add(0, with_pages(0, 64, 7), Some(&CONFIG))
                .unwrap();
            let rejected = handshake.add(1, other, Some(&CONFIG)).unwrap_err();
            assert!(rejected.reason.contains(words), "{}", rejected.reason);
        }
    }

    #[test]
    fn nobody_is_let_in_before_the_configuration_is_known() {
        assert!(
            Handshake::new(two(), AskedPools::default())
                .add(0, hello(0), None)
                .is_err()
        );
    }
}
