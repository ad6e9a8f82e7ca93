//! The golden files, which both languages must read and write alike.

use plait_proto::{Kind, PlanEncoder, decode, encode};

use crate::golden_files;

#[test]
fn golden_frames_are_what_they_are_described_as() {
    for golden in golden_files::all() {
        let message =
            decode(&golden.frames).unwrap_or_else(|error| panic!("{}: {error}", golden.name));
        assert_eq!(
            serde_json::to_value(&message).unwrap(),
            golden.description,
            "{}",
            golden.name
        );
    }
}

#[test]
fn golden_frames_are_encoded_to_identical_bytes() {
    for golden in golden_files::all() {
        assert_eq!(
            encode(&decode(&golden.frames).unwrap()),
            golden.frames,
            "{}",
            golden.name
        );
    }
}

#[test]
fn a_plan_encoder_forgets_the_plan_before() {
    let mut encoder = PlanEncoder::default();
    for golden in golden_files::all() {
        if let plait_proto::Message::Plan(plan) = decode(&golden.frames).unwrap() {
            assert_eq!(encoder.encode(&plan), golden.frames, "{}", golden.name);
        }
    }
}

#[test]
fn every_kind_has_a_golden_file() {
    let first_bytes: Vec<u8> = golden_files::all()
        .iter()
        .map(|golden| golden.frames[0][0])
        .collect();
    for kind in Kind::ALL {
        assert!(first_bytes.contains(&(kind as u8)), "{kind:?}");
    }
}
