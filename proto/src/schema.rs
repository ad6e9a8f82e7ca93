//! `schema.txt`, whose fingerprint is in the handshake, lists the structs' fields.

use serde::Serialize;
use serde_json::Value;

use crate::kind::Kind;
use crate::message::Message;
use crate::plan::{Plan, PlanHeader};
use crate::result::{ResultHeader, StepResult};
use crate::step_masks::{MasksHeader, StepMasks};

const SCHEMA: &str = include_str!("../plait_proto/schema.txt");

/// Names of the fields that `schema.txt` lists under `heading`, frames after frame 1 left out.
fn listed(heading: &str) -> Vec<String> {
    let lines = SCHEMA.lines().skip_while(|line| *line != heading).skip(1);
    let fields = lines
        .take_while(|line| line.starts_with("  "))
        .map(str::trim);
    let fields = fields.filter(|line| !line.starts_with("frame "));
    fields
        .map(|line| line.split(' ').next().unwrap().to_owned())
        .collect()
}

fn num_listed_frames(heading: &str) -> usize {
    let lines = SCHEMA.lines().skip_while(|line| *line != heading).skip(1);
    let lines = lines.take_while(|line| line.starts_with("  "));
    2 + lines.filter(|line| line.starts_with("  frame ")).count()
}

fn names(fields: &impl Serialize) -> Vec<String> {
    let Value::Object(object) = serde_json::to_value(fields).unwrap() else {
        panic!("a struct is an object")
    };
    object
        .keys()
        .filter(|key| *key != "kind")
        .cloned()
        .collect()
}

fn golden(name: &str) -> Message {
    let path = format!("{}/golden/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_schema_lists_every_kind_with_its_byte_and_frames() {
    for kind in Kind::ALL {
        let heading = format!("{kind:?} = {}", kind as u8);
        assert!(SCHEMA.lines().any(|line| line == heading), "{heading}");
        assert_eq!(
            num_listed_frames(&heading),
            *kind.num_frames().end(),
            "{heading}"
        );
    }
}

#[test]
fn the_schema_lists_the_fields_of_plain_messages() {
    for name in [
        "hello_slot_state",
        "welcome_snapshots",
        "vote_graphs",
        "verdict_prompts",
        "drain",
        "beat",
        "fail",
        "bye",
        "join_facts",
        "store_request",
        "store_reply",
        "forward_done",
    ] {
        let message = golden(name);
        let heading = format!("{:?} = {}", message.kind(), message.kind() as u8);
        assert_eq!(listed(&heading), names(&message), "{heading}");
    }
}

#[test]
fn the_schema_lists_the_fields_of_headers_and_new_slots() {
    let Message::Plan(plan) = golden("plan_logprobs") else {
        panic!("a plan")
    };
    let masked = Plan {
        awaits_masks: true,
        ..Plan::default()
    };
    assert_eq!(listed("Plan = 3"), names(&PlanHeader::of(&masked)));
    assert_eq!(
        listed("StepResult = 4"),
        names(&ResultHeader::of(&StepResult::default()))
    );
    assert_eq!(
        listed("StepMasks = 14"),
        names(&MasksHeader::of(&StepMasks::default()))
    );
    assert_eq!(listed("NewSlot"), names(&plan.new_slots[0]));
    let Message::Hello(hello) = golden("hello_graphs") else {
        panic!("a hello")
    };
    assert_eq!(listed("PageKind"), names(&hello.other_kinds[0]));
    assert_eq!(listed("CapturedSize"), names(&hello.graphs[0]));
    let Message::Hello(hello) = golden("hello_slot_state") else {
        panic!("a hello")
    };
    assert_eq!(listed("SlotState"), names(&hello.slot_state.unwrap()));
    let Message::Join(join) = golden("join_facts") else {
        panic!("a join")
    };
    assert_eq!(listed("Fact"), names(&join.facts[0]));
    let Message::Vote(vote) = golden("vote_prompts") else {
        panic!("a vote")
    };
    assert_eq!(listed("PromptCounts"), names(&vote.prompts.unwrap()));
}
