//! Every schedule of three requests on four pages: all orders of arrivals, plans, results, aborts,
//! flushes and losses.
//!
//! States that differ in numbers only (steps, times, which page is which) are visited once. A state
//! that comes back on its own path would be a livelock; one in which nothing can happen, a deadlock.

use plait_core::{Policy, PoolSize, RequestId, Settings};
use rustc_hash::FxHashMap;

use crate::fixtures::{settings, with};
use crate::harness::{Harness, Spec};
use crate::masks::Lateness;

#[derive(Clone, Copy, Debug)]
enum Action {
    Submit,
    Plan,
    /// The masks of its rows are late that are not there yet.
    PlanWithLateMasks,
    MaskReady(RequestId),
    Complete,
    Abort(RequestId),
    Lose,
    Flush,
}

/// The constants of one exploration.
#[derive(Clone, Debug)]
struct Case {
    settings: Settings,
    /// Prompt length and output of each request.
    requests: [(u32, u32); 3],
    /// Steps in flight at most.
    depth: usize,
    num_aborts: usize,
    /// Of the last request; the others have 0.
    priority: i32,
    /// Of the first request; its further choices take the places of the next requests.
    num_choices: u32,
    /// Plans whose masks may be late. All requests but the first need masks if there are some.
    num_late: usize,
    /// Times at which all ranks are lost.
    num_losses: usize,
    /// Times at which the prefix cache is flushed.
    num_flushes: usize,
}

