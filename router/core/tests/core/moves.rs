//! Claims about requests whose ranks were lost, and which go on in another replica's scheduler.

use plait_core::{Event, FinishReason, Output, Policy, Refusal, RequestId, Settings};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::fixtures::{chunks, decoded, harness, settings, step, with};
use crate::harness::{Harness, Spec};
use crate::properties::{Action, any_action, any_settings, in_proportion, run};

/// Two replicas. The first has lost its ranks with these requests, some steps after they came.
fn one_lost<const N: usize>(
    settings: &Settings,
    requests: [(u32, u32); N],
    num_steps: usize,
) -> [Harness; 2] {
    let mut lost = harness(settings.clone(), requests);
    (0..num_steps).for_each(|_| drop(step(&mut lost)));
    lost.plan().unwrap();
    lost.lose();
    [lost, Harness::new(settings.clone())]
}

/// All that the first one has goes to the second.
fn give_all(lost: &mut Harness, other: &mut Harness) -> Vec<u64> {
    let alive = lost.clients.iter().filter(|(_, it)| it.ended.is_none());
    let alive: Vec<RequestId> = alive.map(|(request, _)| *request).collect();
    let given = alive.into_iter().map(|request| lost.give(request, other).0);
    given.collect()
}

#[test]
fn a_request_goes_on_behind_its_last_token_and_leaves_nothing_behind() {
    let [mut lost, mut other] = one_lost(&settings(), [(5, 20), (9, 20)], 7);
    assert_eq!(give_all(&mut lost, &mut other), [0, 1]);
    assert!(lost.scheduler.is_idle(), "nothing waits for its ranks");
    lost.check_the_end();
    assert_eq!(chunks(&step(&mut other)), [(0, 0, 12)]);
    let second = step(&mut other);
    assert_eq!(second.new_slots[0].next_output, 7, "seeds go by the index");
    other.run_to_the_end(2);
    let num_given = other.clients.values().map(|it| it.emitted.len());
    assert_eq!(num_given.collect::<Vec<_>>(), [20, 20]);
}

#[test]
fn only_a_request_that_waits_for_pages_may_leave() {
    let mut running = harness(settings(), [(5, 20)]);
    step(&mut running);
    assert!(running.scheduler.release(RequestId(0)).is_none());
    assert!(running.scheduler.release(RequestId(7)).is_none());
    running.run_to_the_end(2);
    assert!(running.scheduler.release(RequestId(0)).is_none());
}

#[test]
fn who_came_first_goes_first_whichever_replica_it_came_to() {
    for policy in [Policy::Fcfs, Policy::Priority, Policy::CacheAware] {
        let one_slot = with(settings(), |it| {
            it.scheduler.max_seqs = Some(1);
            it.scheduler.policy = policy;
        });
        let mut lost = harness(one_slot.clone(), [(5, 9), (6, 9)]);
        let mut other = Harness::new(one_slot);
        other.wait_until(100);
        let late = other.submit(Spec::new(7, 9)).unwrap();
        lost.lose();
        let given = give_all(&mut lost, &mut other);
        let order: Vec<u64> = (0..27)
            .filter_map(|_| {
                let plan = step(&mut other);
                plan.new_slots.first().map(|new| new.request.0)
            })
            .collect();
        assert_eq!(order, [given[0], given[1], late.0], "{policy:?}");
    }
}

#[test]
fn suspects_run_alone_where_they_go_on_and_others_wait_for_them() {
    let [mut lost, mut other] = one_lost(&settings(), [(5, 20), (6, 20)], 4);
    other.submit(Spec::new(3, 20)).unwrap();
    step(&mut other);
    let given = give_all(&mut lost, &mut other);
    for suspect in given {
        let plan = other.plan().unwrap();
        assert_eq!(chunks(&plan)[0].0, suspect);
        assert_eq!(plan.prefill.len() + plan.decode.len(), 1);
        assert!(other.plan().is_none(), "the next one waits for its result");
        other.complete();
    }
    assert_eq!(decoded(&step(&mut other)).len(), 3);
    other.run_to_the_end(2);
}

#[test]
fn a_request_that_takes_down_ranks_of_two_replicas_ends_and_the_others_go_on() {
    let [mut lost, mut other] = one_lost(&settings(), [(5, 20), (6, 20)], 4);
    other.submit(Spec::new(3, 20)).unwrap();
    step(&mut other);
    let given = give_all(&mut lost, &mut other);
    let alone = other.plan().unwrap();
    assert_eq!(chunks(&alone)[0].0, given[0]);
    assert_eq!(other.lose(), [RequestId(given[0])]);
    assert_eq!(give_all(&mut other, &mut lost).len(), 2);
    lost.run_to_the_end(2);
    let ends = lost.clients.values().map(|it| it.ended);
    assert_eq!(ends.collect::<Vec<_>>(), [Some(FinishReason::Length); 2]);
    other.check_the_end();
}

