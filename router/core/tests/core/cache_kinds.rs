//! Claims about models whose layers keep several kinds of KV, each with pages and a pool of its own.

use plait_core::{PageId, PoolSize, Settings};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::fixtures::{harness, settings, step, with};
use crate::harness::{Harness, Spec};
use crate::properties::{any_case, in_proportion, run_case};

/// Pages of 4 tokens, and of 6 in a second pool.
fn two_kinds() -> Settings {
    with(settings(), |it| {
        it.pages.page_size = 4;
        it.runtime.other_kinds = vec![PoolSize {
            page_size: 6,
            num_pages: 20,
        }];
    })
}

/// Leased pages of each kind.
fn num_leased(harness: &Harness) -> [u32; 2] {
    [0, 1].map(|kind| harness.scheduler.page_counts(kind).leased)
}

#[test]
fn a_row_leases_pages_of_every_kind() {
    let mut harness = harness(two_kinds(), [(13, 8)]);
    let plan = step(&mut harness);
    let others: Vec<_> = plan
        .other_pages
        .iter()
        .map(|it| (it.kind, it.page))
        .collect();
    assert_eq!(plan.appended_pages.len(), 4, "13 tokens on pages of 4");
    assert_eq!(others, [(1, PageId(0)), (1, PageId(1)), (1, PageId(2))]);
    assert_eq!(num_leased(&harness), [4, 3]);
    harness.run_to_the_end(2);
}

#[test]
fn a_plan_of_one_kind_names_no_other_pages() {
    let mut harness = harness(settings(), [(13, 8)]);
    assert_eq!(step(&mut harness).other_pages, []);
    harness.run_to_the_end(2);
}

#[test]
fn the_smaller_pool_bounds_a_prompt() {
    let small = with(two_kinds(), |it| it.runtime.other_kinds[0].num_pages = 2);
    let mut harness = Harness::new(small);
    assert!(harness.submit(Spec::new(12, 1)).is_err());
    assert!(harness.submit(Spec::new(11, 1)).is_ok());
    harness.run_to_the_end(1);
}

#[test]
fn a_kind_that_runs_out_preempts_though_the_other_has_pages() {
    let small = with(two_kinds(), |it| it.runtime.other_kinds[0].num_pages = 3);
    let mut harness = harness(small, [(5, 10), (5, 10)]);
    harness.run_to_the_end(2);
    assert!(harness.scheduler.stats().counts.num_preemptions > 0);
}

/// Pages of 4 and of 6 tokens: 24 tokens are whole pages of both, the next 8 of the first kind only.
#[test]
fn a_prefix_is_cached_as_far_as_every_kind_has_it() {
    let keeping = with(two_kinds(), |it| it.pages.prefix_cache = true);
    let mut harness = harness(keeping, [(33, 1)]);
    harness.run_to_the_end(1);
    harness.submit(Spec::new(33, 1)).unwrap();
    let plan = step(&mut harness);
    assert_eq!(plan.new_slots[0].num_cached, 24);
    harness.run_to_the_end(1);
}

#[test]
fn rejected_drafts_give_pages_of_every_kind_back() {
    let drafting = with(two_kinds(), |it| it.runtime.draft_width = 7);
    let mut harness = harness(drafting, [(5, 60)]);
    let mut kinds = Vec::new();
    while !harness.scheduler.is_idle() {
        let plan = step(&mut harness);
        kinds.extend(plan.trimmed_slots.iter().map(|trimmed| trimmed.kind));
    }
    assert!(kinds.contains(&0) && kinds.contains(&1), "{kinds:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: in_proportion(2_000), ..ProptestConfig::default() })]

    #[test]
    fn every_invariant_holds_with_several_kinds(
        (mut settings, depth, actions) in any_case(),
        other_kinds in vec((1..8u32, 2..14u32), 1..3),
    ) {
        let other_kinds = other_kinds.into_iter();
        settings.runtime.other_kinds = other_kinds
            .map(|(page_size, num_pages)| PoolSize { page_size, num_pages })
            .collect();
        run_case((settings, depth, actions));
    }
}
