//! Claims about masks, with threads that fill one when the test says so.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use plait_core::{DecodeRow, Plan, RequestId, SlotId, StepId, TokenId};
use plait_grammar::Allowed;
use plait_proto::StepMasks;

use super::answers::{AwaitingRow, MaskAnswers, MaskEvent};
use super::pool::{FilledMask, MaskJob, MaskThread, lane, mask_threads};
use super::{ConstrainedAnswer, TokenMatcher};
use crate::clock::SystemClock;
use crate::routes::Routes;
use crate::shared::Shared;

const VOCABULARY: u32 = 40;

/// Allows, one after the other, what it was made with.
struct Script(VecDeque<Says>);

#[derive(Clone, Copy)]
enum Says {
    Only(TokenId),
    Anything,
    Nothing,
    TheEnd,
    Wrong,
    Panic,
}

impl TokenMatcher for Script {
    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, String> {
        match self.0.pop_front().expect("no more masks are asked for") {
            Says::Only(token) => mask[token as usize / 32] |= 1 << (token % 32),
            Says::Nothing => {}
            Says::Anything => return Ok(Allowed::All),
            Says::TheEnd => return Ok(Allowed::OnlyEnd),
            Says::Wrong => return Err("it is wrong".to_owned()),
            Says::Panic => panic!("a bug of the matcher"),
        }
        Ok(Allowed::Some)
    }

    fn accept(&mut self, _token: TokenId) -> Result<(), String> {
        Ok(())
    }
}

struct World {
    answers: MaskAnswers,
    threads: Vec<MaskThread>,
    step: u64,
}

impl World {
    fn new(vocab_size: u32, scripts: &[&[Says]]) -> Self {
        let shared = Shared::new(Arc::new(SystemClock::start()), 1, Routes::new(1, 16, None));
        let own = shared.unwrap().replica(0).clone();
        let (jobs, threads) = mask_threads(vocab_size);
        let mut answers = MaskAnswers::new(jobs, own, 4, vocab_size);
        for (request, script) in (0..).zip(scripts) {
            let script = Script(script.iter().copied().collect());
            let answer = ConstrainedAnswer::of(Box::new(script), vocab_size).unwrap();
            assert!(!answers.open(RequestId(request), answer));
        }
        Self {
            answers,
            threads,
            step: 0,
        }
    }

    /// Plans a step with a decode row of each request.
    fn plan(&mut self, requests: &[u64]) -> (u64, Vec<AwaitingRow>) {
        self.step += 1;
        let decode = requests.iter().map(|request| DecodeRow {
            request: RequestId(*request),
            slot: SlotId(0),
            start: 0,
            length: 1,
        });
        let plan = Plan {
            step: StepId(self.step),
            decode: decode.collect(),
            ..empty_plan()
        };
        (self.step, self.answers.rows_of(&plan))
    }

    fn masks(&mut self, (step, rows): &(u64, Vec<AwaitingRow>)) -> Option<StepMasks> {
        let messages = self.answers.masks_of(*step, rows, false)?;
        assert_eq!(messages.len(), 1);
        messages.into_iter().next()
    }

    fn masks_without_waiting(&mut self, (step, rows): &(u64, Vec<AwaitingRow>)) -> StepMasks {
        self.answers.masks_of(*step, rows, true).unwrap().remove(0)
    }

    /// The step is complete, and these requests have sampled a token.
    fn complete(&mut self, requests: &[u64]) {
        for request in requests {
            self.answers.accept(RequestId(*request), &[7]);
        }
        self.answers.complete_step();
    }

    /// A thread fills the mask that was asked for first.
    fn fill_one(&mut self) -> Option<MaskEvent> {
        assert!(
            self.threads.iter().any(MaskThread::run_one),
            "none is asked for"
        );
        self.answers.take_filled().unwrap()
    }
}

fn empty_plan() -> Plan {
    Plan {
        step: StepId(0),
        freed_slots: vec![],
        new_slots: vec![],
        trimmed_slots: vec![],
        appended_pages: vec![],
        other_pages: vec![],
        restored_slots: vec![],
        saved_slots: vec![],
        prefill: vec![],
        decode: vec![],
        token_ids: vec![],
    }
}

