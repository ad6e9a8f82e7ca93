//! Claims about fair share between tenants.

use plait_core::{
    Event, Micros, Output, Policy, Refusal, RequestId, Scheduler, Settings, StepResult, StepWork,
};

use crate::fixtures::{settings, step, with};
use crate::harness::{Harness, Spec};

fn fair() -> Settings {
    with(settings(), |it| {
        it.scheduler.policy = Policy::Fair;
        it.scheduler.max_seqs = Some(1);
        it.runtime.max_rows = Some(1);
    })
}

fn of(tenant: u64, num_prompt: u32, max_tokens: u32) -> Spec {
    Spec {
        tenant,
        ..Spec::new(num_prompt, max_tokens)
    }
}

/// The tenants in the order of their admissions.
fn admissions(harness: &mut Harness) -> Vec<u64> {
    let mut tenants = Vec::new();
    while !harness.scheduler.is_idle() {
        let plan = step(harness);
        let new = plan.new_slots.iter().filter(|new| new.waited.is_some());
        tenants.extend(new.map(|new| harness.clients[&new.request].spec.tenant));
    }
    tenants
}

#[test]
fn a_tenant_with_one_request_does_not_wait_for_anothers_ten() {
    let mut harness = Harness::new(fair());
    for _ in 0..10 {
        harness.submit(of(1, 5, 5)).unwrap();
    }
    harness.submit(of(2, 5, 5)).unwrap();
    assert_eq!(admissions(&mut harness)[..3], [1, 2, 1]);
}

#[test]
fn until_steps_were_measured_shares_are_counted_in_computed_tokens() {
    let mut harness = Harness::new(fair());
    harness.measures = false;
    for _ in 0..3 {
        harness.submit(of(1, 20, 11)).unwrap();
    }
    for _ in 0..9 {
        harness.submit(of(2, 5, 6)).unwrap();
    }
    assert_eq!(
        admissions(&mut harness),
        [1, 2, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2],
        "30 tokens a request against 10"
    );
}

/// Two tenants' heads take turns. Each has a large prompt, and small ones behind it that fit at any time.
#[test]
fn heads_that_alternate_are_passed_no_more_often_than_one_that_stays() {
    let settings = with(settings(), |it| {
        it.scheduler.policy = Policy::Fair;
        it.scheduler.max_skip_ahead = 4;
        it.scheduler.max_queue = 1000;
        it.runtime.num_pages = 16;
    });
    let mut harness = Harness::new(settings);
    for tenant in [1, 2] {
        harness.submit(of(tenant, 20, 40)).unwrap();
    }
    step(&mut harness);
    for tenant in [1, 2] {
        harness.submit(of(tenant, 230, 5)).unwrap();
    }
    for tenant in [1, 2].repeat(40) {
        harness.submit(of(tenant, 20, 40)).unwrap();
    }
    let mut admitted = Vec::new();
    while admitted.len() < 40 {
        let plan = step(&mut harness);
        let new = plan.new_slots.iter().filter(|new| new.waited.is_some());
        admitted.extend(new.map(|new| new.request.0));
    }
    for large in [2, 3] {
        let num_before = admitted.iter().position(|it| *it == large);
        assert!(
            num_before.is_some_and(|num| num <= 2 * 4 + 1),
            "{admitted:?}"
        );
    }
}

#[test]
fn a_tenant_that_stayed_away_saves_nothing_up() {
    let mut harness = Harness::new(fair());
    harness.submit(of(1, 20, 50)).unwrap();
    harness.run_to_the_end(1);
    for _ in 0..2 {
        harness.submit(of(1, 5, 5)).unwrap();
        harness.submit(of(2, 5, 5)).unwrap();
    }
    assert_eq!(admissions(&mut harness), [1, 2, 1, 2]);
}

#[test]
fn a_newcomer_is_not_level_with_a_tenant_that_left_long_ago() {
    let mut harness = Harness::new(fair());
    harness.submit(of(1, 5, 5)).unwrap();
    harness.run_to_the_end(1);
    harness.submit(of(2, 20, 30)).unwrap();
    harness.submit(of(2, 5, 5)).unwrap();
    (0..29).for_each(|_| drop(step(&mut harness)));
    for _ in 0..4 {
        harness.submit(of(3, 5, 5)).unwrap();
    }
    assert_eq!(admissions(&mut harness), [3, 2, 3, 3, 3]);
}

