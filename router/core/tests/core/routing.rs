//! Requests go to the replica on which they cost least.

use std::sync::Arc;

use plait_core::{Availability, HashSeed, HashedPrompt, PromptHasher, ReplicaRouter, Route};

const PAGE: u32 = 16;

fn router(num_replicas: u32) -> ReplicaRouter {
    let mut router = ReplicaRouter::new(num_replicas, PAGE);
    for replica in 0..num_replicas {
        router.set_pool(replica, 64, 64 * u64::from(PAGE));
    }
    router
}

/// `shared` tokens that all such prompts begin with, then `own` of this number's.
fn prompt(shared: usize, number: u32, own: usize) -> HashedPrompt {
    salted(shared, number, own, 0)
}

fn salted(shared: usize, number: u32, own: usize, salt: u64) -> HashedPrompt {
    let tokens: Arc<[u32]> = std::iter::repeat_n(1, shared)
        .chain(std::iter::repeat_n(1000 + number, own))
        .collect();
    PromptHasher::new(HashSeed([3, 4]), PAGE).hash(&tokens, salt)
}

fn send(router: &mut ReplicaRouter, prompt: &HashedPrompt) -> Route {
    router.route(std::slice::from_ref(prompt), 0).unwrap()
}

#[test]
fn equal_requests_are_dealt_evenly() {
    let mut router = router(3);
    let sent: Vec<u32> = (0..6)
        .map(|number| send(&mut router, &prompt(0, number, 20)).replica)
        .collect();
    assert_eq!(sent, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn a_request_goes_where_the_fewest_tokens_are() {
    let mut router = router(2);
    let long = send(&mut router, &prompt(0, 0, 100));
    assert_eq!(long.replica, 0);
    for number in 1..=5 {
        assert_eq!(send(&mut router, &prompt(0, number, 20)).replica, 1);
    }
    assert_eq!(
        send(&mut router, &prompt(0, 6, 20)).replica,
        0,
        "both have 100"
    );
    router.finish(long);
    assert_eq!(send(&mut router, &prompt(0, 7, 20)).replica, 0);
}

#[test]
fn tokens_of_answers_count_too() {
    let mut router = router(2);
    let first = router.route(&[prompt(0, 0, 20)], 100).unwrap();
    assert_eq!((first.replica, first.num_tokens()), (0, 120));
    assert_eq!(send(&mut router, &prompt(0, 1, 110)).replica, 1);
    assert_eq!(send(&mut router, &prompt(0, 2, 20)).replica, 1);
}

#[test]
fn a_prompt_counts_until_its_answer_begins() {
    let mut router = router(2);
    let mut long = router.route(&[prompt(0, 0, 100)], 10).unwrap();
    assert_eq!(long.replica, 0);
    router.begin_answer(&mut long);
    assert_eq!(long.num_tokens(), 10);
    assert_eq!(
        send(&mut router, &prompt(0, 1, 20)).replica,
        1,
        "10 tokens of the answer are left"
    );
    assert_eq!(send(&mut router, &prompt(0, 2, 20)).replica, 0);
    router.finish(long);
    assert_eq!(
        send(&mut router, &prompt(0, 3, 20)).replica,
        1,
        "20 tokens each, and fewer requests so far"
    );
}

#[test]
fn a_conversation_stays_where_its_prefix_is() {
    let mut router = router(2);
    let first = send(&mut router, &prompt(160, 0, 5));
    router.finish(first);
    let elsewhere = send(&mut router, &prompt(0, 1, 5));
    assert_eq!(elsewhere.replica, 1, "replica 0 got a request before");
    let next = send(&mut router, &prompt(160, 0, 40));
    assert_eq!((next.replica, next.num_tokens()), (0, 40));
}

#[test]
fn a_conversation_moves_once_the_wait_costs_more_than_the_prefix_saves() {
    let mut router = router(2);
    let first = send(&mut router, &prompt(160, 0, 5));
    router.finish(first);
    let busy: Vec<Route> = (0..2)
        .map(|number| send(&mut router, &prompt(160, 1 + number, 70)))
        .collect();
    assert_eq!(
        [busy[0].replica, busy[1].replica],
        [0, 0],
        "140 tokens of load against 160 saved"
    );
    let moved = send(&mut router, &prompt(160, 9, 70));
    assert_eq!((moved.replica, moved.num_tokens()), (0, 70));
    let moved = send(&mut router, &prompt(160, 10, 70));
    assert_eq!(
        (moved.replica, moved.num_tokens()),
        (1, 230),
        "210 tokens of load against 160 saved"
    );
    let stays = send(&mut router, &prompt(160, 11, 90));
    assert_eq!(
        stays.replica, 0,
        "replica 1 has more to do now, and both hold the prefix"
    );
}

#[test]
fn prefixes_of_another_salt_do_not_hit() {
    let mut router = router(2);
    let first = send(&mut router, &salted(160, 0, 5, 7));
    router.finish(first);
    let other = send(&mut router, &salted(160, 0, 5, 8));
    assert_eq!((other.replica, other.num_tokens()), (1, 165));
    let same = send(&mut router, &salted(160, 0, 5, 7));
    assert_eq!((same.replica, same.num_tokens()), (0, 5));
}

#[test]
fn the_prompts_of_one_stream_stay_together() {
    let mut router = router(2);
    let both = router
        .route(&[prompt(0, 0, 30), prompt(0, 1, 40)], 0)
        .unwrap();
    assert_eq!(both.num_tokens(), 70);
    assert_eq!(send(&mut router, &prompt(0, 2, 10)).replica, 1);
}

#[test]
fn a_replica_forgets_what_its_pool_cannot_hold() {
    let mut router = router(2);
    router.set_pool(0, 4, 4 * u64::from(PAGE));
    let first = send(&mut router, &prompt(160, 0, 5));
    router.finish(first);
    let again = send(&mut router, &prompt(160, 0, 5));
    assert_eq!(again.num_tokens(), 165 - 4 * 16);
}

#[test]
fn a_stream_moves_to_a_smaller_replica_if_it_fits() {
    let mut router = router(2);
    router.set_pool(1, 63, 63 * u64::from(PAGE));
    let prompts = [prompt(0, 0, 20)];
    for (most_tokens, moves) in [(63 * 16, true), (63 * 16 + 1, false)] {
        let route = router.route(&prompts, 0).unwrap();
        router.set_availability(0, Availability::Avoided);
        assert_eq!(route.replica, 0);
        assert_eq!(router.has_other(0, most_tokens), moves);
        let moved = router.move_away(route, &prompts, 0, most_tokens).unwrap();
        assert_eq!(moved.replica, u32::from(moves));
        router.finish(moved);
        router.set_availability(0, Availability::Open);
    }
}

#[test]
fn a_closed_replica_is_never_chosen_and_an_avoided_one_only_for_want_of_others() {
    let mut router = router(3);
    router.set_availability(0, Availability::Closed);
    router.set_availability(0, Availability::Open);
    router.set_availability(1, Availability::Avoided);
    for number in 0..3 {
        assert_eq!(send(&mut router, &prompt(0, number, 20)).replica, 2);
    }
    router.set_availability(2, Availability::Closed);
    assert_eq!(send(&mut router, &prompt(0, 3, 20)).replica, 1);
    router.set_availability(1, Availability::Closed);
    assert_eq!(router.route(&[prompt(0, 4, 20)], 0), None);
}
