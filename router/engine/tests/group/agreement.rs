//! Claims about groups in which nothing goes wrong.

use std::time::Duration;

use plait_core::{Decision, Mode, RuntimeSettings};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::engines::{Devices, Engine, Group, Order, group_settings, settings, socket_directory};
use crate::harness::Spec;

#[test]
fn a_group_of_one_engine_needs_no_socket() {
    let engine = Engine::start(group_settings(0, "", &[3]), Devices::default());
    engine.submit(1, Spec::new(9, 12));
    engine.wait_until("it has worked", |log| log.num_tokens > 0);
    engine.tell(Order::Drain);
    let log = engine.finish();
    assert_eq!((log.end, log.num_tokens), (None, 9 + 11));
    let steps = log
        .decisions
        .iter()
        .filter(|decision| decision.mode != Mode::Idle);
    assert_eq!(log.num_dummies, 2 * steps.count(), "two replicas ran along");
}

#[test]
fn idle_engines_run_along_with_those_that_step() {
    let group = Group::start(&[1, 2, 1], |_| Devices::default());
    group.engines[2].submit(0, Spec::new(9, 12));
    group.engines[2].wait_until("it has worked", |log| log.num_tokens == 9 + 11);
    let logs = group.drain();
    let decisions = &logs[0].decisions;
    let num_steps = decisions
        .iter()
        .filter(|decision| decision.mode != Mode::Idle)
        .count();
    let dummies: Vec<usize> = logs.iter().map(|log| log.num_dummies).collect();
    assert_eq!(dummies, [num_steps, 2 * num_steps, 0]);
    assert!(
        logs.iter()
            .all(|log| log.decisions == *decisions && log.end.is_none())
    );
}

#[test]
fn an_idle_group_neither_sends_nor_wakes() {
    let group = Group::start(&[1, 1, 1], |_| Devices::default());
    group.engines[1].submit(0, Spec::new(5, 4));
    group.engines[1].wait_until("it has worked", |log| log.num_tokens == 5 + 3);
    group.wait_until_idle();
    while group.wakes_within(Duration::from_millis(200)) {}
    let wakes = || -> Vec<usize> { group.engines.iter().map(|it| it.log().num_wakes).collect() };
    let before = wakes();
    assert!(!group.wakes_within(Duration::from_millis(500)));
    assert_eq!(wakes(), before);
    group.engines[2].submit(0, Spec::new(5, 4));
    group.engines[2].wait_until("the group woke", |log| log.num_tokens == 5 + 3);
    assert!(group.drain().iter().all(|log| log.end.is_none()));
}

/// vLLM's wave counter: a request that came as the others became idle ran alone, or never.
#[test]
fn requests_that_arrive_as_the_group_falls_idle_are_served() {
    let group = Group::start(&[1, 1, 1], |_| Devices::default());
    for round in 0..60 {
        for (engine, num_decisions) in group.engines.iter().zip([0, round * 7 % 5, round * 13 % 9])
        {
            engine.pause(num_decisions, Duration::from_millis(1));
            engine.submit(0, Spec::new(3, 2));
        }
    }
    for engine in &group.engines {
        engine.wait_until("all are served", |log| log.num_tokens == 60 * 4);
    }
    let logs = group.drain();
    assert!(
        logs.iter()
            .all(|log| log.decisions == logs[0].decisions && log.num_refused == 0)
    );
}

/// One optimisation switched off locally after the vote: the peers then wait in another collective.
#[test]
fn an_engine_without_graphs_takes_them_from_all_by_its_vote() {
    let graphs = |engine| Devices {
        largest_graph: if engine == 1 { 0 } else { 8 },
        ..Devices::default()
    };
    let group = Group::start(&[1, 1], graphs);
    group.engines[0].submit(0, Spec::new(3, 20));
    group.engines[0].wait_until("it has worked", |log| log.num_tokens == 3 + 19);
    group.engines[1].submit(0, Spec::new(3, 20));
    group.engines[1].wait_until("it has worked", |log| log.num_tokens == 3 + 19);
    let logs = group.drain();
    let mut decodes = logs[0]
        .decisions
        .iter()
        .filter(|it| it.mode == Mode::Decode);
    let runs_a_dummy = |it: &&Decision| it.dummy_replicas.contains(&1);
    assert!(
        decodes.clone().any(|it| runs_a_dummy(&it)) && decodes.clone().any(|it| !runs_a_dummy(&it))
    );
    assert!(decodes.all(|it| it.graph_bucket.is_none()));
}

