//! Every schedule of two replicas of which one loses its ranks: its requests go to the other one, one at a time and
//! whenever, or wait for its new ranks.
//!
//! As in `explorer.rs`, states that differ in numbers only are visited once.

use plait_core::{RequestId, Settings};
use rustc_hash::FxHashSet;

use crate::explorer::{all_settings, assert_enough, explores_all, fingerprint, keeping_prefixes};
use crate::harness::{Harness, Spec};

#[derive(Clone, Copy, Debug)]
enum Action {
    Submit,
    Plan(usize),
    Complete(usize),
    /// The first replica loses its ranks.
    Lose,
    /// A request of it goes to the second.
    Give(RequestId),
    /// The first replica has ranks again.
    Return,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Serves,
    Down,
    ServesAgain,
}

#[derive(Clone)]
struct World {
    replicas: [Harness; 2],
    first: First,
    num_submitted: usize,
}

impl World {
    fn actions(&self, num_requests: usize, depth: usize) -> Vec<Action> {
        let mut actions = Vec::new();
        for replica in 0..2 {
            let num_in_flight = self.replicas[replica].num_in_flight();
            if num_in_flight < depth && (replica == 1 || self.first != First::Down) {
                actions.push(Action::Plan(replica));
            }
            if num_in_flight > 0 {
                actions.push(Action::Complete(replica));
            }
        }
        if self.num_submitted < num_requests {
            actions.push(Action::Submit);
        }
        if self.first == First::Serves && !self.replicas[0].clients.is_empty() {
            actions.push(Action::Lose);
        }
        if self.first == First::Down {
            actions.push(Action::Return);
            let clients = self.replicas[0].clients.iter();
            let alive = clients.filter(|(_, client)| client.ended.is_none());
            actions.extend(alive.map(|(request, _)| Action::Give(*request)));
        }
        actions
    }

    /// False where the action changes nothing: no row can be planned now.
    fn act(&mut self, action: Action, requests: &[(usize, u32, u32)]) -> bool {
        match action {
            Action::Plan(replica) => return self.replicas[replica].plan().is_some(),
            Action::Complete(replica) => drop(self.replicas[replica].complete()),
            Action::Submit => {
                let (replica, num_prompt, max_tokens) = requests[self.num_submitted];
                let spec = Spec::new(num_prompt, max_tokens);
                self.replicas[replica].submit(spec).unwrap();
                self.num_submitted += 1;
            }
            Action::Lose => {
                self.replicas[0].lose();
                self.first = First::Down;
            }
            Action::Give(request) => {
                let [first, second] = &mut self.replicas;
                first.give(request, second);
            }
            Action::Return => self.first = First::ServesAgain,
        }
        true
    }

    fn fingerprint(&self) -> String {
        let [first, second] = self.replicas.each_ref().map(fingerprint);
        format!("{:?} {} {first} {second}", self.first, self.num_submitted)
    }
}

struct Explorer<'a> {
    requests: &'a [(usize, u32, u32)],
    depth: usize,
    states: FxHashSet<String>,
    path: Vec<Action>,
}

impl Explorer<'_> {
    fn visit(&mut self, world: &World) {
        if !self.states.insert(world.fingerprint()) {
            return;
        }
        let mut num_moves = 0;
        for action in world.actions(self.requests.len(), self.depth) {
            let mut next = world.clone();
            self.path.push(action);
            if next.act(action, self.requests) {
                num_moves += 1;
                self.visit(&next);
            }
            self.path.pop();
        }
        if num_moves == 0 {
            for replica in &world.replicas {
                assert!(replica.scheduler.is_idle(), "stuck by {:?}", self.path);
                replica.check_the_end();
            }
        }
    }
}

/// Explores with these requests: the replica that each comes to, its prompt's length, its output.
fn explore(settings: &Settings, depth: usize, requests: &[(usize, u32, u32)]) -> usize {
    let world = World {
        replicas: [0, 1].map(|_| Harness::new(settings.clone())),
        first: First::Serves,
        num_submitted: 0,
    };
    let mut explorer = Explorer {
        requests,
        depth,
        states: FxHashSet::default(),
        path: Vec::new(),
    };
    explorer.visit(&world);
    explorer.states.len()
}

#[test]
fn no_move_at_any_time_gets_anybody_stuck() {
    let mut num_states = 0;
    let all: Vec<_> = all_settings()
        .into_iter()
        .chain(keeping_prefixes())
        .collect();
    // Without `explores_all` every fifth; of two dozen or one these have each switch and each limit.
    let one_in = if explores_all() { 1 } else { 5 };
    for (settings, depth) in all.into_iter().step_by(one_in) {
        num_states += explore(&settings, depth, &[(0, 3, 2), (0, 5, 1), (1, 2, 2)]);
        if explores_all() {
            num_states += explore(&settings, depth, &[(0, 1, 4), (1, 5, 2), (0, 4, 0)]);
        }
    }
    assert_enough(num_states, 60_000);
}
