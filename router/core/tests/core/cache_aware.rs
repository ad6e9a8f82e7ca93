//! Claims about the policy that admits long cached prefixes first.

use plait_core::{Policy, Settings};

use crate::fixtures::{settings, step, with};
use crate::harness::{Harness, Spec};

/// One request at a time, pages of four tokens.
fn cache_aware() -> Settings {
    with(settings(), |it| {
        it.scheduler.policy = Policy::CacheAware;
        it.scheduler.max_seqs = Some(1);
        it.scheduler.max_queue = 1_000;
        it.scheduler.max_queue_tokens = 1 << 20;
        it.pages.page_size = 4;
        it.pages.prefix_cache = true;
    })
}

fn prompt(num: u32, salt: u64) -> Spec {
    Spec {
        salt,
        ..Spec::new(num, 1)
    }
}

/// The requests in the order in which they are admitted.
fn admitted(harness: &mut Harness, num: usize) -> Vec<u64> {
    let mut admitted = Vec::new();
    while admitted.len() < num {
        let plan = step(harness);
        admitted.extend(plan.new_slots.iter().map(|new| new.request.0));
    }
    admitted
}

#[test]
fn the_longest_cached_prefix_goes_first() {
    let mut harness = Harness::new(cache_aware());
    harness.submit(prompt(13, 1)).unwrap();
    harness.run_to_the_end(1);
    for (num, salt) in [(13, 2), (6, 1), (13, 1), (30, 1)] {
        harness.submit(prompt(num, salt)).unwrap();
    }
    assert_eq!(admitted(&mut harness, 4), [3, 4, 2, 1]);
    harness.run_to_the_end(1);
}

#[test]
fn a_prefix_that_is_evicted_meanwhile_does_not_count() {
    let mut harness = Harness::new(with(cache_aware(), |it| it.runtime.num_pages = 8));
    harness.submit(prompt(13, 1)).unwrap();
    harness.run_to_the_end(1);
    harness.submit(Spec::new(28, 4)).unwrap();
    step(&mut harness);
    harness.submit(prompt(9, 2)).unwrap();
    harness.submit(prompt(13, 1)).unwrap();
    assert_eq!(admitted(&mut harness, 2), [2, 3]);
    harness.run_to_the_end(1);
}

#[test]
fn at_most_256_requests_overtake_one() {
    let mut harness = Harness::new(cache_aware());
    harness.submit(prompt(5, 1)).unwrap();
    harness.run_to_the_end(1);
    harness.submit(prompt(5, 2)).unwrap();
    let mut overtaking = Vec::new();
    while !overtaking.contains(&1) {
        harness.submit(prompt(5, 1)).unwrap();
        overtaking.extend(admitted(&mut harness, 1));
    }
    assert_eq!(overtaking.len(), 256 + 1);
    harness.run_to_the_end(1);
}
