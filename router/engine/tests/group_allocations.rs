//! The bytes that a round allocates. Alone in its process, whose allocator it counts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::os::unix::fs::PermissionsExt;

use plait_core::{GraphSize, Micros, StepId, Vote};
use plait_engine::group::{Exchange, GroupSettings, GroupTimeouts, Role};
use plait_proto::{Join, Message, PROTOCOL, schema_fingerprint};

use crate::allocations::num_bytes_allocated;

#[path = "../../core/tests/core/allocations.rs"]
mod allocations;

const NUM_REPLICAS: u32 = 1024;

fn vote(replica: u32) -> Vote {
    Vote {
        replica,
        step: StepId(1),
        num_prefill_tokens: 0,
        num_prefill_rows: 0,
        num_context_tokens: 0,
        num_decode_rows: 1,
        num_tokens: 1,
        can_graph: true,
        idle: false,
        draining: false,
    }
}

fn say(socket: &zmq::Socket, message: impl Into<Message>) {
    socket
        .send_multipart(plait_proto::encode(&message.into()), 0)
        .unwrap();
}

/// Engine 1, which owns all replicas but one.
fn others(endpoint: &str) -> zmq::Socket {
    let socket = zmq::Context::new().socket(zmq::DEALER).unwrap();
    socket.set_sndhwm(0).unwrap();
    socket.connect(endpoint).unwrap();
    say(
        &socket,
        Join {
            protocol: PROTOCOL,
            schema: schema_fingerprint(),
            config: [0; 16],
            engine: 1,
            num_engines: 2,
            first_replica: 1,
            num_replicas: NUM_REPLICAS - 1,
            facts: Vec::new(),
        },
    );
    for replica in 1..NUM_REPLICAS {
        say(
            &socket,
            plait_proto::Vote {
                replica,
                step: 1,
                num_prefill_tokens: 0,
                num_decode_rows: 1,
                num_tokens: 1,
                wants_mixed: false,
                can_graph: true,
                idle: false,
                draining: false,
                prompts: None,
                graphs: vec![plait_proto::CapturedSize {
                    prompt_tokens: 0,
                    prompt_rows: 0,
                    decode_rows: 1,
                    context_tokens: None,
                }],
            },
        );
    }
    socket
}

/// If each vote copied all earlier ones, a round of 1,024 replicas would take 40 MB.
#[test]
fn a_round_costs_each_vote_the_same_however_many_replicas_vote() {
    let owners_only = std::fs::Permissions::from_mode(0o700);
    let directory = tempfile::Builder::new().permissions(owners_only).tempdir();
    let directory = directory.unwrap();
    let endpoint = format!("ipc://{}", directory.path().join("group").display());
    let settings = GroupSettings {
        role: Role::Coordinator {
            endpoint: endpoint.clone(),
            keys: None,
        },
        num_replicas: vec![1, NUM_REPLICAS - 1],
        config: [0; 16],
        facts: Vec::new(),
        graphs: vec![GraphSize::of_decode_rows(1)].into(),
        max_tokens: 1,
        timeouts: GroupTimeouts::default(),
    };
    let mut first = Exchange::new(settings, Micros(0)).unwrap();
    let _others = others(&endpoint);
    let num_bytes = num_bytes_allocated(|| {
        first.cast(&[vote(0)], Micros(0)).unwrap();
        let decision = loop {
            if let Some(decision) = first.receive(Micros(0)).unwrap() {
                break decision;
            }
            zmq::poll(&mut first.poll_items(), 60_000).unwrap();
        };
        assert_eq!(decision.graph_bucket, Some(1));
    });
    assert!(num_bytes < 2_000_000, "{num_bytes} bytes for a round");
}
