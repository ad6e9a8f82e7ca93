//! Claims about replicas that step together, and their invariants under random schedules.

use plait_core::{
    Decision, Disagreement, GraphSize, Mode, ReplicaTokens, Settings, StepId, Vote, decide,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::fixtures::{settings, with};
use crate::harness::{Harness, Spec};
use crate::properties::{any_settings, any_spec, in_proportion};

/// Of decode rows; of prompts that read lengths on the device; and of prompts whose attention is planned.
fn graphs() -> Vec<GraphSize> {
    let with_prompts = |prompt_tokens, decode_rows, context_tokens| GraphSize {
        prompt_tokens,
        prompt_rows: 3,
        decode_rows,
        context_tokens,
    };
    let mut sizes = [1, 4, 8].map(GraphSize::of_decode_rows).to_vec();
    sizes.extend([(64, 0), (60, 4), (128, 0), (120, 8)].map(|(c, d)| with_prompts(c, d, None)));
    sizes.extend([0, 100].map(|context| with_prompts(96, 8, Some(context))));
    sizes
}

/// Replicas, each with a device of its own.
struct Group {
    harnesses: Vec<Harness>,
}

impl Group {
    fn new(num_replicas: usize, settings: &Settings) -> Self {
        let harnesses = (0..num_replicas).map(|_| Harness::new(settings.clone()));
        Self {
            harnesses: harnesses.collect(),
        }
    }

    /// All plan, vote and send; the decision, and whether each replica's rows are as it voted.
    fn step(&mut self) -> Decision {
        let plans: Vec<_> = self.harnesses.iter_mut().map(Harness::plan_only).collect();
        let votes = (0..).zip(self.harnesses.iter().zip(&plans));
        let votes: Vec<Vote> = votes
            .map(|(replica, (harness, plan))| harness.scheduler.vote(plan.as_ref(), replica, 8))
            .collect();
        let decision = agree(&votes);
        for (harness, plan) in self.harnesses.iter_mut().zip(plans) {
            let decided = harness.scheduler.apply_decision(plan.clone(), &decision);
            assert_eq!(decided.is_some(), decision.mode != Mode::Idle);
            let Some(decided) = decided else { continue };
            assert!(
                plan.is_none_or(|plan| plan == decided.plan),
                "a row changed"
            );
            assert_eq!(decided.plan.step, decision.step);
            harness.send(&decided.plan);
        }
        decision
    }

    fn most_on_the_wire(&self) -> usize {
        let each = self.harnesses.iter().map(Harness::num_in_flight);
        each.max().unwrap()
    }

    fn complete_all(&mut self) {
        for harness in &mut self.harnesses {
            while harness.num_in_flight() > 0 {
                harness.complete();
            }
        }
    }

    /// Steps until all are idle.
    fn run_to_the_end(&mut self) {
        for _ in 0..100_000 {
            self.complete_all();
            let has_mask = self.harnesses.iter_mut().any(Harness::any_mask_ready);
            if self.step().mode == Mode::Idle && !has_mask {
                return self.harnesses.iter().for_each(Harness::check_the_end);
            }
        }
        panic!("livelock");
    }
}

/// The decision, which suits every vote; the same from votes that came in another order.
fn agree(votes: &[Vote]) -> Decision {
    let num_replicas = u32::try_from(votes.len()).unwrap();
    let decision_of = |votes: &[Vote]| decide(votes, num_replicas, &graphs()).unwrap();
    let backwards: Vec<Vote> = votes.iter().rev().copied().collect();
    let agreed = decision_of(votes);
    assert_eq!(agreed, decision_of(&backwards));
    for vote in votes {
        assert!(vote.is_valid(), "{vote:?}");
        assert_eq!(agreed.conflict_with(vote), None, "{agreed:?} for {vote:?}");
    }
    agreed
}

fn vote(replica: u32) -> Vote {
    Vote {
        replica,
        step: StepId(3),
        num_prefill_tokens: 0,
        num_prefill_rows: 0,
        num_context_tokens: 0,
        num_decode_rows: 0,
        num_tokens: 0,
        can_graph: true,
        idle: true,
        draining: false,
    }
}

fn decoding(replica: u32, num_rows: u32) -> Vote {
    Vote {
        num_decode_rows: num_rows,
        num_tokens: num_rows,
        idle: false,
        ..vote(replica)
    }
}

#[test]
fn a_replica_without_rows_runs_a_dummy_row_and_all_pad_to_the_largest() {
    let agreed = agree(&[decoding(0, 3), vote(1), decoding(2, 2)]);
    assert_eq!((agreed.mode, agreed.pad_tokens), (Mode::Decode, 4));
    assert_eq!(agreed.graph_bucket, Some(4));
    assert_eq!(agreed.dummy_replicas, [1]);
}

#[test]
fn one_replica_that_cannot_use_a_graph_decides_for_all() {
    let eager = Vote {
        can_graph: false,
        ..decoding(1, 3)
    };
    let agreed = agree(&[decoding(0, 3), eager]);
    assert_eq!((agreed.graph_bucket, agreed.pad_tokens), (None, 3));
}

#[test]
fn a_step_takes_the_least_graph_that_holds_its_largest_replica() {
    for (num_rows, bucket) in [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8)] {
        let agreed = agree(&[decoding(0, 1), decoding(1, num_rows)]);
        assert_eq!(
            (agreed.graph_bucket, agreed.pad_tokens),
            (Some(bucket), bucket)
        );
    }
    let beyond = agree(&[decoding(0, 1), decoding(1, 9)]);
    assert_eq!((beyond.graph_bucket, beyond.pad_tokens), (None, 9));
}

