//! Each rule of the wire, and the error that names it.

use plait_proto::{
    Adjustment, DecodeRow, Fail, Frames, Kind, LogprobRecords, MAX_FRAME_BYTES, MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES, MAX_TEXT_BYTES, Malformed, MaskedRow, Message, NewMask, NewSlot, OtherPage,
    Plan, PooledSlot, Pooling, PrefillRow, RestoredSlot, SamplingParams, SavedSlot, ScoredId,
    StepMasks, StepResult, TokenBias, TrimmedSlot, decode, encode,
};

fn plan() -> Plan {
    Plan {
        step: 5,
        prefill: vec![PrefillRow {
            slot: 1,
            start: 0,
            length: 2,
            is_last_chunk: false,
            lookahead: true,
        }],
        decode: vec![DecodeRow {
            slot: 0,
            start: 9,
            length: 1,
        }],
        token_ids: vec![7, 8, 9],
        ..Plan::default()
    }
}

fn result() -> StepResult {
    StepResult {
        num_accepted: vec![1, 2],
        token_ids: vec![7, 8, 9],
        ..StepResult::default()
    }
}

/// What the receiver says to `message` after `break_it`.
fn refusal(message: impl Into<Message>, break_it: impl FnOnce(&mut Frames)) -> Malformed {
    let mut frames = encode(&message.into());
    break_it(&mut frames);
    decode(&frames).unwrap_err()
}

/// A frame of so many words, where each record has `record` words.
fn cut_record(kind: Kind, frame: usize, [given, record]: [usize; 2]) -> Malformed {
    Malformed::CutRecord {
        kind,
        frame,
        given,
        record,
    }
}

#[test]
fn the_number_of_frames_is_that_of_the_kind() {
    assert_eq!(
        decode::<&[u8]>(&[]),
        Err(Malformed::TooFewFrames { given: 0 })
    );
    assert_eq!(
        decode(&[[3]; 14]),
        Err(Malformed::TooManyFrames {
            given: 14,
            limit: 13
        })
    );
    let short = refusal(plan(), |frames| frames.truncate(5));
    assert_eq!(
        short,
        Malformed::FrameCount {
            kind: Kind::Plan,
            given: 5
        }
    );
    assert_eq!(short.to_string(), "Plan came in 5 frames; it has 6 to 13");
    let long = refusal(result(), |frames| frames.extend([Vec::new(), Vec::new()]));
    assert_eq!(
        long,
        Malformed::FrameCount {
            kind: Kind::StepResult,
            given: 8
        }
    );
    assert_eq!(
        long.to_string(),
        "StepResult came in 8 frames; it has 6 to 7"
    );
    let kind = Kind::StepResult;
    let empty = refusal(result(), |frames| frames.push(Vec::new()));
    assert_eq!(empty, Malformed::EmptyLastFrame { kind, frame: 6 });
    let pooled = Plan {
        pooled_slots: vec![PooledSlot {
            slot: 3,
            pooling: Pooling::Last,
        }],
        ..plan()
    };
    let unknown = refusal(pooled, |frames| frames[12][4] = 4);
    assert_eq!(unknown, Malformed::UnknownPooling { slot: 3, word: 4 });
}

#[test]
fn the_kind_is_one_known_byte() {
    let kind = |bytes: &[u8]| refusal(plan(), |frames| frames[0] = bytes.to_vec());
    assert_eq!(kind(&[]), Malformed::KindSize { bytes: 0 });
    assert_eq!(kind(&[3, 3]), Malformed::KindSize { bytes: 2 });
    assert_eq!(kind(&[0]), Malformed::UnknownKind { byte: 0 });
    assert_eq!(kind(&[16]), Malformed::UnknownKind { byte: 16 });
}

#[test]
fn frames_have_caps() {
    let header = refusal(plan(), |frames| frames[1] = vec![0; MAX_HEADER_BYTES + 1]);
    let too_large = |frame, bytes, limit| Malformed::FrameTooLarge {
        frame,
        bytes,
        limit,
    };
    assert_eq!(header, too_large(1, MAX_HEADER_BYTES + 1, MAX_HEADER_BYTES));
    let array = refusal(plan(), |frames| frames[5] = vec![0; MAX_FRAME_BYTES + 4]);
    assert_eq!(array, too_large(5, MAX_FRAME_BYTES + 4, MAX_FRAME_BYTES));
    let broken = refusal(plan(), |frames| {
        frames[3] = vec![0; MAX_FRAME_BYTES];
        frames[5] = vec![0; MAX_FRAME_BYTES];
    });
    let Malformed::MessageTooLarge { bytes, limit } = broken else {
        panic!("another rule was broken: {broken}");
    };
    assert!(bytes > limit && limit == MAX_MESSAGE_BYTES);
    let largest = Plan {
        freed_slots: vec![1; MAX_FRAME_BYTES / 4],
        ..plan()
    };
    assert_eq!(decode(&encode(&largest.clone().into())), Ok(largest.into()));
}