#[test]
fn priority_orders_the_requests_of_one_tenant_only() {
    let mut harness = Harness::new(fair());
    harness.submit(of(1, 5, 5)).unwrap();
    for (tenant, priority) in [(2, 5), (1, 0), (1, -1)] {
        harness
            .submit(Spec {
                priority,
                ..of(tenant, 5, 5)
            })
            .unwrap();
    }
    let mut order = Vec::new();
    while !harness.scheduler.is_idle() {
        order.extend(step(&mut harness).new_slots.iter().map(|new| new.request.0));
    }
    assert_eq!(order, [3, 1, 0, 2]);
}

/// A scheduler and a client that has `num` requests of each tenant waiting at any time.
struct Load {
    scheduler: Scheduler,
    now: u64,
    /// Microseconds of the steps, apportioned to the tenants of their rows.
    served: Vec<f64>,
    tenant_of: Vec<usize>,
    num_waiting: Vec<u32>,
}

impl Load {
    fn new(settings: Settings, num_tenants: usize) -> Self {
        Self {
            scheduler: Scheduler::new(settings).unwrap(),
            now: 0,
            served: vec![0.0; num_tenants],
            tenant_of: Vec::new(),
            num_waiting: vec![0; num_tenants],
        }
    }

    fn submit(&mut self, tenant: usize, spec: &Spec) -> RequestId {
        let request = Spec {
            tenant: tenant as u64,
            ..spec.clone()
        };
        self.tenant_of.push(tenant);
        self.num_waiting[tenant] += 1;
        let taken = self.scheduler.submit(request.request(), Micros(self.now));
        taken.unwrap()
    }

    /// Keeps every tenant waiting for `num_steps` steps, whose time is `cost`.
    fn keep_waiting(&mut self, specs: &[Spec], num_steps: u32, cost: [f64; 5]) {
        for _ in 0..num_steps {
            for (tenant, spec) in specs.iter().enumerate() {
                while self.num_waiting[tenant] < 16 {
                    self.submit(tenant, spec);
                }
            }
            self.step(cost);
        }
    }

    fn step(&mut self, [constant, token, pair, row, kv_token]: [f64; 5]) {
        let plan = self.scheduler.plan(Micros(self.now)).unwrap();
        for new in &plan.new_slots {
            self.num_waiting[self.tenant_of[usize::try_from(new.request.0).unwrap()]] -= 1;
        }
        let time = |work: &StepWork| {
            token * work.num_prefill_tokens as f64
                + pair * work.num_prefill_pairs as f64
                + row * work.num_decode_rows as f64
                + kv_token * work.num_decode_kv_tokens as f64
        };
        #[expect(clippy::cast_sign_loss, reason = "a step's time is positive")]
        let elapsed = (constant + time(&StepWork::of(&plan))) as u64;
        for chunk in &plan.prefill {
            let mut work = StepWork::default();
            work.add_prefill(chunk.start, chunk.length);
            self.served[self.tenant_of[usize::try_from(chunk.request.0).unwrap()]] += time(&work);
        }
        for decode in &plan.decode {
            let mut work = StepWork::default();
            work.add_decode(decode.start);
            self.served[self.tenant_of[usize::try_from(decode.request.0).unwrap()]] += time(&work);
        }
        let num = plan.prefill.iter().filter(|row| row.is_last_chunk).count() + plan.decode.len();
        let measured = Event::Measured {
            step: plan.step,
            elapsed: Micros(elapsed),
        };
        let result = Event::Result(StepResult {
            step: plan.step,
            num_accepted: &vec![1; num],
            token_ids: &vec![1; num],
        });
        let mut outputs = Vec::new();
        self.scheduler.advance(measured, &mut outputs).unwrap();
        self.scheduler.advance(result, &mut outputs).unwrap();
        self.now += elapsed;
    }

    /// Largest deviation from the ideal share of the service since `before`, by weight.
    fn unfairness(&self, before: &[f64], weights: &[f64]) -> f64 {
        let served: Vec<f64> = (self.served.iter().zip(before))
            .map(|(now, then)| now - then)
            .collect();
        let (total, weight): (f64, f64) = (served.iter().sum(), weights.iter().sum());
        let each = served.iter().zip(weights);
        each.map(|(served, own)| (served / total / (own / weight) - 1.0).abs())
            .fold(0.0, f64::max)
    }
}

fn fair_with_slots(num_slots: u32) -> Settings {
    with(settings(), |it| {
        it.scheduler.policy = Policy::Fair;
        it.scheduler.max_seqs = Some(num_slots);
        it.runtime.max_rows = Some(num_slots);
        it.scheduler.max_batch_tokens = Some(2048);
        it.scheduler.long_prefill_token_threshold = Some(2048);
        it.scheduler.max_queue = 1 << 20;
        it.scheduler.max_queue_tokens = 1 << 40;
        it.runtime.num_pages = 4000;
        it.runtime.max_model_len = 4096;
    })
}

