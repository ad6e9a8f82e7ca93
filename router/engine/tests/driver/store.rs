//! Ranks find each other by way of their engines.

use std::time::Duration;

use plait_engine::Timeouts;
use plait_proto::{Message, StoreOperation, StoreReply, StoreRequest};
use serde_json::json;

use crate::fake_worker::dial;
use crate::groups::{place, socket_directory};
use crate::harness::Harness;

/// A rank that does nothing but use the store.
struct Rank {
    socket: zmq::Socket,
    rank: u32,
}

impl Rank {
    fn of(harness: &Harness, replica: u32, rank: u32) -> Self {
        let socket = dial(harness.endpoint(replica), &format!("rank-{rank}"));
        socket.set_rcvtimeo(60_000).unwrap();
        Self { socket, rank }
    }

    fn ask(&self, of_group: bool, operation: StoreOperation, key: &str, value: &[u8]) {
        let request = StoreRequest {
            rank: self.rank,
            id: 5,
            of_group,
            operation,
            key: key.to_owned(),
            value: value.to_vec(),
        };
        let frames = plait_proto::encode(&request.into());
        self.socket.send_multipart(frames, 0).unwrap();
    }

    fn answer(&self) -> Option<Vec<u8>> {
        let frames = self.socket.recv_multipart(0).unwrap();
        match plait_proto::decode(&frames).unwrap() {
            Message::StoreReply(StoreReply { rank, id: 5, value }) if rank == self.rank => value,
            other => panic!("{other:?} is no answer"),
        }
    }
}

/// A value that the first rank sets reaches the second, which has waited for it.
fn is_told(of_group: bool, first: &Rank, second: &Rank) {
    second.ask(of_group, StoreOperation::Get, "address", b"");
    second.ask(of_group, StoreOperation::Add, "count", &1_i64.to_le_bytes());
    assert_eq!(second.answer().unwrap(), b"1", "asked before the other");
    first.ask(of_group, StoreOperation::Set, "address", b"host 1");
    assert_eq!(first.answer().unwrap(), b"");
    assert_eq!(second.answer().unwrap(), b"host 1");
    first.ask(of_group, StoreOperation::Add, "count", &1_i64.to_le_bytes());
    assert_eq!(first.answer().unwrap(), b"2");
}

#[test]
fn ranks_of_a_replica_share_a_store_of_their_own() {
    let harness = Harness::alone(
        &json!({"num_ranks": 2, "num_replicas": 2}),
        Timeouts::default(),
    );
    let ranks = [(0, 0), (0, 1), (1, 2)].map(|(replica, rank)| Rank::of(&harness, replica, rank));
    is_told(false, &ranks[0], &ranks[1]);
    ranks[2].ask(false, StoreOperation::Find, "address", b"");
    assert_eq!(ranks[2].answer(), None, "another replica's");
}

#[test]
fn ranks_of_all_replicas_of_a_group_share_one_store() {
    let (_directory, endpoint) = socket_directory();
    let engines = [0, 1].map(|engine| {
        let mut change = place(engine, 2, &endpoint);
        change["num_replicas"] = 2.into();
        Harness::alone(&change, Timeouts::default())
    });
    let ranks = |engine: usize| [0, 1].map(|rank| Rank::of(&engines[engine], rank, rank));
    let (first, second) = (ranks(0), ranks(1));
    is_told(true, &first[1], &second[1]);
    second[0].ask(true, StoreOperation::Get, "address", b"");
    assert_eq!(second[0].answer().unwrap(), b"host 1");
    first[0].ask(true, StoreOperation::Get, "back", b"");
    second[1].ask(true, StoreOperation::Set, "back", b"host 2");
    assert_eq!(first[0].answer().unwrap(), b"host 2");
}

#[test]
fn replicas_of_a_group_in_one_engine_share_one_store() {
    let mut change = place(0, 1, "");
    change["num_replicas"] = 2.into();
    let harness = Harness::alone(&change, Timeouts::default());
    let ranks = [0, 1].map(|rank| Rank::of(&harness, rank, rank));
    is_told(true, &ranks[0], &ranks[1]);
}

#[test]
fn a_rank_stores_small_values_and_for_itself_only() {
    for (claimed, num_bytes, words) in [(1, 0, "for rank 1"), (0, 40_000, "40000 bytes")] {
        let mut harness = Harness::alone(&json!({}), Timeouts::default());
        let mut rank = Rank::of(&harness, 0, 0);
        rank.rank = claimed;
        rank.ask(false, StoreOperation::Set, "key", &vec![0; num_bytes]);
        harness.wait_for_phase("failed");
        let reason = harness.status()["reason"].to_string();
        assert!(reason.contains(words), "{reason}");
    }
}

#[test]
fn a_store_serves_while_a_rank_is_waited_for() {
    let mut harness = Harness::alone(&json!({"num_ranks": 2}), Timeouts::default());
    harness.dial(|rank| (rank.rank, rank.world, rank.step) = (0, 2, Duration::ZERO));
    let late = Rank::of(&harness, 0, 1);
    late.ask(false, StoreOperation::Find, "nothing", b"");
    assert_eq!(late.answer(), None);
}
