//! Where ranks leave values for each other: addresses, which are all that they need to meet.

use plait_proto::{StoreOperation, StoreReply, StoreRequest};
use rustc_hash::FxHashMap;

/// Bytes of a value at most; messages between engines have 64 KiB.
pub const MAX_VALUE_BYTES: usize = 32 << 10;
/// Keys and waiting requests at most.
const MAX_ENTRIES: usize = 1 << 16;

/// Values by key, and the requests that wait for one.
#[derive(Debug, Default)]
pub struct KeyStore {
    values: FxHashMap<String, Vec<u8>>,
    waiting: FxHashMap<String, Vec<Asker>>,
    num_waiting: usize,
}

/// Whose request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asker {
    /// Which engine of the group; 0 if it is the only one.
    pub engine: u32,
    rank: u32,
    id: u64,
}

impl Asker {
    fn reply(self, value: Option<Vec<u8>>) -> (u32, StoreReply) {
        let Self { engine, rank, id } = self;
        (engine, StoreReply { rank, id, value })
    }
}

impl KeyStore {
    /// The replies that are due now, each with its engine: to this request of an engine's rank, and to those that
    /// waited for its key. What the store cannot hold is refused: its reply has no value.
    pub fn ask(&mut self, engine: u32, request: StoreRequest) -> Vec<(u32, StoreReply)> {
        let asker = Asker {
            engine,
            rank: request.rank,
            id: request.id,
        };
        let (key, value) = (request.key, request.value);
        match request.operation {
            StoreOperation::Set => self.set(asker, key, value, Vec::new()),
            StoreOperation::Add => match self.sum(&key, &value) {
                Some(sum) => self.set(asker, key, sum.clone(), sum),
                None => vec![asker.reply(None)],
            },
            StoreOperation::Find => vec![asker.reply(self.values.get(&key).cloned())],
            StoreOperation::Get => self.get(asker, key),
        }
    }

    fn set(
        &mut self,
        asker: Asker,
        key: String,
        value: Vec<u8>,
        told: Vec<u8>,
    ) -> Vec<(u32, StoreReply)> {
        let is_new = !self.values.contains_key(&key);
        if value.len() > MAX_VALUE_BYTES || (is_new && self.is_full()) {
            return vec![asker.reply(None)];
        }
        let waiting = self.waiting.remove(&key).unwrap_or_default();
        self.num_waiting -= waiting.len();
        let waiting = waiting.iter().map(|other| other.reply(Some(value.clone())));
        let replies = std::iter::once(asker.reply(Some(told))).chain(waiting);
        let replies = replies.collect();
        self.values.insert(key, value);
        replies
    }

    fn get(&mut self, asker: Asker, key: String) -> Vec<(u32, StoreReply)> {
        match self.values.get(&key) {
            Some(value) => vec![asker.reply(Some(value.clone()))],
            None if self.is_full() => vec![asker.reply(None)],
            None => {
                self.num_waiting += 1;
                self.waiting.entry(key).or_default().push(asker);
                Vec::new()
            }
        }
    }

    /// The number under a key and the one that is added, in digits; None if one of them is no number.
    fn sum(&self, key: &str, added: &[u8]) -> Option<Vec<u8>> {
        let added = i64::from_le_bytes(added.try_into().ok()?);
        let held = match self.values.get(key) {
            Some(digits) => std::str::from_utf8(digits).ok()?.parse().ok()?,
            None => 0_i64,
        };
        Some(held.checked_add(added)?.to_string().into_bytes())
    }

    fn is_full(&self) -> bool {
        self.values.len() + self.num_waiting >= MAX_ENTRIES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(rank: u32, operation: StoreOperation, key: &str, value: &[u8]) -> StoreRequest {
        StoreRequest {
            rank,
            id: u64::from(rank) + 10,
            of_group: false,
            operation,
            key: key.to_owned(),
            value: value.to_vec(),
        }
    }

    /// Engine, rank and value of each reply.
    fn ask(
        store: &mut KeyStore,
        engine: u32,
        request: StoreRequest,
    ) -> Vec<(u32, u32, Option<Vec<u8>>)> {
        let replies = store.ask(engine, request).into_iter();
        replies
            .map(|(engine, reply)| {
                assert_eq!(reply.id, u64::from(reply.rank) + 10);
                (engine, reply.rank, reply.value)
            })
            .collect()
    }

    #[test]
    fn who_waits_for_a_key_gets_it_when_it_is_set() {
        use StoreOperation::{Find, Get, Set};
        let mut store = KeyStore::default();
        assert_eq!(ask(&mut store, 0, request(1, Get, "a", b"")), []);
        assert_eq!(ask(&mut store, 2, request(1, Get, "a", b"")), []);
        assert_eq!(
            ask(&mut store, 0, request(0, Find, "a", b"")),
            [(0, 0, None)]
        );
        let value = Some(b"x".to_vec());
        assert_eq!(
            ask(&mut store, 0, request(0, Set, "a", b"x")),
            [
                (0, 0, Some(Vec::new())),
                (0, 1, value.clone()),
                (2, 1, value.clone())
            ]
        );
        assert_eq!(
            ask(&mut store, 0, request(3, Get, "a", b"")),
            [(0, 3, value)]
        );
    }

    #[test]
    fn numbers_add_up_from_nothing() {
        let mut store = KeyStore::default();
        let mut add = |number: i64| {
            let asked = request(0, StoreOperation::Add, "n", &number.to_le_bytes());
            ask(&mut store, 0, asked).remove(0).2
        };
        assert_eq!(add(2), Some(b"2".to_vec()));
        assert_eq!(add(-5), Some(b"-3".to_vec()));
        assert_eq!(add(i64::MIN), None);
    }

    #[test]
    fn what_the_store_cannot_hold_is_refused() {
        use StoreOperation::{Add, Get, Set};
        let mut store = KeyStore::default();
        let large = vec![0; MAX_VALUE_BYTES + 1];
        for refused in [
            request(0, Set, "a", &large),
            request(0, Add, "a", b"no number"),
        ] {
            assert_eq!(ask(&mut store, 0, refused), [(0, 0, None)]);
        }
        for number in 0..MAX_ENTRIES {
            let key = number.to_string();
            let operation = if number % 2 == 0 { Set } else { Get };
            ask(&mut store, 0, request(0, operation, &key, b""));
        }
        for operation in [Set, Get] {
            assert_eq!(
                ask(&mut store, 0, request(0, operation, "new", b"")),
                [(0, 0, None)]
            );
        }
        assert_eq!(
            ask(&mut store, 0, request(0, Set, "0", b"")).len(),
            1,
            "a key that it has"
        );
    }
}
