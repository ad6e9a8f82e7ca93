//! Ranks on other hosts: TCP with CURVE, each key as its own ranks, and a closed link that counts as the rank's end.

use std::sync::Arc;
use std::time::Duration;

use plait_engine::Timeouts;
use plait_proto::Heartbeat;
use serde_json::json;
use zmq::{CurveKeyPair, z85_encode};

use crate::fake_worker::{DiallerKeys, dial};
use crate::harness::Harness;

const DROPPED: &str = "plait_link_malformed_total";

/// An engine of one replica with ranks 0 to 2. Rank 0 is here, and each of the others on a host of its own.
struct Hosts {
    harness: Harness,
    /// Of each host, and of one that is not listed.
    keys: [DiallerKeys; 3],
}

impl Hosts {
    /// No rank sends heartbeats, and only a test moves the engine's clock.
    fn start() -> Self {
        let server = CurveKeyPair::new().unwrap();
        let keys = [(); 3].map(|()| keys(&server));
        let allowed: Vec<_> = (1..3)
            .zip(&keys)
            .map(|(rank, own)| json!({"public": z85_encode(&own.public).unwrap(), "ranks": [rank]}))
            .collect();
        let remote = json!({
            "endpoints": ["tcp://127.0.0.1:*"], "secret": z85_encode(&server.secret_key).unwrap(), "allowed": allowed,
        });
        let change = json!({"num_ranks": 3, "remote_workers": remote});
        // A lost rank ends the engine at once: no better reason is waited for.
        let timeouts = Timeouts {
            error_grace: Duration::ZERO,
            ..Timeouts::default()
        };
        let mut harness = Harness::on_clock(&change, timeouts, &Arc::default());
        harness.dial(|rank| (rank.world, rank.heartbeats) = (3, false));
        Self { harness, keys }
    }

    /// A rank dials with the keys of a host, counted from 0.
    fn dial(&mut self, rank: u32, host: usize) {
        let endpoint = self.harness.engine.remote_endpoints()[0].clone().unwrap();
        let keys = self.keys[host].clone();
        self.harness.dial_at(&endpoint, |behavior| {
            (behavior.rank, behavior.world, behavior.answers) = (rank, 3, false);
            behavior.fault = Default::default();
            behavior.heartbeats = false;
            behavior.keys = Some(keys);
        });
    }

    /// All ranks are there.
    fn complete(&mut self) {
        self.dial(1, 0);
        self.dial(2, 1);
        self.harness.wait_for_phase("ready");
    }

    fn ready() -> Self {
        let mut all = Self::start();
        all.complete();
        all
    }

    /// Waits until something is dropped that a peer sends which is no rank.
    fn wait_for_dropped<T>(&mut self, send: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.harness.metric(DROPPED);
        let peer = send(self);
        self.harness.wait_until("something is dropped", |harness| {
            harness.metric(DROPPED) > before
        });
        peer
    }
}

fn keys(server: &CurveKeyPair) -> DiallerKeys {
    let own = CurveKeyPair::new().unwrap();
    DiallerKeys {
        server: server.public_key,
        public: own.public_key,
        secret: own.secret_key,
    }
}

#[test]
fn ranks_on_other_hosts_compute_with_those_here() {
    let mut all = Hosts::ready();
    all.harness.submit(1, "abc", &json!({"max_tokens": 3}));
    assert_eq!(all.harness.answer(1).text(), "def");
    all.harness.engine.drain();
    all.harness.wait_for_phase("stopped");
    assert!(
        all.harness
            .workers
            .iter()
            .all(|rank| rank.log().was_drained)
    );
    for rank in &all.harness.workers {
        assert_eq!(
            rank.log().plans.len(),
            all.harness.workers[0].log().plans.len()
        );
    }
}

#[test]
fn a_key_that_is_not_listed_gets_nothing_through() {
    let mut all = Hosts::start();
    all.dial(1, 2);
    all.complete();
    assert!(all.harness.workers[1].log().welcome.is_none());
    assert_eq!(all.harness.metric(DROPPED), 0.0);
}

#[test]
fn a_key_speaks_for_its_own_ranks_only() {
    let mut all = Hosts::start();
    for rank in [0, 1, 7] {
        all.wait_for_dropped(|all| all.dial(rank, 1));
        assert!(all.harness.workers.pop().unwrap().log().welcome.is_none());
    }
    assert_eq!(all.harness.status()["phase"], "loading");
}

#[test]
fn a_rank_of_another_host_is_not_taken_from_this_one() {
    let mut all = Hosts::start();
    let _squatter = all.wait_for_dropped(|all| {
        let squatter = dial(all.harness.endpoint(0), "rank-1");
        let said = plait_proto::encode(&Heartbeat { rank: 1, step: 0 }.into());
        squatter.send_multipart(said, 0).unwrap();
        squatter
    });
    all.complete();
}

#[test]
fn a_closed_link_counts_as_the_end_of_its_rank() {
    let mut all = Hosts::ready();
    drop(all.harness.workers.pop());
    all.harness.wait_for_phase("failed");
    let status = all.harness.status();
    assert_eq!(status["exit_code"], 5);
    let reason = status["reason"].as_str().unwrap();
    assert!(
        reason.contains("rank 2 was lost: its link was closed"),
        "{reason}"
    );
}

#[test]
fn a_rank_on_another_host_that_falls_silent_is_lost() {
    let mut all = Hosts::ready();
    all.harness.advance(Duration::from_millis(1600));
    all.harness
        .wait_until("a rank is late", |harness| harness.status()["late"] == true);
    all.harness.advance(Duration::from_millis(4300));
    assert_eq!(all.harness.status()["phase"], "ready");
    all.harness.advance(Duration::from_millis(100));
    all.harness.wait_for_phase("failed");
    let status = all.harness.status();
    assert_eq!(status["exit_code"], 5);
    let reason = status["reason"].as_str().unwrap();
    assert!(
        reason.contains("rank 1 was lost: no heartbeat for 6 s"),
        "{reason}"
    );
}