#[test]
fn arrays_are_whole_words() {
    let broken = refusal(plan(), |frames| frames[5] = vec![0; 6]);
    assert_eq!(broken, Malformed::NotWords { frame: 5, bytes: 6 });
}

#[test]
fn rows_are_as_many_as_the_header_says() {
    let broken = refusal(plan(), |frames| frames[2].truncate(20));
    let (kind, frame) = (Kind::Plan, 2);
    assert_eq!(
        broken,
        Malformed::WordCount {
            kind,
            frame,
            given: 5,
            expected: 6
        }
    );
}

#[test]
fn token_ids_are_those_of_the_chunks_and_lookaheads() {
    let broken = refusal(plan(), |frames| frames[3].truncate(8));
    let (kind, frame) = (Kind::Plan, 3);
    assert_eq!(
        broken,
        Malformed::WordCount {
            kind,
            frame,
            given: 2,
            expected: 3
        }
    );
}

#[test]
fn appended_pages_are_pairs() {
    let broken = refusal(plan(), |frames| frames[4] = vec![0; 12]);
    assert_eq!(broken, cut_record(Kind::Plan, 4, [3, 2]));
}

/// A replica of two page kinds, whose decode row has two drafts.
fn plan_of_two_kinds() -> Plan {
    Plan {
        decode: vec![DecodeRow {
            slot: 0,
            start: 9,
            length: 3,
        }],
        other_pages: vec![OtherPage {
            kind: 1,
            slot: 1,
            page: 4,
        }],
        trimmed_slots: vec![TrimmedSlot {
            kind: 0,
            slot: 0,
            num_pages: 1,
        }],
        ..plan()
    }
}

const SAVED_SLOT: SavedSlot = SavedSlot {
    slot: 0,
    position: 64,
    snapshot: 2,
};

#[test]
fn optional_frames_are_left_out_while_they_are_empty() {
    let whole = plan_of_two_kinds();
    let without_trims = Plan {
        trimmed_slots: Vec::new(),
        ..whole.clone()
    };
    let without_other_pages = Plan {
        other_pages: Vec::new(),
        ..whole.clone()
    };
    let with_scored_ids = Plan {
        scored_ids: vec![ScoredId { slot: 0, id: 7 }],
        ..plan()
    };
    let with_saved_slots = Plan {
        saved_slots: vec![SAVED_SLOT],
        ..plan()
    };
    let with_pooled_slots = Plan {
        pooled_slots: vec![PooledSlot {
            slot: 3,
            pooling: Pooling::Mean,
        }],
        ..plan()
    };
    for (plan, num_frames) in [
        (plan(), 6),
        (with_saved_slots, 12),
        (with_pooled_slots, 13),
        (with_scored_ids, 10),
        (without_trims, 7),
        (without_other_pages, 8),
        (whole, 8),
    ] {
        let frames = encode(&plan.clone().into());
        assert_eq!(frames.len(), num_frames);
        assert_eq!(decode(&frames), Ok(plan.into()));
    }
    for (frame, message) in [(6, plan()), (7, plan_of_two_kinds())] {
        let broken = refusal(message, |frames| {
            frames.truncate(frame);
            frames.push(Vec::new());
        });
        let kind = Kind::Plan;
        assert_eq!(broken, Malformed::EmptyLastFrame { kind, frame });
    }
}

#[test]
fn optional_frames_hold_whole_records_of_their_kinds() {
    for frame in [6, 7] {
        let broken = refusal(plan_of_two_kinds(), |frames| frames[frame].truncate(8));
        assert_eq!(broken, cut_record(Kind::Plan, frame, [2, 3]));
    }
    let with_slot_state = Plan {
        restored_slots: vec![RestoredSlot {
            slot: 0,
            snapshot: 1,
        }],
        saved_slots: vec![SAVED_SLOT],
        ..plan()
    };
    for (frame, record) in [(10, 2), (11, 3)] {
        let broken = refusal(with_slot_state.clone(), |frames| frames[frame].truncate(4));
        assert_eq!(broken, cut_record(Kind::Plan, frame, [1, record]));
    }
    let broken = refusal(plan_of_two_kinds(), |frames| frames[6][0] = 0);
    assert_eq!(broken, Malformed::FirstPageKind { slot: 1 });
}

