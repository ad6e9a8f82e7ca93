//! Claims about the limits of the queue.

use plait_core::{Event, Micros, Output, Plan, Policy, Refusal, RequestId, Scheduler, StepResult};

use crate::fixtures::{harness, settings, step, with};
use crate::harness::Spec;

#[test]
fn as_much_may_wait_as_the_limits_say_and_what_is_admitted_makes_room() {
    let settings = with(settings(), |it| {
        it.scheduler.max_seqs = Some(1);
        it.scheduler.max_queue = 3;
        it.scheduler.max_queue_tokens = 10;
    });
    let mut harness = harness(settings, [(4, 2)]);
    step(&mut harness);
    for num_prompt in [3, 4, 3] {
        assert!(harness.submit(Spec::new(num_prompt, 2)).is_ok());
    }
    assert_eq!(
        harness.submit(Spec::new(1, 1)),
        Err(Refusal::QueueFull {
            waiting: 3,
            limit: 3
        })
    );
    while harness.scheduler.stats().num_waiting == 3 {
        step(&mut harness);
    }
    assert_eq!(
        harness.submit(Spec::new(4, 1)),
        Err(Refusal::QueueTokensFull {
            waiting: 7,
            limit: 10
        })
    );
    assert!(harness.submit(Spec::new(3, 1)).is_ok());
    harness.run_to_the_end(1);
}

#[test]
fn a_request_that_waited_too_long_is_answered_and_one_that_ran_is_not() {
    let settings = with(settings(), |it| {
        it.scheduler.max_seqs = Some(1);
        it.scheduler.max_queue_seconds = Some(5.0);
    });
    let mut scheduler = Scheduler::new(settings).unwrap();
    let at = |second: u64| Micros(second * 1_000_000);
    let submit = |scheduler: &mut Scheduler, second| {
        let spec = Spec::new(4, 100);
        scheduler.submit(spec.request(), at(second)).unwrap()
    };
    let running = submit(&mut scheduler, 0);
    scheduler.plan(at(0)).unwrap();
    let (first, second) = (submit(&mut scheduler, 1), submit(&mut scheduler, 3));
    drop(scheduler.plan(at(6)));
    assert_eq!(scheduler.take_rejected(), [], "five seconds are allowed");
    drop(scheduler.plan(at(7)));
    let rejected = scheduler.take_rejected();
    let [only] = &rejected[..] else {
        panic!("{rejected:?}");
    };
    assert_eq!(only.request, first);
    let text = only.refusal.to_string();
    assert!(
        text.contains("waited 6 s") && text.contains("5 s are allowed (--max-queue-seconds)"),
        "{text}"
    );
    assert_eq!(scheduler.prompt_len(first), None);
    assert_eq!(scheduler.prompt_len(second), Some(4));
    assert_eq!(scheduler.prompt_len(running), Some(4));
}

/// The head needs more pages than are free; the next ones do not.
#[test]
fn a_bounded_number_of_requests_passes_a_head_whose_pages_are_not_free() {
    let settings = with(settings(), |it| {
        it.scheduler.max_skip_ahead = 2;
        it.runtime.num_pages = 8;
    });
    let mut harness = harness(settings, [(64, 40)]);
    step(&mut harness);
    harness.submit(Spec::new(80, 1)).unwrap();
    for _ in 0..4 {
        harness.submit(Spec::new(16, 1)).unwrap();
    }
    let mut admitted = Vec::new();
    while !harness.scheduler.is_idle() {
        let plan = step(&mut harness);
        admitted.extend(plan.new_slots.iter().map(|new| new.request.0));
    }
    assert_eq!(admitted, [2, 3, 1, 4, 5]);
}