#[test]
fn a_drain_on_any_engine_closes_all_and_ends_when_all_are_idle() {
    let group = Group::start(&[1, 1, 1], |_| Devices {
        step: Duration::from_millis(20),
        ..Devices::default()
    });
    group.engines[0].submit(0, Spec::new(9, 40));
    group.engines[0].wait_until("it works", |log| log.num_tokens > 9);
    group.engines[2].tell(Order::Drain);
    let closed = |log: &crate::engines::Log| log.decisions.iter().any(|it| it.draining);
    group.engines[1].wait_until("admission is closed", closed);
    group.engines[1].submit(0, Spec::new(5, 4));
    let logs = group.finish();
    assert_eq!(logs[0].num_tokens, 9 + 39, "what was under way is finished");
    assert_eq!(logs[1].num_refused, 1);
    for log in &logs {
        let stops: Vec<bool> = log.decisions.iter().map(|decision| decision.stop).collect();
        assert_eq!(stops.iter().position(|stop| *stop), Some(stops.len() - 1));
        assert_eq!(log.end, None);
    }
}

#[test]
fn an_idle_group_drains_at_once() {
    let group = Group::start(&[1, 1], |_| Devices::default());
    group.wait_until_idle();
    group.engines[1].tell(Order::Drain);
    assert!(
        group
            .finish()
            .iter()
            .all(|log| log.decisions.last().unwrap().stop)
    );
}

#[test]
fn engines_may_start_in_any_order() {
    let (_directory, endpoint) = socket_directory();
    let start = |engine| {
        let settings = group_settings(engine, &endpoint, &[1, 1, 1]);
        Engine::start(settings, Devices::default())
    };
    let second = start(2);
    second.submit(0, Spec::new(5, 4));
    second.wait_until("it has voted", |log| log.has_voted);
    let first = start(0);
    first.wait_until("it was woken and has voted", |log| {
        log.has_voted && log.num_wakes > 0
    });
    assert!(first.log().decisions.is_empty(), "one is missing still");
    let third = start(1);
    second.wait_until("its request is served", |log| log.num_tokens == 5 + 3);
    third.tell(Order::Drain);
    for engine in [first, second, third] {
        assert_eq!(engine.finish().end, None);
    }
}

prop_compose! {
    fn any_devices()(
        draft_width in prop_oneof![2 => Just(0u32), 1 => 1..4u32],
        (batch_tokens, max_rows, max_seqs, long_prefill_token_threshold) in (1..40u32, 1..8u32, 1..8u32, 1..30u32),
        (page_size, num_pages, mixed) in (1..6u32, 4..14u32, any::<bool>()),
        largest_graph in prop_oneof![Just(0u32), Just(4), Just(8)],
        micros in prop_oneof![2 => Just(0u64), 1 => 1..400u64],
    ) -> Devices {
        let mut settings = settings();
        settings.scheduler.max_batch_tokens = Some(batch_tokens.max(1 + draft_width));
        settings.scheduler.max_seqs = Some(max_seqs);
        settings.scheduler.long_prefill_token_threshold = Some(long_prefill_token_threshold);
        settings.scheduler.mixed = mixed;
        settings.pages.page_size = page_size;
        settings.runtime = RuntimeSettings { num_pages, max_rows: Some(max_rows), draft_width, ..settings.runtime };
        Devices { settings, largest_graph, step: Duration::from_micros(micros) }
    }
}

#[derive(Clone, Debug)]
struct Work {
    engine: usize,
    replica: usize,
    prompt: Vec<u32>,
    max_tokens: u32,
    /// Decisions to wait for before the next request.
    pause: usize,
}

fn any_work() -> impl Strategy<Value = Work> {
    let prompt = vec(0..61u32, 1..16);
    let pause = prop_oneof![6 => Just(0usize), 2 => 1..6usize, 1 => Just(40)];
    (any::<(usize, usize)>(), prompt, 1..16u32, pause).prop_map(
        |((engine, replica), prompt, max_tokens, pause)| Work {
            engine,
            replica,
            prompt,
            max_tokens,
            pause,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, max_shrink_iters: 40, ..ProptestConfig::default() })]

    /// The harnesses check the tokens: none is lost, repeated or another's.
    #[test]
    fn engines_follow_one_sequence_of_decisions_and_lose_no_token(
        num_replicas in vec(1..3u32, 1..5),
        devices in vec(any_devices(), 4),
        work in vec(any_work(), 0..40),
        drainer in any::<usize>(),
    ) {
        let group = Group::start(&num_replicas, |engine| devices[engine as usize].clone());
        for Work { engine, replica, prompt, max_tokens, pause } in work {
            let engine = engine % num_replicas.len();
            let replica = replica % num_replicas[engine] as usize;
            group.engines[engine].submit(replica, Spec { prompt, ..Spec::new(1, max_tokens) });
            group.engines[engine].pause(pause, Duration::from_millis(3));
        }
        group.engines[drainer % num_replicas.len()].tell(Order::Drain);
        let logs = group.finish();
        for log in &logs {
            prop_assert_eq!(&log.end, &None);
            prop_assert_eq!(&log.decisions, &logs[0].decisions);
            prop_assert_eq!(log.drop_counts, Default::default());
        }
        let steps: Vec<u64> = logs[0].decisions.iter().map(|decision| decision.step.0).collect();
        prop_assert_eq!(&steps, &(1..=steps.len() as u64).collect::<Vec<_>>());
    }
}