#[test]
fn adjustments_are_whole_and_finite() {
    let asked = Adjustment {
        slot: 1,
        bias: vec![TokenBias { id: 3, bias: 0.5 }],
        bad_words: vec![vec![7, 8]],
        ..Adjustment::default()
    };
    let plan = || Plan {
        adjustments: vec![asked.clone(), asked.clone()],
        ..plan()
    };
    let frames = encode(&plan().into());
    assert_eq!(
        (frames.len(), frames[8].len()),
        (9, 2 * 4 * asked.num_words())
    );
    assert_eq!(decode(&frames), Ok(plan().into()));
    let (frame, whole) = (8, 2 * asked.num_words());
    for given in (1..whole).filter(|num| *num != asked.num_words()) {
        let broken = refusal(plan(), |frames| frames[8].truncate(4 * given));
        assert_eq!(broken, Malformed::CutAdjustment { frame, given });
    }
    let last_length = 4 * (whole - 3);
    let empty = refusal(plan(), |frames| frames[8][last_length] = 0);
    assert_eq!(
        empty,
        Malformed::CutAdjustment {
            frame,
            given: whole
        }
    );
    for (word, name) in [
        (1, "presence_penalty"),
        (2, "frequency_penalty"),
        (3, "repetition_penalty"),
        (12, "bias"),
    ] {
        let nan = f32::NAN.to_le_bytes();
        let broken = refusal(plan(), |frames| {
            frames[8][4 * word..][..4].copy_from_slice(&nan);
        });
        assert_eq!(
            broken.to_string(),
            format!("slot 1: {name} is NaN; a finite number is needed")
        );
    }
    let huge = refusal(plan(), |frames| frames[8][4 * 5..4 * 11].fill(255));
    assert_eq!(
        huge,
        Malformed::CutAdjustment {
            frame,
            given: whole
        }
    );
}

#[test]
fn decode_rows_have_all_their_lengths_or_none() {
    let broken = refusal(plan_of_two_kinds(), |frames| frames[2].truncate(20));
    let (kind, frame, given, expected) = (Kind::Plan, 2, 5, 6);
    assert_eq!(
        broken,
        Malformed::WordCount {
            kind,
            frame,
            given,
            expected
        }
    );
    let broken = refusal(plan_of_two_kinds(), |frames| frames[2][24] = 0);
    assert_eq!(broken, Malformed::EmptyDecodeRow { row: 0 });
}

#[test]
fn a_chunk_has_tokens_and_known_flags() {
    let empty = refusal(plan(), |frames| frames[2][8] = 0);
    assert_eq!(empty, Malformed::EmptyChunk { row: 0 });
    let flagged = refusal(plan(), |frames| frames[2][12] = 4);
    assert_eq!(flagged, Malformed::UnknownFlags { row: 0, flags: 4 });
}

#[test]
fn sampling_parameters_are_finite() {
    let sampling = |temperature, top_p| NewSlot {
        slot: 3,
        next_output: 0,
        sampling: SamplingParams {
            temperature,
            top_p,
            ..SamplingParams::default()
        },
    };
    for (new_slot, name) in [
        (sampling(f64::NAN, 1.0), "temperature"),
        (sampling(1.0, f64::INFINITY), "top_p"),
    ] {
        let broken = refusal(
            Plan {
                new_slots: vec![new_slot],
                ..plan()
            },
            |_| (),
        );
        assert!(matches!(broken, Malformed::NotFinite { slot: 3, field, .. } if field == name));
    }
}

#[test]
fn the_tokens_of_a_result_are_those_that_its_rows_accepted() {
    let missing = refusal(result(), |frames| frames[3].truncate(4));
    let (kind, frame) = (Kind::StepResult, 3);
    assert_eq!(
        missing,
        Malformed::WordCount {
            kind,
            frame,
            given: 1,
            expected: 3
        }
    );
}

