//! Chained hashes of full pages: a hash covers the page's tokens and every token before them.

use std::fmt;

use siphasher::sip128::SipHasher13;

use crate::ids::TokenId;

/// Key of the page hash.
///
/// Without it nobody can construct two prompts whose hashes collide. Replicas that are given the same key
/// have the same hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashSeed(pub [u64; 2]);

impl HashSeed {
    /// Equal for equal keys. It does not give the key away, and no page has it as a hash.
    pub fn id(self) -> PageHash {
        PrefixHasher::new(self).hash(b"key id")
    }
}

/// Hash of a full page: its tokens, those of every page before it, and the salt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash([u64; 2]);

impl PageHash {
    /// The hash with these bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let number = u128::from_le_bytes(bytes);
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        Self([number as u64, (number >> 64) as u64])
    }

    /// The same number in every process, little-endian.
    pub fn to_bytes(self) -> [u8; 16] {
        let [low, high] = self.0;
        let number = u128::from(low) | (u128::from(high) << 64);
        number.to_le_bytes()
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [high, low] = self.0;
        write!(formatter, "{high:016x}{low:016x}")
    }
}

const PARENT_BYTES: usize = size_of::<PageHash>();

/// Computes page hashes.
#[derive(Clone, Debug)]
pub(crate) struct PrefixHasher {
    hasher: SipHasher13,
    bytes: Vec<u8>,
}

impl PrefixHasher {
    pub(crate) fn new(seed: HashSeed) -> Self {
        let [key0, key1] = seed.0;
        Self {
            hasher: SipHasher13::new_with_keys(key0, key1),
            bytes: Vec::new(),
        }
    }

    /// The parent of every prompt's first page, for this salt.
    pub(crate) fn root(&self, salt: u64) -> PageHash {
        self.hash(&salt.to_le_bytes())
    }

    /// Hash of the page with `tokens` that follows the page `parent`.
    pub(crate) fn child(&mut self, parent: PageHash, tokens: &[TokenId]) -> PageHash {
        self.bytes.resize(PARENT_BYTES + size_of_val(tokens), 0);
        let (parent_bytes, token_bytes) = self.bytes.split_at_mut(PARENT_BYTES);
        for (bytes, word) in parent_bytes.chunks_exact_mut(8).zip(parent.0) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        for (bytes, token) in token_bytes.chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        self.hash(&self.bytes)
    }

    fn hash(&self, bytes: &[u8]) -> PageHash {
        let hash = self.hasher.hash(bytes);
        PageHash([hash.h1, hash.h2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_depends_on_tokens_parent_salt_and_seed() {
        let hash_of = |seed, salt, before: &[TokenId], tokens: &[TokenId]| {
            let mut hasher = PrefixHasher::new(HashSeed([seed, 2]));
            let root = hasher.root(salt);
            let parent = hasher.child(root, before);
            hasher.child(parent, tokens)
        };
        let one = hash_of(1, 0, &[1, 2], &[3, 4]);
        assert_eq!(one, hash_of(1, 0, &[1, 2], &[3, 4]));
        for other in [
            hash_of(1, 0, &[1, 2], &[3, 5]),
            hash_of(1, 0, &[1, 1], &[3, 4]),
            hash_of(1, 7, &[1, 2], &[3, 4]),
            hash_of(9, 0, &[1, 2], &[3, 4]),
        ] {
            assert_ne!(one, other);
        }
    }
}