/// Completes a step with a token for each row that samples. Returns the number of requests that ended.
fn complete(scheduler: &mut Scheduler, plan: &Plan) -> usize {
    let num = plan.prefill.iter().filter(|row| row.is_last_chunk).count() + plan.decode.len();
    let result = StepResult {
        step: plan.step,
        num_accepted: &vec![1; num],
        token_ids: &vec![1; num],
    };
    let mut outputs = Vec::new();
    scheduler
        .advance(Event::Result(result), &mut outputs)
        .unwrap();
    let ended = outputs
        .iter()
        .filter(|it| matches!(it, Output::Finished { .. }));
    ended.count()
}

/// What was told of the wait to what it was, for a queue of 16 that four slots serve. It is asked for as soon as
/// `is_time`, by the answers that have ended and the steps so far.
fn told_to_true_wait(spec: &Spec, is_time: impl Fn(usize, u64) -> bool) -> f64 {
    let settings = with(settings(), |it| {
        it.scheduler.policy = Policy::Fcfs;
        it.scheduler.max_seqs = Some(4);
    });
    let mut scheduler = Scheduler::new(settings).unwrap();
    let mut now = 0;
    let mut num_ended = 0;
    let mut told = None;
    let mut cleared = None;
    let mut last = RequestId(0);
    while cleared.is_none() {
        while told.is_none() && scheduler.stats().num_waiting < 16 {
            last = scheduler.submit(spec.request(), Micros(now)).unwrap();
        }
        let plan = scheduler.plan(Micros(now)).unwrap();
        if plan.new_slots.iter().any(|new| new.request == last) && told.is_some() {
            cleared = Some(now);
        }
        now += 10_000;
        num_ended += complete(&mut scheduler, &plan);
        let is_full = scheduler.stats().num_waiting == 16;
        if told.is_none() && is_full && is_time(num_ended, plan.step.0) {
            told = scheduler.queue_clears_in().map(|wait| (now, wait.0));
        }
    }
    let ((since, told), cleared) = (told.unwrap(), cleared.unwrap());
    told as f64 / (cleared - since) as f64
}

#[test]
fn the_wait_for_a_full_queue_follows_from_the_rate_at_which_it_is_served() {
    let ratio = told_to_true_wait(&Spec::new(40, 20), |num_ended, _| num_ended > 40);
    assert!((0.5..2.0).contains(&ratio), "{ratio}");
}

#[test]
fn the_wait_is_told_before_an_answer_has_ended() {
    let ratio = told_to_true_wait(&Spec::new(40, 20), |num_ended, step| {
        assert_eq!(num_ended, 0);
        step == 14
    });
    assert!((0.5..2.0).contains(&ratio), "{ratio}");
}

#[test]
fn no_answer_is_told_to_be_longer_than_it_may_be() {
    for step in 14..20 {
        let ratio = told_to_true_wait(&Spec::new(1, 20), |_, it| it == step);
        assert!((0.5..2.0).contains(&ratio), "{ratio} after {step} steps");
    }
}

#[test]
fn an_idle_hour_is_no_service_even_if_it_began_with_an_abort() {
    let told_after = |idle_seconds: u64| {
        let settings = with(settings(), |it| it.scheduler.max_seqs = Some(1));
        let mut scheduler = Scheduler::new(settings).unwrap();
        let mut now = 0;
        let submit = |scheduler: &mut Scheduler, now| {
            let request = Spec::new(40, 20).request();
            scheduler.submit(request, Micros(now)).unwrap()
        };
        submit(&mut scheduler, now);
        let waiting = submit(&mut scheduler, now);
        let mut num_ended = 0;
        while num_ended == 0 {
            let plan = scheduler.plan(Micros(now)).unwrap();
            now += 10_000;
            num_ended = complete(&mut scheduler, &plan);
        }
        let abort = Event::Abort(waiting);
        scheduler.advance(abort, &mut Vec::new()).unwrap();
        now += idle_seconds * 1_000_000;
        for _ in 0..2 {
            submit(&mut scheduler, now);
        }
        drop(scheduler.plan(Micros(now)));
        scheduler.queue_clears_in().unwrap()
    };
    assert_eq!(told_after(3600), told_after(7200));
    assert!(told_after(3600) < Micros(1_000_000));
}