#[test]
fn one_replica_that_prefills_makes_the_step_mixed_for_all() {
    let prefilling = Vote {
        num_prefill_tokens: 100,
        num_prefill_rows: 1,
        num_tokens: 100,
        can_graph: false,
        idle: false,
        ..vote(1)
    };
    let agreed = agree(&[decoding(0, 3), prefilling]);
    assert_eq!((agreed.mode, agreed.pad_tokens), (Mode::Mixed, 100));
    assert_eq!(agreed.graph_bucket, None);
}

/// A replica that computes a chunk of each of `num_rows` prompts, behind a context.
fn prefilling(replica: u32, num_tokens: u32, num_rows: u32, num_context_tokens: u32) -> Vote {
    Vote {
        num_prefill_tokens: num_tokens,
        num_prefill_rows: num_rows,
        num_context_tokens,
        num_tokens,
        idle: false,
        ..vote(replica)
    }
}

#[test]
fn replicas_with_and_without_prompts_take_graphs_of_as_many_tokens() {
    let with_decodes = Vote {
        num_decode_rows: 4,
        num_tokens: 64,
        ..prefilling(1, 60, 2, 0)
    };
    let cases = [
        (vec![prefilling(0, 64, 1, 0), vote(1)], 64),
        (vec![prefilling(0, 64, 1, 0), decoding(1, 4)], 64),
        (vec![prefilling(0, 61, 1, 0), decoding(1, 5)], 104),
        (vec![prefilling(0, 97, 1, 0), decoding(1, 5)], 128),
        (vec![prefilling(0, 30, 1, 200), with_decodes], 64),
        (vec![prefilling(0, 128, 2, 0), decoding(1, 8)], 128),
    ];
    for (votes, bucket) in cases {
        let agreed = agree(&votes);
        assert_eq!(agreed.graph_bucket, Some(bucket), "{votes:?}");
        assert_eq!(agreed.pad_tokens, bucket);
    }
}

#[test]
fn a_step_whose_prompts_fit_no_common_size_runs_without_graphs() {
    let too_many_rows = prefilling(0, 30, 3, 0);
    let too_many_decodes = decoding(1, 9);
    let too_many_tokens = prefilling(0, 129, 1, 0);
    for votes in [
        [too_many_rows, vote(1)],
        [prefilling(0, 30, 1, 0), too_many_decodes],
        [too_many_tokens, decoding(1, 1)],
    ] {
        let agreed = agree(&votes);
        assert_eq!(agreed.graph_bucket, None, "{votes:?}");
    }
}

#[test]
fn a_decision_counts_the_tokens_of_each_replica() {
    let agreed = agree(&[decoding(0, 3), vote(1), prefilling(2, 100, 1, 0)]);
    let of = |prefill, total| ReplicaTokens { prefill, total };
    assert_eq!(agreed.tokens, [of(0, 3), of(0, 0), of(100, 100)]);
    assert_eq!(agree(&[vote(0), vote(1)]).tokens, [of(0, 0); 2]);
}

