//! The store of a group's ranks, as the seats of one engine use it.

use plait_proto::{StoreReply, StoreRequest};
use rustc_hash::FxHashMap;

use crate::store::KeyStore;

/// What the seats' ranks ask of the store, and what they are told.
pub struct StoreDesk {
    /// The store itself; None if engine 0 of several has it.
    store: Option<KeyStore>,
    /// On their way to engine 0.
    requests: Vec<StoreRequest>,
    /// Which seat has which rank.
    places: FxHashMap<u32, usize>,
    /// For the ranks of each seat.
    replies: Vec<Vec<StoreReply>>,
}

impl StoreDesk {
    /// `has_store` if no other engine is in the group.
    pub fn new(num_seats: usize, has_store: bool) -> Self {
        Self {
            store: has_store.then(KeyStore::default),
            requests: Vec::new(),
            places: FxHashMap::default(),
            replies: vec![Vec::new(); num_seats],
        }
    }

    /// A rank of a seat asks.
    pub fn ask(&mut self, place: usize, request: StoreRequest) {
        self.places.insert(request.rank, place);
        let Some(store) = &mut self.store else {
            self.requests.push(request);
            return;
        };
        let replies = store.ask(0, request);
        self.put_replies(replies.into_iter().map(|(_, reply)| reply));
    }

    /// What engine 0 must be asked.
    pub fn take_requests(&mut self) -> Vec<StoreRequest> {
        std::mem::take(&mut self.requests)
    }

    /// Replies to ranks of this engine. One that never asked gets none.
    pub fn put_replies(&mut self, replies: impl Iterator<Item = StoreReply>) {
        for reply in replies {
            if let Some(place) = self.places.get(&reply.rank) {
                self.replies[*place].push(reply);
            }
        }
    }

    /// Replies to the ranks of a seat.
    pub fn take_replies(&mut self, place: usize) -> Vec<StoreReply> {
        std::mem::take(&mut self.replies[place])
    }
}
