//! Names of full pages by what they hold: chained, so that a name stands for every token before it too.

use std::fmt;

use siphasher::sip128::SipHasher13;

use crate::ids::TokenId;

/// Key of the hash that names pages.
///
/// Drawn at random by each process: who does not know it can make no two prompts that share a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashSeed(pub [u64; 2]);

/// The name of a full page: its tokens, those of every page before it, and the salt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PageKey([u64; 2]);

impl fmt::Debug for PageKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [high, low] = self.0;
        write!(formatter, "{high:016x}{low:016x}")
    }
}

/// Gives pages their names.
#[derive(Clone, Debug)]
pub(crate) struct Namer {
    hasher: SipHasher13,
    bytes: Vec<u8>,
}

impl Namer {
    pub(crate) fn new(seed: HashSeed) -> Self {
        let [key0, key1] = seed.0;
        Self {
            hasher: SipHasher13::new_with_keys(key0, key1),
            bytes: Vec::new(),
        }
    }

    /// What stands before the first page of every prompt with this salt.
    pub(crate) fn root(&self, salt: u64) -> PageKey {
        self.name(&salt.to_le_bytes())
    }

    /// The page of `tokens` after the page `parent`.
    pub(crate) fn child(&mut self, parent: PageKey, tokens: &[TokenId]) -> PageKey {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        bytes.extend(parent.0.iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        let key = self.name(&bytes);
        self.bytes = bytes;
        key
    }

    fn name(&self, bytes: &[u8]) -> PageKey {
        let hash = self.hasher.hash(bytes);
        PageKey([hash.h1, hash.h2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_depends_on_tokens_parent_salt_and_seed() {
        let name = |seed, salt, before: &[TokenId], tokens: &[TokenId]| {
            let mut namer = Namer::new(HashSeed([seed, 2]));
            let root = namer.root(salt);
            let parent = namer.child(root, before);
            namer.child(parent, tokens)
        };
        let one = name(1, 0, &[1, 2], &[3, 4]);
        assert_eq!(one, name(1, 0, &[1, 2], &[3, 4]));
        for other in [
            name(1, 0, &[1, 2], &[3, 5]),
            name(1, 0, &[1, 1], &[3, 4]),
            name(1, 7, &[1, 2], &[3, 4]),
            name(9, 0, &[1, 2], &[3, 4]),
        ] {
            assert_ne!(one, other);
        }
    }
}