#[test]
fn masks_are_whole_records_of_the_length_that_their_header_says() {
    let masks = StepMasks {
        num_mask_words: 2,
        masked: vec![MaskedRow {
            row: 0,
            position: 0,
            mask: 1,
        }],
        new_masks: vec![NewMask {
            mask: 1,
            words: [3, 4].into(),
        }],
        ..StepMasks::default()
    };
    for (frame, record) in [(2, 3), (4, 3)] {
        let cut = refusal(masks.clone(), |frames| frames[frame].truncate(8));
        assert_eq!(cut, cut_record(Kind::StepMasks, frame, [2, record]));
    }
}

#[test]
fn the_header_is_the_whole_array_and_no_more() {
    for broken in [
        refusal(plan(), |frames| frames[1].truncate(3)),
        refusal(plan(), |frames| frames[1].push(0)),
        refusal(plan(), |frames| frames[1] = vec![0x92, 1, 2]),
        refusal(plan(), |frames| frames[1].clear()),
    ] {
        assert!(
            matches!(
                broken,
                Malformed::Header {
                    kind: Kind::Plan,
                    ..
                }
            ),
            "{broken}"
        );
    }
}

#[test]
fn fields_that_came_later_are_ignored() {
    let heartbeat = vec![vec![8], vec![0x94, 1, 2, 0x91, 3, 0xa1, b'x']];
    assert_eq!(
        decode(&heartbeat),
        Ok(plait_proto::Heartbeat { rank: 1, step: 2 }.into())
    );
    let decision = [0x99, 1, 0, 0, 0xc0, 0xc4, 0, 0xc2, 0xc2, 0xc4, 0, 9];
    let plan = [&[0x97, 1, 0, 0, 0x90][..], &decision, &[0xc2, 9]].concat();
    let empty = Vec::new;
    let decoded = decode(&[vec![3], plan, empty(), empty(), empty(), empty()]).unwrap();
    assert!(matches!(
        decoded,
        Message::Plan(Plan {
            step: 1,
            decision: Some(_),
            ..
        })
    ));
}

#[test]
fn unknown_modes_and_exit_codes_are_named() {
    let decision = vec![vec![6], vec![0x97, 1, 4, 0, 0xc0, 0xc4, 0, 0xc2, 0xc2]];
    let refused = decode(&decision).unwrap_err().to_string();
    assert!(refused.contains("mode is 4; 0 to 3 are known"), "{refused}");
    let fail = vec![vec![9], vec![0x93, 0, 0, 0xa0]];
    let refused = decode(&fail).unwrap_err().to_string();
    assert!(refused.contains("code is 0; 1 to 5 are known"), "{refused}");
}

#[test]
fn a_reason_quotes_little_of_what_the_peer_sent() {
    let text = [&[0xdb, 0, 1, 0, 0][..], &[b'a'; 1 << 16]].concat();
    let Err(Malformed::Header { reason, .. }) = decode(&[vec![8], text]) else {
        panic!("a text is no array")
    };
    assert!(
        reason.starts_with("invalid type: string") && reason.len() <= 256,
        "{reason}"
    );
}

#[test]
fn strings_are_cut_by_the_sender_and_refused_by_the_receiver() {
    let reason = "ü".repeat(MAX_TEXT_BYTES);
    let fail = Fail {
        rank: 0,
        code: plait_proto::ExitCode::Bug,
        reason,
    };
    let Message::Fail(received) = decode(&encode(&fail.into())).unwrap() else {
        panic!("a Fail")
    };
    assert_eq!(received.reason, "ü".repeat(MAX_TEXT_BYTES / 2));
    let text = [
        &[0x93, 0, 1, 0xda, 0x10, 0x01][..],
        &[b'a'; MAX_TEXT_BYTES + 1],
    ]
    .concat();
    let refused = decode(&[vec![9], text]).unwrap_err().to_string();
    assert!(
        refused.contains("4097 bytes; 4096 are allowed"),
        "{refused}"
    );
}

#[test]
fn records_are_taken_with_the_k_of_their_request() {
    let words = [
        (-0.5_f32).to_bits(),
        2,
        7,
        8,
        (-0.25_f32).to_bits(),
        (-0.5_f32).to_bits(),
        0,
        1,
    ];
    let mut records = LogprobRecords::new(&words);
    let first = records.take(2).unwrap();
    assert_eq!(
        (first.logprob, first.rank, first.top_ids),
        (-0.5, 2, &[7, 8][..])
    );
    assert_eq!(first.top_logprobs().collect::<Vec<_>>(), [-0.25, -0.5]);
    assert!(
        records.take(1).is_none(),
        "a record of one best token has four words"
    );
    assert_eq!(records.take(0).unwrap().rank, 1);
    assert!(records.is_empty());
}