#[test]
fn one_shot_tenants_do_not_starve_one_that_comes_again() {
    let mut scheduler = Scheduler::new(fair_with_slots(1)).unwrap();
    let mut newcomers = 1000..;
    let submit = |scheduler: &mut Scheduler, tenant| {
        let spec = of(tenant, 16, 16);
        scheduler.submit(spec.request(), Micros(0)).unwrap()
    };
    submit(&mut scheduler, 1);
    for _ in 0..4 {
        submit(&mut scheduler, newcomers.next().unwrap());
    }
    let (mut again, mut num_others) = (None, 0);
    loop {
        let plan = scheduler.plan(Micros(0)).unwrap();
        let (one, mut outputs) = ([1], Vec::new());
        let result = StepResult {
            step: plan.step,
            num_accepted: &one,
            token_ids: &one,
        };
        scheduler
            .advance(Event::Result(result), &mut outputs)
            .unwrap();
        for output in outputs {
            let Output::Finished { request, .. } = output else {
                continue;
            };
            if Some(request) == again {
                return;
            }
            num_others += u32::from(again.is_some());
            again = again.or_else(|| Some(submit(&mut scheduler, 1)));
            submit(&mut scheduler, newcomers.next().unwrap());
            assert!(
                num_others <= 10,
                "five tenants wait at any time, and ten others were served"
            );
        }
    }
}

/// Twenty microseconds a prefill token, and ten milliseconds to read the weights for up to eight rows.
const COST: [f64; 5] = [1_000.0, 20.0, 0.002, 1_250.0, 0.05];

#[test]
fn prompts_and_answers_are_weighed_by_the_time_they_take() {
    let specs = [Spec::new(16, 512), Spec::new(2000, 1), Spec::new(300, 100)];
    let mut load = Load::new(fair_with_slots(24), 3);
    load.keep_waiting(&specs, 500, COST);
    let before = load.served.clone();
    load.keep_waiting(&specs, 20_000, COST);
    let unfairness = load.unfairness(&before, &[1.0; 3]);
    assert!(
        unfairness < 0.1,
        "{unfairness} off the ideal: {:?}",
        load.served
    );
}

#[test]
fn a_weight_multiplies_a_tenants_share() {
    let weights = [1, 2, 5];
    let specs = weights.map(|weight| Spec {
        weight,
        ..Spec::new(100, 50)
    });
    let mut load = Load::new(fair_with_slots(24), 3);
    load.keep_waiting(&specs, 500, COST);
    let before = load.served.clone();
    load.keep_waiting(&specs, 10_000, COST);
    let unfairness = load.unfairness(&before, &weights.map(f64::from));
    assert!(
        unfairness < 0.1,
        "{unfairness} off the ideal: {:?}",
        load.served
    );
}

#[test]
fn a_flooding_tenant_makes_room_for_others_in_a_full_queue() {
    let mut harness = Harness::new(with(fair(), |it| it.scheduler.max_queue = 10));
    for _ in 0..10 {
        harness.submit(of(7, 5, 5)).unwrap();
    }
    let full = Refusal::QueueFull {
        waiting: 10,
        limit: 10,
    };
    assert_eq!(harness.submit(of(7, 5, 5)), Err(full.clone()));
    let others: Vec<_> = (0..5)
        .map(|_| harness.submit(of(8, 5, 5)).unwrap())
        .collect();
    assert_eq!(
        harness.submit(of(8, 5, 5)),
        Err(full.clone()),
        "both have half of it"
    );
    assert_eq!(harness.submit(of(7, 5, 5)), Err(full));
    let ends = |id: u64| harness.clients[&RequestId(id)].rejected.clone();
    assert_eq!(ends(4), None);
    assert_eq!(ends(5), Some(Refusal::Displaced), "the last ones gave way");
    harness.run_to_the_end(2);
    assert!(
        others
            .iter()
            .all(|id| harness.clients[id].rejected.is_none())
    );
}

#[test]
fn the_limit_on_waiting_tokens_is_shared_too() {
    let mut harness = Harness::new(with(fair(), |it| it.scheduler.max_queue_tokens = 100));
    for _ in 0..10 {
        harness.submit(of(7, 10, 2)).unwrap();
    }
    harness.submit(of(8, 35, 2)).unwrap();
    let displaced = (0..10).filter(|id| harness.clients[&RequestId(*id)].rejected.is_some());
    assert_eq!(displaced.count(), 4, "as many as 35 tokens need");
    let longer = harness.submit(of(8, 35, 2));
    assert!(
        matches!(longer, Err(Refusal::QueueTokensFull { .. })),
        "{longer:?}"
    );
    harness.run_to_the_end(1);
}
