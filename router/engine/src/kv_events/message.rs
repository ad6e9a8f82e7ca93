//! A message's last frame: a MessagePack map. vLLM publishes the same events under the same names.

use plait_core::{KvEvent, PageHash, StoredPage};
use serde::Serialize;
use serde_bytes::ByteArray;

type HashBytes = ByteArray<16>;

/// Where the pages are. vLLM names the other places that it has.
const MEDIUM: &str = "GPU";

/// What happened since the message before.
#[derive(Serialize)]
struct Batch<'a> {
    /// Seconds since the epoch.
    ts: f64,
    events: Vec<Event>,
    data_parallel_rank: Option<u32>,
    hash_key_id: &'a str,
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum Event {
    BlockStored(Stored),
    BlockRemoved(Removed),
    AllBlocksCleared,
}

/// Pages that follow one another in a prompt.
#[derive(Serialize)]
struct Stored {
    block_hashes: Vec<HashBytes>,
    parent_block_hash: Option<HashBytes>,
    token_ids: Vec<u32>,
    block_size: usize,
    lora_id: Option<u32>,
    medium: &'static str,
    lora_name: Option<u32>,
    group_idx: u32,
    cache_salt: u64,
}

#[derive(Serialize)]
struct Removed {
    block_hashes: Vec<HashBytes>,
    medium: &'static str,
    group_idx: u32,
}

/// Who publishes.
#[derive(Clone, Debug)]
pub struct Origin {
    /// The replica's number in its group; None without a group.
    pub replica: Option<u32>,
    /// Equal in replicas with the same hash key.
    pub hash_key_id: String,
}

impl Origin {
    /// The changes of these events.
    pub fn changes(&self, ts: f64, events: &[KvEvent]) -> Vec<u8> {
        let mut merged = Vec::new();
        for event in events {
            match event {
                KvEvent::Stored(page) => add_stored(&mut merged, page),
                KvEvent::Removed { kind, hash } => add_removed(&mut merged, *kind, *hash),
            }
        }
        self.encode(ts, merged)
    }

    /// The end of all pages, and those that there are.
    pub fn snapshot<'a>(&self, ts: f64, pages: impl Iterator<Item = &'a StoredPage>) -> Vec<u8> {
        let mut merged = vec![Event::AllBlocksCleared];
        pages.for_each(|page| add_stored(&mut merged, page));
        self.encode(ts, merged)
    }

    fn encode(&self, ts: f64, events: Vec<Event>) -> Vec<u8> {
        let batch = Batch {
            ts,
            events,
            data_parallel_rank: self.replica,
            hash_key_id: &self.hash_key_id,
        };
        rmp_serde::to_vec_named(&batch).expect("a vector takes every byte, and lengths are known")
    }
}

/// Adds a page, to the last event if it continues that one.
fn add_stored(events: &mut Vec<Event>, page: &StoredPage) {
    let parent = page.parent.map(bytes);
    if let Some(Event::BlockStored(run)) = events.last_mut()
        && (run.group_idx, run.block_hashes.last()) == (page.kind, parent.as_ref())
    {
        run.block_hashes.push(bytes(page.hash));
        run.token_ids.extend(&page.tokens);
        return;
    }
    events.push(Event::BlockStored(Stored {
        block_hashes: vec![bytes(page.hash)],
        parent_block_hash: parent,
        token_ids: page.tokens.to_vec(),
        block_size: page.tokens.len(),
        lora_id: None,
        medium: MEDIUM,
        lora_name: None,
        group_idx: page.kind,
        cache_salt: page.salt,
    }));
}

fn add_removed(events: &mut Vec<Event>, kind: u32, hash: PageHash) {
    if let Some(Event::BlockRemoved(run)) = events.last_mut()
        && run.group_idx == kind
    {
        return run.block_hashes.push(bytes(hash));
    }
    events.push(Event::BlockRemoved(Removed {
        block_hashes: vec![bytes(hash)],
        medium: MEDIUM,
        group_idx: kind,
    }));
}

fn bytes(hash: PageHash) -> HashBytes {
    ByteArray::new(hash.to_bytes())
}