impl Case {
    /// Nobody goes first, leaves or is lost.
    fn new((settings, depth): (Settings, usize), requests: [(u32, u32); 3]) -> Self {
        Self {
            settings,
            requests,
            depth,
            num_aborts: 0,
            priority: 0,
            num_choices: 1,
            num_late: 0,
            num_losses: 0,
            num_flushes: 0,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    OnThePath,
    Done,
}

struct Explorer {
    case: Case,
    states: FxHashMap<String, Visit>,
    path: Vec<Action>,
}

impl Explorer {
    /// Visits every reachable state and returns their number.
    fn explore(case: Case) -> usize {
        let harness = Harness::new(case.settings.clone());
        let mut explorer = Self {
            case,
            states: FxHashMap::default(),
            path: Vec::new(),
        };
        explorer.visit(&harness);
        explorer.states.len()
    }

    fn visit(&mut self, harness: &Harness) {
        let counts = (
            self.num_aborted(),
            self.num_late(),
            self.num_lost(),
            self.num_flushed(),
            &harness.masks,
        );
        let state = fingerprint(harness) + &format!("{counts:?}");
        match self.states.get(&state) {
            Some(Visit::Done) => return,
            Some(Visit::OnThePath) => panic!("livelock: {:?} by {:?}", self.case, self.path),
            None => drop(self.states.insert(state.clone(), Visit::OnThePath)),
        }
        let mut num_moves = 0;
        for action in self.actions(harness) {
            let mut next = harness.clone();
            if act(&mut next, action, &self.case) {
                num_moves += 1;
                self.path.push(action);
                self.visit(&next);
                self.path.pop();
            }
        }
        if num_moves == 0 {
            assert!(
                harness.scheduler.is_idle(),
                "stuck: {:?} by {:?}",
                self.case,
                self.path
            );
            harness.check_the_end();
        }
        self.states.insert(state, Visit::Done);
    }

    fn actions(&self, harness: &Harness) -> Vec<Action> {
        let mut actions = Vec::new();
        if harness.num_in_flight() < self.case.depth {
            actions.push(Action::Plan);
            if self.num_late() < self.case.num_late {
                actions.push(Action::PlanWithLateMasks);
            }
        }
        let late = harness.awaiting_masks();
        actions.extend(late.into_iter().map(Action::MaskReady));
        if harness.num_in_flight() > 0 {
            actions.push(Action::Complete);
        }
        if harness.clients.len() < self.case.requests.len() {
            actions.push(Action::Submit);
        }
        if self.num_lost() < self.case.num_losses && !harness.clients.is_empty() {
            actions.push(Action::Lose);
        }
        if self.num_flushed() < self.case.num_flushes && !harness.clients.is_empty() {
            actions.push(Action::Flush);
        }
        if self.num_aborted() < self.case.num_aborts {
            let alive = harness
                .clients
                .iter()
                .filter(|(_, client)| client.ended.is_none());
            actions.extend(alive.map(|(request, _)| Action::Abort(*request)));
        }
        actions
    }

    fn num_aborted(&self) -> usize {
        self.count(|action| matches!(action, Action::Abort(_)))
    }

    fn num_lost(&self) -> usize {
        self.count(|action| matches!(action, Action::Lose))
    }

    fn num_flushed(&self) -> usize {
        self.count(|action| matches!(action, Action::Flush))
    }

    fn num_late(&self) -> usize {
        self.count(|action| matches!(action, Action::PlanWithLateMasks))
    }

    fn count(&self, is_counted: impl Fn(&Action) -> bool) -> usize {
        self.path.iter().filter(|it| is_counted(it)).count()
    }
}

/// False where the action changes nothing: no row can be planned now.
fn act(harness: &mut Harness, action: Action, case: &Case) -> bool {
    match action {
        Action::Plan => {
            harness.masks.lateness = Lateness::Never;
            return harness.plan().is_some();
        }
        Action::PlanWithLateMasks => {
            let num_late = harness.masks.late.len();
            harness.masks.lateness = Lateness::Always;
            return harness.plan().is_some() && harness.masks.late.len() > num_late;
        }
        Action::MaskReady(request) => harness.mask_ready(request),
        Action::Complete => drop(harness.complete()),
        Action::Abort(request) => drop(harness.abort(request)),
        Action::Lose => drop(harness.lose()),
        Action::Flush => harness.flush(),
        Action::Submit => {
            let (num_prompt, max_tokens) = case.requests[harness.clients.len()];
            let is_first = harness.clients.is_empty();
            let is_last = harness.clients.len() + 1 == case.requests.len();
            let priority = if is_last { case.priority } else { 0 };
            harness
                .submit(Spec {
                    priority,
                    num_choices: if is_first { case.num_choices } else { 1 },
                    is_masked: case.num_late > 0 && !harness.clients.is_empty(),
                    ..Spec::new(num_prompt, max_tokens)
                })
                .unwrap();
        }
    }
    true
}

/// The scheduler's state in words, with steps counted back from the last one, pages numbered as they
/// come up, and without times and statistics.
pub fn fingerprint(harness: &Harness) -> String {
    let text = format!("{:?}", harness.scheduler);
    let of_scheduler = &text[text.rfind("last_step: ").unwrap()..];
    let last_step = number_after(of_scheduler, "StepId(").unwrap();
    let (start, end) = (
        text.find("counts: Counts").unwrap(),
        text.find("locations: ").unwrap(),
    );
    let words = [&text[..start], &text[end..]].concat();
    let (mut rest, mut state) = (words.as_str(), String::new());
    let (mut pages, mut snapshots): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
    while let Some(open) = rest.find('(') {
        let (before, behind) = (&rest[..open], &rest[open + 1..]);
        let after = behind.trim_start_matches(|c: char| c.is_ascii_digit());
        let number: Option<u64> = behind[..behind.len() - after.len()].parse().ok();
        state.push_str(before);
        match number {
            Some(step) if before.ends_with("StepId") => {
                state += &(last_step - step).min(9).to_string();
            }
            Some(page) if before.ends_with("PageId") => {
                state += &index_of(page, &mut pages).to_string();
            }
            Some(snapshot) if before.ends_with("SnapshotId") => {
                state += &index_of(snapshot, &mut snapshots).to_string();
            }
            Some(_) if before.ends_with("Micros") => {}
            Some(number) => state += &number.to_string(),
            None => {}
        }
        rest = after;
    }
    state + rest
}

fn number_after(text: &str, mark: &str) -> Option<u64> {
    let digits = &text[text.find(mark)? + mark.len()..];
    digits[..digits.find(|c: char| !c.is_ascii_digit())?]
        .parse()
        .ok()
}

fn index_of(page: u64, pages: &mut Vec<u64>) -> usize {
    let known = pages.iter().position(|known| *known == page);
    known.unwrap_or_else(|| {
        pages.push(page);
        pages.len() - 1
    })
}

/// Whether `make acceptance` runs, or a long exploration.
pub fn explores_all() -> bool {
    std::env::var_os("PLAIT_CASES").is_some() || std::env::args().any(|word| word == "--ignored")
}

/// Fewer states than usual mean that the actions explore little.
pub fn assert_enough(num_states: usize, least: usize) {
    let least = if explores_all() { least } else { least / 3 };
    assert!(num_states > least, "only {num_states} states");
}

/// Every mix of switches and small limits, on four pages of two tokens. Without `explores_all` half of the mixes, in which
/// any two of mixed, depth and limits meet in each way.
pub fn all_settings() -> Vec<(Settings, usize)> {
    let small = with(settings(), |it| {
        it.pages.page_size = 2;
        it.runtime.num_pages = 4;
        it.scheduler.max_seqs = Some(3);
        it.scheduler.prefill_starvation_steps = 2;
        it.scheduler.itl_target_ms = None;
    });
    let mut all = Vec::new();
    let limits = [(8, 8, 3, 0), (2, 2, 3, 1), (3, 1, 2, 0)];
    for (mixed, depth) in [(true, 1), (true, 2), (false, 1), (false, 2)] {
        for (index, of_limits) in limits.into_iter().enumerate() {
            if !explores_all() && (usize::from(mixed) + depth + index) % 2 == 1 {
                continue;
            }
            let (max_batch_tokens, long_prefill_token_threshold, max_rows, watermark) = of_limits;
            let limits = with(small.clone(), |it| {
                it.scheduler.max_batch_tokens = Some(max_batch_tokens);
                it.scheduler.long_prefill_token_threshold = Some(long_prefill_token_threshold);
                it.runtime.max_rows = Some(max_rows);
            });
            all.push((
                with(limits, |it| {
                    it.scheduler.mixed = mixed;
                    it.pages.watermark = Some(watermark);
                }),
                depth,
            ));
        }
    }
    all
}

pub fn keeping_prefixes() -> Vec<(Settings, usize)> {
    let mut all = all_settings();
    for (settings, _) in &mut all {
        settings.pages.prefix_cache = true;
    }
    all
}

fn cache_aware() -> Vec<(Settings, usize)> {
    let mut all = keeping_prefixes();
    for (settings, _) in &mut all {
        settings.scheduler.policy = Policy::CacheAware;
    }
    all
}

/// Explores all settings with all requests of these lengths in all orders. Returns the number of states.
fn explore_all(lengths: &[(u32, u32)], num_aborts: usize, priority: i32) -> usize {
    explore(all_settings(), lengths, num_aborts, priority)
}

fn explore(
    all_settings: Vec<(Settings, usize)>,
    lengths: &[(u32, u32)],
    num_aborts: usize,
    priority: i32,
) -> usize {
    let mut num_states = 0;
    for (settings, depth) in all_settings {
        for first in lengths {
            for second in lengths {
                for third in lengths {
                    let requests = [*first, *second, *third];
                    let settings = settings.clone();
                    num_states += Explorer::explore(Case {
                        num_aborts,
                        priority,
                        ..Case::new((settings, depth), requests)
                    });
                }
            }
        }
    }
    num_states
}

/// The same with a prompt of two choices and a request, or with a prompt of three.
fn explore_choices(
    all_settings: Vec<(Settings, usize)>,
    lengths: &[(u32, u32)],
    num_aborts: usize,
) -> usize {
    let mut num_states = 0;
    for (settings, depth) in all_settings {
        for first in lengths {
            for last in lengths {
                num_states += Explorer::explore(Case {
                    num_aborts,
                    num_choices: if first == last { 3 } else { 2 },
                    ..Case::new((settings.clone(), depth), [*first, *first, *last])
                });
            }
        }
    }
    num_states
}

#[test]
fn no_schedule_of_three_requests_on_four_pages_gets_stuck() {
    let num_states = explore_all(&[(1, 7), (3, 4), (5, 3), (4, 2)], 0, 0);
    assert_enough(num_states, 50_000);
}

/// Prompts that are computed for their own sake among requests with answers.
#[test]
fn no_schedule_with_prompts_without_output_gets_stuck() {
    let num_states = explore(keeping_prefixes(), &[(5, 0), (3, 4), (8, 0)], 0, 0);
    assert_enough(num_states, 10_000);
}

#[test]
fn no_abort_at_any_time_gets_the_others_stuck() {
    let num_states = explore_all(&[(1, 6), (5, 3)], 1, 0);
    assert_enough(num_states, 50_000);
}

#[test]
fn no_latecomer_that_goes_first_gets_the_others_stuck() {
    let num_states = explore_all(&[(2, 6), (5, 2)], 0, -1);
    assert_enough(num_states, 10_000);
}

/// A latecomer that preempts who runs, while one request may pass another whose pages are not free.
#[test]
fn no_schedule_with_priority_preemption_and_skipped_heads_gets_stuck() {
    let mut preempting = all_settings();
    for (settings, _) in &mut preempting {
        settings.scheduler.priority_preemption_threshold = Some(1);
        settings.scheduler.max_skip_ahead = 1;
    }
    let num_states = explore(preempting, &[(1, 6), (5, 2), (2, 3)], 0, -1);
    assert_enough(num_states, 10_000);
}

/// All prompts begin alike, so that pages are hit while others are evicted.
#[test]
fn no_schedule_with_shared_and_evicted_pages_gets_stuck() {
    let num_states = explore(keeping_prefixes(), &[(3, 4), (6, 2)], 1, 0);
    assert_enough(num_states, 20_000);
}

#[test]
fn no_schedule_that_admits_long_cached_prefixes_first_gets_stuck() {
    let num_states = explore(cache_aware(), &[(3, 4), (6, 2)], 1, 0);
    assert_enough(num_states, 20_000);
}

/// A second cache kind, whose pages of three tokens run out at other times.
#[test]
fn no_schedule_with_two_cache_kinds_gets_stuck() {
    let mut two_kinds = keeping_prefixes();
    for (settings, _) in &mut two_kinds {
        settings.runtime.other_kinds = vec![PoolSize {
            page_size: 3,
            num_pages: 3,
        }];
    }
    let num_states = explore(two_kinds, &[(3, 4), (6, 2)], 1, 0);
    assert_enough(num_states, 10_000);
}

/// Two snapshots, which are saved, found, replaced and evicted while others wait for pages.
fn with_slot_state() -> Vec<(Settings, usize)> {
    let mut all = keeping_prefixes();
    for (settings, _) in &mut all {
        settings.runtime.num_snapshots = Some(2);
        settings.pages.snapshot_interval = 4;
    }
    all
}

#[test]
fn no_schedule_with_slot_state_and_two_snapshots_gets_stuck() {
    let num_states = explore(with_slot_state(), &[(3, 4), (6, 2)], 0, 0);
    assert_enough(num_states, 10_000);
}

/// A late mask throws a request back to its last snapshot.
#[test]
fn no_late_mask_gets_requests_with_slot_state_stuck() {
    let mut num_states = 0;
    for (settings, depth) in with_slot_state() {
        num_states += Explorer::explore(Case {
            num_late: 1,
            ..Case::new((settings, depth), [(3, 4), (3, 4), (5, 3)])
        });
    }
    assert_enough(num_states, 10_000);
}

/// Choices that share pages which nobody else finds, and which go with the last of them.
#[test]
fn no_schedule_with_choices_gets_stuck_without_a_prefix_cache() {
    let num_states = explore_choices(all_settings(), &[(3, 4), (5, 2), (6, 2)], 1);
    assert_enough(num_states, 20_000);
}

#[test]
fn no_schedule_with_choices_gets_stuck_with_a_prefix_cache() {
    let num_states = explore_choices(keeping_prefixes(), &[(3, 4), (6, 2)], 1);
    assert_enough(num_states, 10_000);
}

/// Drafts that are accepted or not, with their pages leased and given back.
#[test]
fn no_schedule_with_drafts_gets_stuck() {
    let mut drafting = all_settings();
    drafting.retain(|(settings, _)| settings.scheduler.max_batch_tokens > Some(2));
    for (settings, _) in &mut drafting {
        settings.runtime.draft_width = 2;
    }
    let num_states = explore(drafting, &[(1, 7), (5, 3)], 0, 0);
    assert_enough(num_states, 3_000);
}

/// All ranks are lost at any moment.
#[test]
fn no_loss_at_any_time_gets_anybody_stuck() {
    let mut num_states = 0;
    for (settings, depth) in keeping_prefixes() {
        for requests in [[(3, 4), (5, 3), (1, 6)], [(6, 2), (4, 0), (3, 4)]] {
            num_states += Explorer::explore(Case {
                num_losses: 1,
                ..Case::new((settings.clone(), depth), requests)
            });
        }
    }
    assert_enough(num_states, 20_000);
}

/// The prefix cache is flushed at any moment: while choices share pages, while others wait for a page's row, between
/// a lookup and its plan.
#[test]
fn no_flush_at_any_time_gets_anybody_stuck() {
    let mut num_states = 0;
    let kept = keeping_prefixes().into_iter().chain(cache_aware());
    let all = kept.chain(with_slot_state()).chain(all_settings());
    // Every fifth of these four dozen has each switch and each limit.
    for (settings, depth) in all.step_by(5) {
        for (requests, num_choices) in [([(3, 4), (6, 2), (6, 2)], 1), ([(5, 2); 3], 2)] {
            num_states += Explorer::explore(Case {
                num_choices,
                num_flushes: 1,
                ..Case::new((settings.clone(), depth), requests)
            });
        }
    }
    assert_enough(num_states, 3_000);
}

/// Masks of two requests that come before or after any result, and not at all for one that is aborted.
#[test]
fn no_late_mask_gets_anybody_stuck() {
    let mut num_states = 0;
    for (settings, depth) in keeping_prefixes() {
        for requests in [[(3, 4), (3, 4), (5, 3)], [(1, 6), (6, 2), (3, 3)]] {
            let settings = settings.clone();
            num_states += Explorer::explore(Case {
                num_late: 2,
                ..Case::new((settings, depth), requests)
            });
        }
    }
    assert_enough(num_states, 20_000);
}

/// Prompt length and output of what the long explorations draw from.
const MORE_LENGTHS: [(u32, u32); 9] = [
    (1, 7),
    (1, 3),
    (2, 6),
    (3, 5),
    (3, 1),
    (4, 4),
    (5, 3),
    (6, 2),
    (7, 1),
];

#[allow(clippy::print_stdout, reason = "what a long run has shown is told")]
fn tell(num_states: usize) {
    println!("{num_states} states");
    assert_enough(num_states, 500_000);
}

#[test]
#[ignore = "long: more lengths, and two aborts"]
fn no_two_aborts_get_requests_of_more_lengths_stuck() {
    tell(explore_all(&MORE_LENGTHS, 2, 0));
}

#[test]
#[ignore = "long: more lengths, and an abort"]
fn no_latecomer_gets_requests_of_more_lengths_stuck() {
    tell(explore_all(&MORE_LENGTHS, 1, -1));
}

#[test]
#[ignore = "long: more lengths, and two aborts"]
fn no_choices_get_requests_of_more_lengths_stuck() {
    let without_cache = explore_choices(all_settings(), &MORE_LENGTHS, 2);
    tell(without_cache + explore_choices(keeping_prefixes(), &MORE_LENGTHS, 2));
}

#[test]
#[ignore = "long: more lengths, and an abort"]
fn no_slot_state_gets_requests_of_more_lengths_stuck() {
    tell(explore(with_slot_state(), &MORE_LENGTHS, 1, 0));
}

#[test]
#[ignore = "long: more lengths, and an abort"]
fn no_shared_and_evicted_pages_get_requests_of_more_lengths_stuck() {
    tell(explore(keeping_prefixes(), &MORE_LENGTHS, 1, 0));
}