#[test]
fn a_decision_that_cannot_follow_from_a_vote_is_found() {
    type Change = fn(&mut Decision);
    let cases: [(&str, Change); 10] = [
        ("another step", |it| it.step = StepId(4)),
        ("leaves out rows", |it| it.mode = Mode::Prefill),
        ("too few tokens", |it| it.pad_tokens = 2),
        ("other tokens", |it| it.tokens[0].total = 2),
        ("other tokens", |it| it.tokens[1].total = 9),
        ("other tokens", |it| it.tokens.clear()),
        ("a dummy of rows", |it| it.dummy_replicas.push(0)),
        ("graph", |it| it.graph_bucket = Some(8)),
        ("what is not idle", |it| {
            (it.draining, it.stop) = (true, true);
        }),
        ("leaves out rows", |it| it.mode = Mode::Idle),
    ];
    let votes = [decoding(0, 3), vote(1)];
    for (words, change) in cases {
        let mut broken = agree(&votes);
        change(&mut broken);
        let found = broken.conflict_with(&votes[0]).unwrap();
        assert!(found.contains(words), "{found}");
    }
    let mut broken = agree(&votes);
    broken.dummy_replicas.clear();
    assert!(
        broken
            .conflict_with(&votes[1])
            .unwrap()
            .contains("without rows")
    );
    let drains = Vote {
        draining: true,
        ..vote(1)
    };
    assert!(
        agree(&votes)
            .conflict_with(&drains)
            .unwrap()
            .contains("drain")
    );
}

#[test]
fn a_vote_that_no_plan_can_give_is_found() {
    type Change = fn(&mut Vote);
    let cases: [Change; 7] = [
        |it| it.num_tokens = 2,
        |it| it.num_prefill_rows = 1,
        |it| it.num_context_tokens = 1,
        |it| (it.num_prefill_tokens, it.num_tokens) = (2, 5),
        |it| it.num_decode_rows = 0,
        |it| it.idle = true,
        |it| it.num_prefill_tokens = u32::MAX,
    ];
    for change in cases {
        let mut broken = decoding(0, 3);
        change(&mut broken);
        assert!(!broken.is_valid(), "{broken:?}");
    }
}

#[test]
fn a_missing_vote_is_an_error_with_the_replicas_name_and_never_a_decision() {
    let votes = [decoding(0, 3), vote(2)];
    let error = decide(&votes, 3, &graphs()).unwrap_err();
    let step = StepId(3);
    assert_eq!(error, Disagreement::Missing { replica: 1, step });
    assert_eq!(error.to_string(), "replica 1 did not vote on step 3");
    assert!(decide(&[], 1, &graphs()).is_err());
    assert!(decide(&[vote(0), vote(0)], 2, &graphs()).is_err());
    assert!(decide(&[vote(0), vote(7)], 2, &graphs()).is_err());
    let behind = Vote {
        step: StepId(2),
        ..vote(1)
    };
    assert!(matches!(
        decide(&[vote(0), behind], 2, &graphs()),
        Err(Disagreement::Step { replica: 1, .. })
    ));
}

#[test]
fn a_drain_anywhere_closes_the_whole_group_and_it_stops_when_all_are_idle() {
    let mut group = Group::new(3, &settings());
    group.harnesses[0].submit(Spec::new(5, 4)).unwrap();
    group.harnesses[1].scheduler.drain();
    assert!(!group.step().stop);
    assert!(group.harnesses[2].submit(Spec::new(5, 4)).is_err());
    group.run_to_the_end();
    assert!(group.step().stop);
}

#[test]
fn the_first_vote_with_rows_wakes_an_idle_group() {
    let mut group = Group::new(4, &settings());
    assert_eq!(group.step().mode, Mode::Idle);
    group.harnesses[3].submit(Spec::new(5, 2)).unwrap();
    let agreed = group.step();
    assert_eq!(agreed.mode, Mode::Prefill);
    assert_eq!(agreed.dummy_replicas, [0, 1, 2]);
    group.run_to_the_end();
}

/// One replica lacks an optimisation that the others use: they would wait for it in a collective.
#[test]
fn a_replica_without_graphs_takes_them_from_all_by_its_dummy_row_too() {
    let harness = Harness::new(settings());
    let without = harness.scheduler.vote(None, 1, 0);
    assert!(!without.can_graph && harness.scheduler.vote(None, 1, 1).can_graph);
    let first = Vote {
        step: without.step,
        ..decoding(0, 3)
    };
    assert_eq!(agree(&[first, without]).graph_bucket, None);
}

#[test]
fn an_idle_decision_uses_up_its_step_so_that_no_vote_fits_two_rounds() {
    let mut group = Group::new(2, &settings());
    assert_eq!(
        [group.step().step, group.step().step],
        [StepId(1), StepId(2)]
    );
    group.harnesses[1].submit(Spec::new(5, 2)).unwrap();
    let agreed = group.step();
    assert_eq!((agreed.step, agreed.mode), (StepId(3), Mode::Prefill));
    group.run_to_the_end();
}

