//! The store in which ranks find each other: a replica's own, or that of its group.

use plait_proto::{StoreReply, StoreRequest};

use super::EventLoop;
use crate::store::MAX_VALUE_BYTES;

impl EventLoop {
    pub(super) fn ask_store(&mut self, rank: u32, request: StoreRequest) {
        if request.rank != rank || request.value.len() > MAX_VALUE_BYTES {
            let bytes = request.value.len();
            return self.lose_rank(
                rank,
                &format!(
                    "it asked for {bytes} bytes to be stored for rank {}; it may store {MAX_VALUE_BYTES} for itself",
                    request.rank
                ),
            );
        }
        let replies = match &mut self.driver.group {
            Some(group) if request.of_group => {
                group.ask_store(request);
                return self.send_group_replies();
            }
            _ => self.store.ask(0, request),
        };
        self.send_replies(replies.into_iter().map(|(_, reply)| reply));
    }

    /// What the group's store has answered to ranks of this replica.
    pub(super) fn send_group_replies(&mut self) {
        let group = self.driver.group.as_mut();
        let replies = group.map_or_else(Vec::new, super::Grouped::take_store_replies);
        self.send_replies(replies.into_iter());
    }

    fn send_replies(&mut self, replies: impl Iterator<Item = StoreReply>) {
        for reply in replies {
            let rank = reply.rank;
            let sent = self
                .driver
                .link
                .send(rank, &plait_proto::encode(&reply.into()));
            if let Err(error) = sent {
                return self.lose_rank(rank, &format!("it cannot be reached: {error}"));
            }
        }
    }
}
