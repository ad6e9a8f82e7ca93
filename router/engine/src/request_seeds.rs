//! Seeds for requests that give none.

use std::sync::atomic::{AtomicU64, Ordering};

use plait_core::HashSeed;

/// `SplitMix64` (Steele, Lea and Flood, 2014): a counter and a mixing function, so that threads share
/// it without a lock.
#[derive(Debug)]
pub struct SeedSource(AtomicU64);

/// The counter's step: 2^64 divided by the golden ratio, made odd.
const GOLDEN_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

impl SeedSource {
    /// The same seed gives the same sequence; None starts at a random one.
    pub fn new(seed: Option<u64>) -> Self {
        Self(AtomicU64::new(seed.unwrap_or_else(system_random)))
    }

    /// The next seed.
    pub fn draw(&self) -> u64 {
        let state = self
            .0
            .fetch_add(GOLDEN_STEP, Ordering::Relaxed)
            .wrapping_add(GOLDEN_STEP);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}

/// A random key for the block hashes of cached pages. It never leaves the process.
pub fn hash_seed() -> HashSeed {
    HashSeed([system_random(), system_random()])
}

/// 64 bits from the operating system, through the keys that std draws for its hash maps.
fn system_random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_of_seed_zero_is_the_published_one() {
        let source = SeedSource::new(Some(0));
        assert_eq!(source.draw(), 0xE220_A839_7B1D_CDAF);
        assert_eq!(source.draw(), 0x6E78_9E6A_A1B9_65F4);
    }

    #[test]
    fn two_processes_or_two_replicas_name_pages_differently() {
        assert_ne!(hash_seed(), hash_seed());
    }

    #[test]
    fn two_sources_without_a_seed_differ() {
        assert_ne!(SeedSource::new(None).draw(), SeedSource::new(None).draw());
    }
}
