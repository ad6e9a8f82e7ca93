//! Captured sizes of a group: a step is replayed on all engines or on none.

use plait_engine::Timeouts;
use serde_json::json;

use crate::groups::{place, plans, socket_directory};
use crate::harness::Harness;

#[test]
fn a_group_replays_only_the_sizes_that_all_engines_have_captured() {
    let (directory, endpoint) = socket_directory();
    let captured = [vec![4, 8], vec![2, 4, 16], vec![4, 8, 16]];
    let mut engines: Vec<Harness> = (0..3)
        .map(|number| {
            let change = place(number, 3, &endpoint);
            let mut harness = Harness::alone(&change, Timeouts::default());
            harness.dial(|rank| rank.graphs = captured[number as usize].clone());
            harness
        })
        .collect();
    for harness in &mut engines {
        harness.wait_for_phase("ready");
    }
    // One row fits into sizes that single engines have, six rows into none that all have.
    engines[1].submit(1, "abc", &json!({"max_tokens": 20}));
    assert_eq!(engines[1].answer(1).text(), "defghijklmnopqrstuvw");
    engines[0].hold(0, plans(&engines[0]).len() as u64 + 1);
    for stream in 2..8 {
        engines[0].submit(stream, "abc", &json!({"max_tokens": 20}));
    }
    engines[0].wait_until_taken(6);
    engines[0].release(0);
    for stream in 2..8 {
        assert_eq!(engines[0].answer(stream).text(), "defghijklmnopqrstuvw");
    }
    let of_decodes = |rows: usize| -> Vec<Option<u32>> {
        let plans = engines.iter().flat_map(plans);
        plans
            .filter(|plan| plan.prefill.is_empty() && plan.decode.len() == rows)
            .map(|plan| plan.decision.unwrap().graph_bucket)
            .collect()
    };
    let (one, six) = (of_decodes(1), of_decodes(6));
    assert!(
        one.len() >= 19 && one.iter().all(|it| *it == Some(4)),
        "{one:?}"
    );
    assert!(
        !six.is_empty() && six.iter().all(Option::is_none),
        "{six:?}"
    );
    drop(directory);
}
