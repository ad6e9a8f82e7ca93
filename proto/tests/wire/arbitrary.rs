//! Any well-formed message.

use plait_proto::{
    Adjustment, AppendedPage, Bye, CapturedSize, Decision, DecodeRow, Drain, ExitCode, Fact, Fail,
    ForwardDone, Heartbeat, Hello, Join, MaskedRow, Message, Mode, NewMask, NewSlot, OtherPage,
    PageKind, Plan, PooledSlot, Pooling, PrefillRow, PromptCounts, RestoredSlot, SamplingParams,
    SavedSlot, ScoredId, SlotState, StepMasks, StepResult, StoreOperation, StoreReply,
    StoreRequest, TokenBias, TrimmedSlot, Vote, Welcome,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

pub fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        hello().prop_map(Message::Hello),
        welcome().prop_map(Message::Welcome),
        plan().prop_map(Message::Plan),
        step_result().prop_map(Message::StepResult),
        vote().prop_map(Message::Vote),
        decision().prop_map(Message::Decision),
        Just(Message::Drain(Drain {})),
        (any::<u32>(), any::<u64>()).prop_map(|(rank, step)| Heartbeat { rank, step }.into()),
        fail().prop_map(Message::Fail),
        (any::<u32>(), any::<u64>()).prop_map(|(rank, num_steps)| Bye { rank, num_steps }.into()),
        join().prop_map(Message::Join),
        store_request().prop_map(Message::StoreRequest),
        store_reply().prop_map(Message::StoreReply),
        step_masks().prop_map(Message::StepMasks),
        any::<u64>().prop_map(|step| ForwardDone { step }.into()),
    ]
}

fn hello() -> impl Strategy<Value = Hello> {
    let fingerprints = (any::<u32>(), any::<[u8; 16]>(), any::<[u8; 16]>());
    let place = (any::<u32>(), any::<u32>(), any::<u32>());
    let device = (
        ".{0,40}",
        ".{0,40}",
        any::<u32>(),
        any::<u64>(),
        any::<u64>(),
    );
    let optional = (
        vec(page_kind(), 0..3),
        vec(captured_size(), 0..3),
        option::of(slot_state()),
    );
    (fingerprints, place, device, optional).prop_map(|(fingerprints, place, device, optional)| {
        let (other_kinds, graphs, slot_state) = optional;
        let (protocol, schema, config) = fingerprints;
        let (rank, world, pid) = place;
        let (device, dtype, num_pages, page_bytes, weight_bytes) = device;
        Hello {
            protocol,
            schema,
            config,
            rank,
            world,
            pid,
            device,
            dtype,
            num_pages,
            page_bytes,
            weight_bytes,
            other_kinds,
            graphs,
            slot_state,
        }
    })
}

fn slot_state() -> impl Strategy<Value = SlotState> {
    (any::<[u64; 2]>(), any::<u32>()).prop_map(|([slot_bytes, snapshot_bytes], num_snapshots)| {
        SlotState {
            slot_bytes,
            snapshot_bytes,
            num_snapshots,
        }
    })
}

fn captured_size() -> impl Strategy<Value = CapturedSize> {
    (any::<[u32; 3]>(), option::of(any::<u32>())).prop_map(
        |([prompt_tokens, prompt_rows, decode_rows], context_tokens)| CapturedSize {
            prompt_tokens,
            prompt_rows,
            decode_rows,
            context_tokens,
        },
    )
}

fn welcome() -> impl Strategy<Value = Welcome> {
    (any::<[u32; 7]>(), vec(page_kind(), 0..3), 0..3u32).prop_map(
        |(
            [
                num_slots,
                num_pages,
                max_batch_tokens,
                max_rows,
                replica,
                num_replicas,
                credit,
            ],
            other_kinds,
            num_snapshots,
        )| Welcome {
            num_slots,
            num_pages,
            max_batch_tokens,
            max_rows,
            replica,
            num_replicas,
            credit,
            other_kinds,
            num_snapshots,
        },
    )
}

fn page_kind() -> impl Strategy<Value = PageKind> {
    (any::<[u32; 2]>(), any::<u64>()).prop_map(|([page_size, num_pages], page_bytes)| PageKind {
        page_size,
        num_pages,
        page_bytes,
    })
}

fn vote() -> impl Strategy<Value = Vote> {
    let prompts = option::of(any::<[u32; 2]>());
    let graphs = vec(captured_size(), 0..4);
    let fields = (
        any::<[u32; 4]>(),
        any::<u64>(),
        any::<[bool; 4]>(),
        prompts,
        graphs,
    );
    fields.prop_map(|(counts, step, bits, prompts, graphs)| {
        let [replica, num_prefill_tokens, num_decode_rows, num_tokens] = counts;
        let [wants_mixed, can_graph, idle, draining] = bits;
        Vote {
            replica,
            step,
            num_prefill_tokens,
            num_decode_rows,
            num_tokens,
            wants_mixed,
            can_graph,
            idle,
            draining,
            prompts: prompts.map(|[num_rows, num_context_tokens]| PromptCounts {
                num_rows,
                num_context_tokens,
            }),
            graphs,
        }
    })
}

