//! Votes and decisions between the core's types and the wire's.

use plait_core::{Decision, Mode, ReplicaTokens, StepId, Vote};
use plait_proto::PromptCounts;

/// A vote as it is sent.
pub fn vote_to_wire(vote: &Vote) -> plait_proto::Vote {
    plait_proto::Vote {
        replica: vote.replica,
        step: vote.step.0,
        num_prefill_tokens: vote.num_prefill_tokens,
        num_decode_rows: vote.num_decode_rows,
        num_tokens: vote.num_tokens,
        wants_mixed: vote.is_mixed(),
        can_graph: vote.can_graph,
        idle: vote.idle,
        draining: vote.draining,
        prompts: (vote.num_prefill_rows > 0).then_some(PromptCounts {
            num_rows: vote.num_prefill_rows,
            num_context_tokens: vote.num_context_tokens,
        }),
        graphs: Vec::new(),
    }
}

/// A vote as it was cast; None if `wants_mixed` is not what its rows say.
pub fn vote_from_wire(vote: &plait_proto::Vote) -> Option<Vote> {
    let (num_prefill_rows, num_context_tokens) = match vote.prompts {
        Some(prompts) => (prompts.num_rows, prompts.num_context_tokens),
        None => (0, 0),
    };
    let cast = Vote {
        replica: vote.replica,
        step: StepId(vote.step),
        num_prefill_tokens: vote.num_prefill_tokens,
        num_prefill_rows,
        num_context_tokens,
        num_decode_rows: vote.num_decode_rows,
        num_tokens: vote.num_tokens,
        can_graph: vote.can_graph,
        idle: vote.idle,
        draining: vote.draining,
    };
    (vote.wants_mixed == cast.is_mixed()).then_some(cast)
}

/// A decision as it is sent, to engines and in plans.
pub fn decision_to_wire(decision: &Decision) -> plait_proto::Decision {
    plait_proto::Decision {
        step: decision.step.0,
        mode: match decision.mode {
            Mode::Idle => plait_proto::Mode::Idle,
            Mode::Prefill => plait_proto::Mode::Prefill,
            Mode::Decode => plait_proto::Mode::Decode,
            Mode::Mixed => plait_proto::Mode::Mixed,
        },
        pad_tokens: decision.pad_tokens,
        graph_bucket: decision.graph_bucket,
        dummy_replicas: bitmap(&decision.dummy_replicas),
        stop: decision.stop,
        draining: decision.draining,
        tokens: match decision.mode {
            Mode::Idle => Vec::new(),
            _ => little_endian(&decision.tokens),
        },
    }
}

/// A decision of a group of `num_replicas`, as it was made.
pub fn decision_from_wire(decision: &plait_proto::Decision, num_replicas: u32) -> Decision {
    Decision {
        step: StepId(decision.step),
        mode: match decision.mode {
            plait_proto::Mode::Idle => Mode::Idle,
            plait_proto::Mode::Prefill => Mode::Prefill,
            plait_proto::Mode::Decode => Mode::Decode,
            plait_proto::Mode::Mixed => Mode::Mixed,
        },
        tokens: match decision.mode {
            plait_proto::Mode::Idle => vec![ReplicaTokens::default(); num_replicas as usize],
            _ => from_little_endian(&decision.tokens),
        },
        pad_tokens: decision.pad_tokens,
        graph_bucket: decision.graph_bucket,
        dummy_replicas: set_bits(&decision.dummy_replicas),
        draining: decision.draining,
        stop: decision.stop,
    }
}

fn little_endian(tokens: &[ReplicaTokens]) -> Vec<u8> {
    let numbers = tokens.iter().flat_map(|of| [of.prefill, of.total]);
    numbers.flat_map(u32::to_le_bytes).collect()
}

fn from_little_endian(bytes: &[u8]) -> Vec<ReplicaTokens> {
    let (words, _) = bytes.as_chunks::<4>();
    let (pairs, _) = words.as_chunks::<2>();
    let read = |[prefill, total]: &[[u8; 4]; 2]| ReplicaTokens {
        prefill: u32::from_le_bytes(*prefill),
        total: u32::from_le_bytes(*total),
    };
    pairs.iter().map(read).collect()
}

/// Bytes up to the last one that has a bit.
fn bitmap(replicas: &[u32]) -> Vec<u8> {
    let num_bytes = replicas
        .iter()
        .max()
        .map_or(0, |last| *last as usize / 8 + 1);
    let mut bytes = vec![0; num_bytes];
    for replica in replicas {
        bytes[*replica as usize / 8] |= 1 << (replica % 8);
    }
    bytes
}

fn set_bits(bytes: &[u8]) -> Vec<u32> {
    let bits = (0..).zip(
        bytes
            .iter()
            .flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1)),
    );
    bits.filter(|(_, bit)| *bit == 1)
        .map(|(replica, _)| replica)
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_decision_survives_the_wire(
            step: u64,
            numbers: [u32; 2],
            bits: [bool; 3],
            dummies in proptest::collection::btree_set(0..1024u32, 0..20),
            tokens in proptest::collection::vec(any::<(u32, u32)>(), 0..20),
        ) {
            let [pad_tokens, bucket] = numbers;
            let [has_graph, draining, stop] = bits;
            let decision = Decision {
                step: StepId(step),
                mode: Mode::Decode,
                tokens: tokens
                    .into_iter()
                    .map(|(prefill, total)| ReplicaTokens { prefill, total })
                    .collect(),
                pad_tokens,
                graph_bucket: has_graph.then_some(bucket),
                dummy_replicas: dummies.into_iter().collect(),
                draining,
                stop,
            };
            prop_assert_eq!(decision_from_wire(&decision_to_wire(&decision), 20), decision);
        }
    }
}
