//! What the prefix cache gains and loses, for listeners that follow it.

use crate::ids::TokenId;
use crate::prefix_hasher::PageHash;

/// One change of the pages that prompts can find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// A page can be found.
    Stored(StoredPage),
    /// A page was evicted.
    Removed {
        /// Of which cache kind, from 0.
        kind: u32,
        /// The page's hash.
        hash: PageHash,
    },
}

/// A full page that prompts can find. Its cache kind and hash identify it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPage {
    /// Of which cache kind, from 0.
    pub kind: u32,
    /// Covers its tokens, those of every page before it, and the salt.
    pub hash: PageHash,
    /// Hash of the page before it; None for a prompt's first page.
    pub parent: Option<PageHash>,
    /// Requests of other salts do not find the page.
    pub salt: u64,
    /// Its own tokens.
    pub tokens: Box<[TokenId]>,
}