#[test]
fn a_drain_and_a_full_queue_refuse_newcomers_and_nobody_who_was_accepted() {
    let tight = with(settings(), |it| it.scheduler.max_queue = 2);
    let [mut lost, mut other] = one_lost(&tight, [(5, 9), (6, 9)], 2);
    (0..2).for_each(|_| assert!(other.submit(Spec::new(3, 9)).is_ok()));
    other.scheduler.drain();
    give_all(&mut lost, &mut other);
    assert_eq!(other.submit(Spec::new(3, 9)), Err(Refusal::Draining));
    other.run_to_the_end(2);
}

#[test]
fn a_request_that_waited_too_long_leaves_unserved_and_one_that_has_run_does_not() {
    let patient = with(settings(), |it| {
        it.scheduler.max_queue_seconds = Some(20e-6);
        it.scheduler.max_seqs = Some(1);
    });
    let [mut lost, mut other] = one_lost(&patient, [(5, 9), (6, 9)], 3);
    other.wait_until(10);
    other.submit(Spec::new(3, 60)).unwrap();
    step(&mut other);
    let given = give_all(&mut lost, &mut other);
    let newcomer = other.submit(Spec::new(3, 9)).unwrap();
    // The one that came to the other replica waits shorter, and is behind it in the set of those that may leave.
    other.wait_until(26);
    other.plan();
    let rejected = |request| other.clients[&RequestId(request)].rejected.is_some();
    let told = [given[0], given[1], newcomer.0].map(rejected);
    assert_eq!(told, [false, true, false]);
    other.run_to_the_end(2);
}

#[test]
fn a_replica_with_too_few_pages_refuses_it() {
    let [mut lost, _] = one_lost(&settings(), [(90, 60)], 2);
    let small = with(settings(), |it| it.runtime.num_pages = 9);
    let mut other = Harness::new(small);
    let moved = lost.scheduler.release(RequestId(0)).unwrap();
    assert_eq!(
        other.scheduler.take_over(moved).unwrap_err(),
        Refusal::TooLongForPool {
            prompt: 90,
            limit: 144
        }
    );
}

#[test]
fn an_abort_where_it_goes_on_ends_it() {
    let [mut lost, mut other] = one_lost(&settings(), [(5, 20)], 4);
    let request = RequestId(give_all(&mut lost, &mut other)[0]);
    let mut outputs = Vec::new();
    let nobody = lost
        .scheduler
        .advance(Event::Abort(RequestId(0)), &mut outputs);
    assert_eq!((nobody, &outputs[..]), (Ok(()), &[][..]));
    let reason = FinishReason::Abort;
    assert_eq!(other.abort(request), [Output::Finished { request, reason }]);
    other.check_the_end();
}

#[derive(Clone, Debug)]
enum Deed {
    /// Of one of the two.
    Act(bool, Action),
    /// One loses its ranks, and all of its requests that so many bits name go to the other.
    Move(bool, u64),
}

fn any_deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        40 => (any::<bool>(), any_action()).prop_map(|(which, action)| Deed::Act(which, action)),
        1 => (any::<bool>(), any::<u64>()).prop_map(|(which, bits)| Deed::Move(which, bits)),
    ]
}

fn move_some(from: &mut Harness, to: &mut Harness, bits: u64) {
    from.lose();
    let alive = from.clients.iter().filter(|(_, it)| it.ended.is_none());
    let alive: Vec<RequestId> = alive.map(|(request, _)| *request).collect();
    for (index, request) in alive.into_iter().enumerate() {
        if bits >> (index % 64) & 1 == 1 {
            from.give(request, to);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: in_proportion(1_000), ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_once_with_its_own_tokens_wherever_it_goes(
        settings in any_settings(),
        depth in 1..4usize,
        deeds in vec(any_deed(), 1..200),
    ) {
        let mut both = [Harness::new(settings.clone()), Harness::new(settings)];
        for deed in &deeds {
            let [one, two] = &mut both;
            match deed {
                Deed::Act(false, action) => drop(run(one, std::slice::from_ref(action), depth)),
                Deed::Act(true, action) => drop(run(two, std::slice::from_ref(action), depth)),
                Deed::Move(false, bits) => move_some(one, two, *bits),
                Deed::Move(true, bits) => move_some(two, one, *bits),
            }
        }
        both.iter_mut().for_each(|it| it.run_to_the_end(depth));
    }
}