/// Steps of 128 tokens.
fn roomy_steps() -> Settings {
    with(settings(), |it| {
        it.scheduler.max_batch_tokens = Some(128);
        it.scheduler.long_prefill_token_threshold = None;
    })
}

fn prefill_lengths(decision: &Decision) -> Vec<u32> {
    decision.tokens.iter().map(|of| of.prefill).collect()
}

#[test]
fn prompts_get_more_of_a_step_the_more_replicas_have_some() {
    let mut group = Group::new(4, &roomy_steps());
    for replica in 0..2 {
        group.harnesses[replica].submit(Spec::new(200, 1)).unwrap();
    }
    assert_eq!(
        prefill_lengths(&group.step()),
        [128, 128, 0, 0],
        "no step told of others"
    );
    group.complete_all();
    group.harnesses[2].submit(Spec::new(200, 1)).unwrap();
    assert_eq!(prefill_lengths(&group.step()), [64, 64, 96, 0]);
    group.complete_all();
    assert_eq!(prefill_lengths(&group.step()), [8, 8, 96, 0]);
    group.complete_all();
    assert_eq!(prefill_lengths(&group.step()), [0, 0, 8, 0]);
    group.run_to_the_end();
    group.harnesses[3].submit(Spec::new(200, 1)).unwrap();
    assert_eq!(prefill_lengths(&group.step()), [0, 0, 0, 32], "alone");
    group.run_to_the_end();
}

#[derive(Clone, Debug)]
enum Action {
    Submit(usize, Spec),
    Step,
    Complete(usize),
    Abort(usize, usize),
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => (any::<usize>(), any_spec()).prop_map(|(replica, spec)| Action::Submit(replica, spec)),
        20 => Just(Action::Step),
        24 => any::<usize>().prop_map(Action::Complete),
        1 => (any::<usize>(), any::<usize>()).prop_map(|(replica, index)| Action::Abort(replica, index)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: in_proportion(500), ..ProptestConfig::default() })]

    #[test]
    fn replicas_that_step_together_give_every_request_its_own_tokens(
        settings in any_settings(),
        num_replicas in 1..5usize,
        actions in vec(any_action(), 1..80),
    ) {
        let mut group = Group::new(num_replicas, &settings);
        for action in actions {
            match action {
                Action::Submit(replica, spec) => drop(group.harnesses[replica % num_replicas].submit(spec)),
                Action::Step if group.most_on_the_wire() < 2 => drop(group.step()),
                Action::Step => {}
                Action::Complete(replica) => {
                    let harness = &mut group.harnesses[replica % num_replicas];
                    if harness.num_in_flight() > 0 {
                        harness.complete();
                    }
                }
                Action::Abort(replica, index) => {
                    let harness = &mut group.harnesses[replica % num_replicas];
                    let request = harness.clients.keys().nth(index % harness.clients.len().max(1)).copied();
                    request.map(|request| harness.abort(request));
                }
            }
        }
        group.run_to_the_end();
    }
}

fn any_vote() -> impl Strategy<Value = Vote> {
    let prompts = prop_oneof![Just((0, 0, 0)), (1..140u32, 1..4u32, 0..120u32)];
    (prompts, 0..10u32, prop::bool::weighted(0.9)).prop_map(|(prompts, num_decode_rows, graph)| {
        let (num_prefill_tokens, num_prefill_rows, num_context_tokens) = prompts;
        let num_tokens = num_prefill_tokens + num_decode_rows;
        Vote {
            num_prefill_tokens,
            num_prefill_rows: num_prefill_rows.min(num_prefill_tokens),
            num_context_tokens,
            num_decode_rows,
            num_tokens,
            can_graph: graph,
            idle: num_tokens == 0,
            ..vote(0)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: in_proportion(2000), ..ProptestConfig::default() })]

    #[test]
    fn a_step_takes_the_fewest_tokens_for_which_each_replica_has_a_graph(
        mut votes in vec(any_vote(), 1..5),
    ) {
        (0..).zip(&mut votes).for_each(|(replica, vote)| vote.replica = replica);
        let sizes = graphs();
        let has_graph = |vote: &Vote, bucket| {
            sizes.iter().any(|size| size.num_tokens() == bucket && size.fits(vote))
        };
        let may_graph = votes.iter().all(|vote| vote.can_graph)
            && votes.iter().any(|vote| vote.num_tokens > 0);
        let suits = |bucket: &u32| votes.iter().all(|vote| has_graph(vote, *bucket));
        let expected = (1..=128).find(suits).filter(|_| may_graph);
        prop_assert_eq!(agree(&votes).graph_bucket, expected);
    }
}