fn decision() -> impl Strategy<Value = Decision> {
    let mode = select(vec![Mode::Idle, Mode::Prefill, Mode::Decode, Mode::Mixed]);
    let bucket = option::of(any::<u32>());
    (
        any::<u64>(),
        mode,
        any::<u32>(),
        bucket,
        [vec(any::<u8>(), 0..20), vec(any::<u8>(), 0..20)],
        any::<[bool; 2]>(),
    )
        .prop_map(
            |(step, mode, pad_tokens, graph_bucket, bytes, [stop, draining])| {
                let [dummy_replicas, tokens] = bytes;
                Decision {
                    step,
                    mode,
                    pad_tokens,
                    graph_bucket,
                    dummy_replicas,
                    stop,
                    draining,
                    tokens,
                }
            },
        )
}

fn join() -> impl Strategy<Value = Join> {
    let fingerprints = (any::<u32>(), any::<[u8; 16]>(), any::<[u8; 16]>());
    let facts = vec(fact(), 0..4);
    (fingerprints, any::<[u32; 4]>(), facts).prop_map(
        |((protocol, schema, config), place, facts)| {
            let [engine, num_engines, first_replica, num_replicas] = place;
            Join {
                protocol,
                schema,
                config,
                engine,
                num_engines,
                first_replica,
                num_replicas,
                facts,
            }
        },
    )
}

fn fact() -> impl Strategy<Value = Fact> {
    (".{0,30}", ".{0,30}").prop_map(|(name, value)| Fact { name, value })
}

fn store_request() -> impl Strategy<Value = StoreRequest> {
    let operation = select(vec![
        StoreOperation::Set,
        StoreOperation::Add,
        StoreOperation::Get,
        StoreOperation::Find,
    ]);
    let asker = (any::<u32>(), any::<u64>(), any::<bool>());
    (asker, operation, ".{0,300}", vec(any::<u8>(), 0..300)).prop_map(
        |((rank, id, of_group), operation, key, value)| StoreRequest {
            rank,
            id,
            of_group,
            operation,
            key,
            value,
        },
    )
}

fn store_reply() -> impl Strategy<Value = StoreReply> {
    let value = option::of(vec(any::<u8>(), 0..300));
    (any::<u32>(), any::<u64>(), value).prop_map(|(rank, id, value)| StoreReply { rank, id, value })
}

fn fail() -> impl Strategy<Value = Fail> {
    let code = select(vec![
        ExitCode::Bug,
        ExitCode::Settings,
        ExitCode::Hardware,
        ExitCode::ModelFiles,
        ExitCode::RankLost,
    ]);
    (any::<u32>(), code, ".{0,300}").prop_map(|(rank, code, reason)| Fail { rank, code, reason })
}

pub fn plan() -> impl Strategy<Value = Plan> {
    let header = (
        any::<u64>(),
        vec(new_slot(), 0..5),
        option::of(decision()),
        any::<bool>(),
    );
    let rows = (vec(prefill_row(), 0..5), vec(decode_row(), 0..20));
    let changes = (
        vec(appended_page(), 0..10),
        vec(any::<u32>(), 0..5),
        vec(other_page(), 0..4),
        vec(trimmed_slot(), 0..4),
        vec(adjustment(), 0..3),
        vec(scored_id(), 0..3),
        vec(restored_slot(), 0..3),
        vec(saved_slot(), 0..3),
        vec(pooled_slot(), 0..3),
    );
    (header, rows, changes).prop_flat_map(|(header, rows, changes)| {
        let num_token_ids: u64 = rows.0.iter().map(PrefillRow::num_token_ids).sum();
        let num_token_ids = usize::try_from(num_token_ids).expect("five short chunks");
        vec(any::<u32>(), num_token_ids).prop_map(move |token_ids| Plan {
            step: header.0,
            new_slots: header.1.clone(),
            decision: header.2.clone(),
            prefill: rows.0.clone(),
            decode: rows.1.clone(),
            token_ids,
            appended_pages: changes.0.clone(),
            freed_slots: changes.1.clone(),
            other_pages: changes.2.clone(),
            trimmed_slots: changes.3.clone(),
            adjustments: changes.4.clone(),
            scored_ids: changes.5.clone(),
            restored_slots: changes.6.clone(),
            saved_slots: changes.7.clone(),
            pooled_slots: changes.8.clone(),
            awaits_masks: header.3,
        })
    })
}

fn pooled_slot() -> impl Strategy<Value = PooledSlot> {
    any::<(u32, bool)>().prop_map(|(slot, is_mean)| PooledSlot {
        slot,
        pooling: if is_mean {
            Pooling::Mean
        } else {
            Pooling::Last
        },
    })
}

fn restored_slot() -> impl Strategy<Value = RestoredSlot> {
    any::<[u32; 2]>().prop_map(|[slot, snapshot]| RestoredSlot { slot, snapshot })
}