/// Row and token of each masked row, and the rows left out.
fn told(masks: &StepMasks) -> (Vec<(u32, u32)>, Vec<u32>) {
    let masked = masks.masked.iter().map(|it| (it.row, it.mask)).collect();
    (masked, masks.left_out.clone())
}

#[test]
fn the_masks_of_a_step_are_sent_when_all_are_there() {
    let mut world = World::new(
        VOCABULARY,
        &[
            &[Says::Only(1), Says::Only(33)],
            &[Says::Only(2), Says::Only(3)],
        ],
    );
    let first = world.plan(&[0, 1]);
    let masks = world.masks(&first).unwrap();
    assert!(masks.is_last);
    assert_eq!(told(&masks), (vec![(0, 0), (1, 1)], vec![]));
    assert_eq!(*masks.new_masks[0].words, [2, 0]);
    let second = world.plan(&[0, 1]);
    world.complete(&[0, 1]);
    assert_eq!(world.masks(&second), None);
    assert_eq!(world.fill_one(), None);
    assert_eq!(world.masks(&second), None, "one of two");
    assert_eq!(world.fill_one(), None);
    let masks = world.masks(&second).unwrap();
    assert_eq!(*masks.new_masks[0].words, [0, 2]);
}

#[test]
fn equal_masks_are_sent_once() {
    let mut world = World::new(VOCABULARY, &[&[Says::Only(5); 2], &[Says::Only(5); 2]]);
    let first = world.plan(&[0, 1]);
    assert_eq!(world.masks(&first).unwrap().new_masks.len(), 1);
    let second = world.plan(&[0, 1]);
    world.complete(&[0, 1]);
    world.fill_one();
    world.fill_one();
    let masks = world.masks(&second).unwrap();
    assert_eq!(
        (told(&masks).0, masks.new_masks.len()),
        (vec![(0, 0), (1, 0)], 0)
    );
}

#[test]
fn rows_that_allow_everything_and_rows_of_others_are_not_named() {
    let mut world = World::new(VOCABULARY, &[&[Says::Anything]]);
    let step = world.plan(&[9, 0, 8]);
    assert_eq!(step.1, [(1, RequestId(0))]);
    assert_eq!(told(&world.masks(&step).unwrap()), (vec![], vec![]));
    assert_eq!(
        world.plan(&[9, 8]).1,
        [],
        "a step without masks awaits none"
    );
}

#[test]
fn a_row_whose_mask_is_late_is_left_out_and_so_is_the_one_behind_it() {
    let mut world = World::new(VOCABULARY, &[&[Says::Only(1); 3], &[Says::Only(2); 4]]);
    let first = world.plan(&[0, 1]);
    world.masks(&first).unwrap();
    let second = world.plan(&[0, 1]);
    world.complete(&[1, 0]);
    assert_eq!(world.fill_one(), None);
    assert_eq!(
        told(&world.masks_without_waiting(&second)),
        (vec![(1, 1)], vec![0])
    );
    // The next plan is made before the worker's result says that the row was left out.
    let third = world.plan(&[0, 1]);
    world.complete(&[1]);
    assert_eq!(
        world.fill_one(),
        Some(MaskEvent::LateMask(RequestId(0))),
        "it was asked for before"
    );
    assert_eq!(world.fill_one(), None);
    assert_eq!(
        told(&world.masks(&third).unwrap()),
        (vec![(1, 1)], vec![0]),
        "though its mask is there"
    );
    world.complete(&[]);
    let fourth = world.plan(&[0]);
    assert_eq!(told(&world.masks(&fourth).unwrap()), (vec![(0, 0)], vec![]));
}

#[test]
fn nobody_waits_for_an_answer_that_has_ended() {
    let mut world = World::new(VOCABULARY, &[&[Says::Only(1); 2], &[Says::Only(2); 2]]);
    let first = world.plan(&[0, 1]);
    world.masks(&first).unwrap();
    let second = world.plan(&[0, 1]);
    world.complete(&[0, 1]);
    world.fill_one();
    world.answers.close(RequestId(1));
    assert_eq!(
        told(&world.masks(&second).unwrap()),
        (vec![(0, 0)], vec![1])
    );
    assert_eq!(world.fill_one(), None, "what comes for it is dropped");
}

