//! Replicas that share their experts, in virtual time: they vote, step together, and wait for the slowest.

use std::collections::VecDeque;
use std::sync::mpsc::SyncSender;

use plait_core::{Micros, Plan, Vote, decide};

use crate::replica::Replica;
use crate::routes::Routes;
use crate::run_metrics::RunMetrics;
use crate::settings::{Routing, Setup};
use crate::simulate::{Progress, least_loaded};
use crate::trace::Arrival;

/// All replicas of a group.
struct Group<'a> {
    setup: &'a Setup,
    replicas: Vec<Replica<'a>>,
    /// Ends of the steps in flight.
    ends: VecDeque<Micros>,
    /// When the last of them ends.
    free_at: Micros,
    num_routed: usize,
    routes: Option<Routes>,
}

/// Runs the group to its end.
pub fn run_group(setup: &Setup, progress: &Progress, sender: &SyncSender<RunMetrics>) {
    let mut group = Group::new(setup);
    for together in setup.arrivals.chunk_by(|a, b| a.at == b.at) {
        let now = together[0].at;
        group.run_until(now);
        for arrival in together {
            group.route(arrival, now);
        }
        group.send_steps(now);
        if progress.goes_on_after(together.len()).is_break() {
            return;
        }
    }
    group.run_until(Micros(u64::MAX));
    for replica in group.replicas {
        if sender.send(replica.into_metrics()).is_err() {
            return;
        }
    }
}

impl<'a> Group<'a> {
    fn new(setup: &'a Setup) -> Self {
        Self {
            setup,
            replicas: (0..setup.num_replicas)
                .map(|_| Replica::new(setup))
                .collect(),
            ends: VecDeque::new(),
            free_at: Micros(0),
            num_routed: 0,
            routes: Routes::new(setup),
        }
    }

    fn run_until(&mut self, now: Micros) {
        while let Some(end) = self.ends.front().copied().filter(|end| *end <= now) {
            self.ends.pop_front();
            for replica in &mut self.replicas {
                replica.complete_until(end);
            }
            self.send_steps(end);
        }
    }

    fn route(&mut self, arrival: &Arrival, now: Micros) {
        let in_turn = self.num_routed % self.replicas.len();
        self.num_routed += 1;
        let index = match (self.setup.routing, &mut self.routes) {
            (Routing::InTurn, _) => in_turn,
            (_, Some(routes)) => routes.choose(arrival, &mut self.replicas),
            (_, None) => least_loaded(&self.replicas),
        };
        let request = self.replicas[index].submit(arrival, now);
        if let Some(routes) = &mut self.routes {
            routes.begin(index, request);
        }
    }

    /// Plans as many steps as may be in flight, until none has rows.
    fn send_steps(&mut self, now: Micros) {
        while self.ends.len() < self.setup.scheduler.scheduler.max_in_flight() {
            let plans = self.decided_plans(now);
            if plans.is_empty() {
                return;
            }
            let (start, elapsed) = (self.free_at.max(now), self.setup.cost.group_time(&plans));
            for (replica, plan) in self.replicas.iter_mut().zip(&plans) {
                replica.send(plan, start, elapsed);
            }
            self.free_at = Micros(start.0.saturating_add(elapsed.0));
            self.ends.push_back(self.free_at);
        }
    }

    /// What each replica computes in the next step; nothing if all are idle.
    fn decided_plans(&mut self, now: Micros) -> Vec<Plan> {
        let plans = self.replicas.iter_mut().map(|replica| replica.plan(now));
        let plans: Vec<Option<Plan>> = plans.collect();
        let voters = (0..).zip(self.replicas.iter().zip(&plans));
        let votes = voters.map(|(number, (replica, plan))| replica.vote(plan.as_ref(), number));
        let votes: Vec<Vote> = votes.collect();
        let decision = decide(&votes, self.setup.num_replicas, &[]);
        let decision = decision.expect("each replica voted on the same step");
        let each = self.replicas.iter_mut().zip(plans);
        each.filter_map(|(replica, plan)| replica.apply_decision(plan, &decision))
            .collect()
    }
}