fn saved_slot() -> impl Strategy<Value = SavedSlot> {
    any::<[u32; 3]>().prop_map(|[slot, position, snapshot]| SavedSlot {
        slot,
        position,
        snapshot,
    })
}

fn new_slot() -> impl Strategy<Value = NewSlot> {
    let finite = || -1e300..1e300;
    let records = (option::of(any::<u32>()), option::of(any::<u32>()));
    (
        any::<[u32; 3]>(),
        finite(),
        finite(),
        finite(),
        any::<u64>(),
        records,
    )
        .prop_map(
            |([slot, next_output, top_k], temperature, top_p, min_p, seed, records)| NewSlot {
                slot,
                next_output,
                sampling: SamplingParams {
                    temperature,
                    top_k,
                    top_p,
                    min_p,
                    seed,
                    logprobs: records.0,
                    prompt_logprobs: records.1,
                },
            },
        )
}

fn prefill_row() -> impl Strategy<Value = PrefillRow> {
    (any::<[u32; 2]>(), 1..40u32, any::<[bool; 2]>()).prop_map(
        |([slot, start], length, [is_last_chunk, lookahead])| PrefillRow {
            slot,
            start,
            length,
            is_last_chunk,
            lookahead,
        },
    )
}

fn decode_row() -> impl Strategy<Value = DecodeRow> {
    (any::<[u32; 2]>(), prop_oneof![3 => Just(1), 1 => 1..5_u32]).prop_map(
        |([slot, start], length)| DecodeRow {
            slot,
            start,
            length,
        },
    )
}

fn appended_page() -> impl Strategy<Value = AppendedPage> {
    any::<[u32; 2]>().prop_map(|[slot, page]| AppendedPage { slot, page })
}

fn other_page() -> impl Strategy<Value = OtherPage> {
    (1..u32::MAX, any::<[u32; 2]>()).prop_map(|(kind, [slot, page])| OtherPage { kind, slot, page })
}

fn trimmed_slot() -> impl Strategy<Value = TrimmedSlot> {
    any::<[u32; 3]>().prop_map(|[kind, slot, num_pages]| TrimmedSlot {
        kind,
        slot,
        num_pages,
    })
}

fn scored_id() -> impl Strategy<Value = ScoredId> {
    any::<(u32, u32)>().prop_map(|(slot, id)| ScoredId { slot, id })
}

fn adjustment() -> impl Strategy<Value = Adjustment> {
    let finite = || -1e30..1e30_f32;
    let ids = || vec(any::<u32>(), 0..4);
    let bias = (any::<u32>(), finite()).prop_map(|(id, bias)| TokenBias { id, bias });
    let lists = (
        [ids(), ids(), ids(), ids()],
        vec(bias, 0..4),
        vec(vec(any::<u32>(), 1..4), 0..3),
    );
    (any::<[u32; 2]>(), [finite(), finite(), finite()], lists).prop_map(
        |([slot, min_tokens], penalties, (ids, bias, bad_words))| {
            let [presence_penalty, frequency_penalty, repetition_penalty] = penalties;
            let [prompt_ids, output_ids, allowed_ids, end_ids] = ids;
            Adjustment {
                slot,
                presence_penalty,
                frequency_penalty,
                repetition_penalty,
                min_tokens,
                prompt_ids,
                output_ids,
                bias,
                allowed_ids,
                end_ids,
                bad_words,
            }
        },
    )
}

fn step_result() -> impl Strategy<Value = StepResult> {
    let accepted = vec(vec(any::<u32>(), 0..4), 0..20);
    let records = || vec(any::<u32>(), 0..50);
    (any::<[u64; 2]>(), accepted, records(), records(), records()).prop_map(
        |([step, elapsed_us], accepted, logprobs, prompt_logprobs, pooled)| StepResult {
            step,
            elapsed_us,
            num_accepted: accepted
                .iter()
                .map(|ids| u32::try_from(ids.len()).expect("at most 3"))
                .collect(),
            token_ids: accepted.concat(),
            logprobs,
            prompt_logprobs,
            pooled,
        },
    )
}

fn step_masks() -> impl Strategy<Value = StepMasks> {
    let masked = any::<[u32; 3]>().prop_map(|[row, position, mask]| MaskedRow {
        row,
        position,
        mask,
    });
    let lists = (vec(masked, 0..5), vec(any::<u32>(), 0..5));
    (any::<u64>(), any::<bool>(), 0..5_u32, lists).prop_flat_map(
        |(step, is_last, num_mask_words, (masked, left_out))| {
            let words = vec(any::<u32>(), num_mask_words as usize);
            let new_mask = (any::<u32>(), words).prop_map(|(mask, words)| NewMask {
                mask,
                words: words.into(),
            });
            vec(new_mask, 0..4).prop_map(move |new_masks| StepMasks {
                step,
                is_last,
                num_mask_words,
                masked: masked.clone(),
                left_out: left_out.clone(),
                new_masks,
            })
        },
    )
}