#[test]
fn a_matcher_that_fails_ends_its_own_answer_alone() {
    for (says, expected) in [
        (Says::Nothing, "it allows no token here"),
        (Says::Wrong, "it is wrong"),
        (Says::Panic, "its matcher failed"),
    ] {
        let mut world = World::new(VOCABULARY, &[&[Says::Only(1), says], &[Says::Only(2); 2]]);
        world.plan(&[0, 1]);
        world.complete(&[0, 1]);
        let failed = MaskEvent::Failed(RequestId(0), expected.to_owned());
        assert_eq!(world.fill_one(), Some(failed));
        assert_eq!(world.fill_one(), None);
    }
}

#[test]
fn an_answer_to_which_nothing_may_be_added_is_complete() {
    let mut world = World::new(VOCABULARY, &[&[Says::Only(1), Says::TheEnd]]);
    let first = world.plan(&[0]);
    world.masks(&first).unwrap();
    let second = world.plan(&[0]);
    world.complete(&[0]);
    assert_eq!(world.fill_one(), Some(MaskEvent::Complete(RequestId(0))));
    world.answers.close(RequestId(0));
    assert_eq!(told(&world.masks(&second).unwrap()), (vec![], vec![0]));
}

#[test]
fn masks_beyond_a_frame_travel_in_further_messages() {
    let vocabulary = 1 << 25;
    let says: Vec<[Says; 1]> = (0..7).map(|token| [Says::Only(token)]).collect();
    let scripts: Vec<&[Says]> = says.iter().map(|it| &it[..]).collect();
    let mut world = World::new(vocabulary, &scripts);
    let (step, rows) = world.plan(&[0, 1, 2, 3, 4, 5, 6]);
    let messages = world.answers.masks_of(step, &rows, false).unwrap();
    let sizes: Vec<_> = messages
        .iter()
        .map(|it| (it.new_masks.len(), it.is_last))
        .collect();
    assert_eq!(sizes, [(3, false), (3, false), (1, true)]);
}

#[test]
fn slow_answers_have_a_thread_of_their_own() {
    let filled = |millis| FilledMask {
        request: RequestId(0),
        matcher: Box::new(Script(VecDeque::new())),
        next: Ok(super::Next::Any),
        took: Duration::from_millis(millis),
    };
    assert!(filled(50).is_slow() && !filled(1).is_slow());
    let (jobs, threads) = mask_threads(VOCABULARY);
    assert!(threads.len() >= 2);
    drop(jobs);
    threads.iter().for_each(MaskThread::run);
}

/// Tells the niceness of the thread that fills its mask.
struct Niceness(std::sync::mpsc::SyncSender<i32>);

impl TokenMatcher for Niceness {
    fn allowed(&mut self, _mask: &mut [u32]) -> Result<Allowed, String> {
        let niceness = rustix::process::getpriority_process(None).unwrap();
        self.0.send(niceness).unwrap();
        Ok(Allowed::All)
    }

    fn accept(&mut self, _token: TokenId) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn slow_answers_give_way_to_the_model() {
    let shared = Shared::new(Arc::new(SystemClock::start()), 1, Routes::new(1, 16, None));
    let replica = shared.unwrap().replica(0).clone();
    let niceness_of = |is_slow| {
        let (told, niceness) = std::sync::mpsc::sync_channel(1);
        let (jobs, threads) = mask_threads(VOCABULARY);
        let job = MaskJob {
            request: RequestId(0),
            matcher: Box::new(Niceness(told)),
            tokens: vec![],
            filled: lane().0,
            replica: replica.clone(),
        };
        jobs.put(job, is_slow);
        drop(jobs);
        for thread in threads {
            std::thread::spawn(move || thread.run()).join().unwrap();
        }
        niceness.recv().unwrap()
    };
    let own = rustix::process::getpriority_process(None).unwrap();
    assert_eq!(niceness_of(false), own);
    assert_eq!(niceness_of(true), (own + 10).min(19));
}
