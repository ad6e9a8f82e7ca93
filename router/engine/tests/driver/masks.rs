//! Constrained answers, with ranks that wait for their masks, and with ranks that never do.

use plait_engine::Timeouts;
use plait_proto::Decision;
use serde_json::{Value, json};

use crate::groups::{group_of, plans};
use crate::harness::Harness;

fn letters(max_tokens: u32) -> Value {
    json!({
        "max_tokens": max_tokens,
        "constraint": {"param": "structured_outputs.regex", "constraint": "regex", "text": "[a-z]+"},
    })
}

/// The masks of a step that is the only one follow it at once, and those of the others come with their tokens.
#[test]
fn a_rank_gets_the_masks_of_every_step_without_asking() {
    let mut harness = Harness::ready(&json!({}), |_| {});
    harness.submit(1, "abc", &letters(20));
    assert_eq!(harness.answer(1).text(), "defghijklmnopqrstuvw");
    let log = harness.workers[0].log();
    let awaited: Vec<u64> = log
        .plans
        .iter()
        .filter(|it| it.awaits_masks)
        .map(|it| it.step)
        .collect();
    let sent: Vec<u64> = log.masks.iter().map(|it| it.step).collect();
    assert!(
        sent.len() >= 20 && sent == awaited,
        "{sent:?} of {awaited:?}"
    );
    let new_masks: usize = log.masks.iter().map(|it| it.new_masks.len()).sum();
    assert!(new_masks <= 2, "equal masks are sent once");
}

#[test]
fn rows_that_are_left_out_are_computed_again_and_no_token_changes() {
    let mut harness = Harness::ready(&json!({}), |rank| rank.asks_for_masks = true);
    for stream in 1..=6 {
        let change = if stream % 2 == 0 {
            letters(20)
        } else {
            json!({"max_tokens": 20})
        };
        harness.submit(stream, "abc", &change);
    }
    for stream in 1..=6 {
        assert_eq!(
            harness.answer(stream).text(),
            "defghijklmnopqrstuvw",
            "{stream}"
        );
    }
}

/// Dummy replicas await no masks, and a row that is left out is a row to the group all the same.
#[test]
fn engines_of_a_group_agree_though_one_has_constrained_answers() {
    let (_directory, mut engines) = group_of(3, |change| {
        let mut harness = Harness::alone(change, Timeouts::default());
        harness.dial(|rank| {
            rank.graphs = vec![4, 8];
            rank.asks_for_masks = true;
        });
        harness
    });
    engines[0].submit(1, "abc", &letters(20));
    engines[1].submit(1, "abc", &json!({"max_tokens": 20}));
    for engine in &mut engines[..2] {
        assert_eq!(engine.answer(1).text(), "defghijklmnopqrstuvw");
    }
    engines[2].engine.drain();
    for engine in &mut engines {
        engine.wait_for_phase("stopped");
    }
    let decisions = |harness: &Harness| -> Vec<Decision> {
        let plans = plans(harness).into_iter();
        plans.map(|plan| plan.decision.unwrap()).collect()
    };
    let agreed = decisions(&engines[0]);
    assert!(engines.iter().all(|engine| decisions(engine) == agreed));
    for (number, engine) in engines.iter().enumerate() {
        for (plan, decision) in plans(engine).iter().zip(&agreed) {
            let num_rows = u32::try_from(plan.prefill.len() + plan.decode.len()).unwrap();
            let is_dummy = decision.dummy_replicas.first().unwrap_or(&0) >> number & 1 == 1;
            assert_eq!(is_dummy, num_rows == 0);
            assert!(!plan.awaits_masks || (number == 0 && num_rows > 0));
        }
    }
}
