//! What the driver knows of constrained answers: their masks, and the rows that await them.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use plait_core::{Plan, RequestId, TokenId};
use plait_proto::{MAX_FRAME_BYTES, MaskedRow, NewMask, StepMasks};
use rustc_hash::FxHashMap;

use super::numbers::MaskNumbers;
use super::pool::{FilledMask, MaskJob, MaskJobs, lane};
use super::{ConstrainedAnswer, Next, TokenMatcher};
use crate::shared::ReplicaShared;

/// A row that samples under a mask: counted among the step's rows that sample.
pub type AwaitingRow = (u32, RequestId);

/// What follows from a mask.
#[derive(Debug, PartialEq, Eq)]
pub enum MaskEvent {
    /// A row was left out for lack of this mask, which is there now.
    LateMask(RequestId),
    /// The answer is complete.
    Complete(RequestId),
    /// The answer cannot go on.
    Failed(RequestId, String),
}

/// An answer that has not ended.
struct Answer {
    /// None while a thread has it.
    matcher: Option<Box<dyn TokenMatcher>>,
    /// What its next token may be; None until that is known.
    next: Option<Next>,
    /// A row was left out because the mask was not there.
    is_late: bool,
    is_slow: bool,
    /// Its rows in steps up to this one follow a token that was not sampled.
    void_until: u64,
}

/// A replica's constrained answers.
pub struct MaskAnswers {
    answers: FxHashMap<RequestId, Answer>,
    numbers: MaskNumbers,
    num_mask_words: u32,
    /// The last step that was planned, sent or not.
    last_planned: u64,
    /// Answers whose row in the oldest step in flight is left out for lack of a mask.
    left_out: Vec<RequestId>,
    jobs: MaskJobs,
    filled: (Sender<FilledMask>, Receiver<FilledMask>),
    own: Arc<ReplicaShared>,
}

impl MaskAnswers {
    /// None, for steps of so many rows at most.
    pub fn new(jobs: MaskJobs, own: Arc<ReplicaShared>, max_rows: u32, vocab_size: u32) -> Self {
        let capacity = (2 * max_rows as usize).max(64);
        Self {
            answers: FxHashMap::default(),
            numbers: MaskNumbers::new(capacity),
            num_mask_words: vocab_size.div_ceil(u32::BITS),
            last_planned: 0,
            left_out: Vec::new(),
            jobs,
            filled: lane(),
            own,
        }
    }

    /// An answer begins. Returns whether it is complete before its first token.
    pub fn open(&mut self, request: RequestId, answer: ConstrainedAnswer) -> bool {
        let is_complete = answer.first == Next::End;
        let answer = Answer {
            matcher: Some(answer.matcher),
            next: Some(answer.first),
            is_late: false,
            is_slow: false,
            void_until: 0,
        };
        self.answers.insert(request, answer);
        is_complete
    }

    /// An answer has ended.
    pub fn close(&mut self, request: RequestId) {
        if !self.answers.is_empty() {
            self.answers.remove(&request);
        }
    }

    /// Whether the request may leave: no thread has its matcher.
    pub fn may_leave(&self, request: RequestId) -> bool {
        let answer = self.answers.get(&request);
        answer.is_none_or(|it| it.matcher.is_some() && it.next.is_some())
    }

    /// Gives up an answer that may leave, if the request has one.
    pub fn leave(&mut self, request: RequestId) -> Option<ConstrainedAnswer> {
        let Answer { matcher, next, .. } = self.answers.remove(&request)?;
        let (matcher, first) = matcher.zip(next)?;
        Some(ConstrainedAnswer { matcher, first })
    }

    /// The answer goes on with these tokens: its next mask is filled.
    pub fn accept(&mut self, request: RequestId, tokens: &[TokenId]) {
        if self.answers.is_empty() {
            return;
        }
        let Some(answer) = self.answers.get_mut(&request) else {
            return;
        };
        if answer.next == Some(Next::Free) {
            return;
        }
        answer.next = None;
        let matcher = answer.matcher.take();
        let job = MaskJob {
            request,
            matcher: matcher.expect("a token was sampled under the mask that the matcher gave"),
            tokens: tokens.to_vec(),
            filled: self.filled.0.clone(),
            replica: self.own.clone(),
        };
        self.jobs.put(job, answer.is_slow);
    }

    /// The ranks are gone with the masks that they kept. Rows of others ask anew.
    pub fn lose_ranks(&mut self) {
        self.numbers.forget();
        self.left_out.clear();
        for answer in self.answers.values_mut() {
            (answer.is_late, answer.void_until) = (false, 0);
        }
    }

    /// The rows of a plan that await masks; mostly none.
    pub fn rows_of(&mut self, plan: &Plan) -> Vec<AwaitingRow> {
        self.last_planned = plan.step.0;
        if self.answers.is_empty() {
            return Vec::new();
        }
        let last_chunks = plan.prefill.iter().filter(|row| row.is_last_chunk);
        let sampling = last_chunks
            .map(|row| row.request)
            .chain(plan.decode.iter().map(|row| row.request));
        (0..)
            .zip(sampling)
            .filter(|(_, request)| self.answers.contains_key(request))
            .collect()
    }

    /// The oldest step in flight is complete. Rows that are planned by now follow a token that was not sampled, if
    /// that step left their answers out.
    pub fn complete_step(&mut self) {
        for request in self.left_out.drain(..) {
            if let Some(answer) = self.answers.get_mut(&request) {
                answer.void_until = self.last_planned;
            }
        }
    }

    /// The next mask that has come.
    pub fn take_filled(&mut self) -> Option<Option<MaskEvent>> {
        let filled = self.filled.1.try_recv().ok()?;
        self.own.metrics.masks.seconds.observe(filled.took);
        Some(self.put(filled))
    }

    fn put(&mut self, filled: FilledMask) -> Option<MaskEvent> {
        let is_slow = filled.is_slow();
        let FilledMask {
            request,
            matcher,
            next,
            ..
        } = filled;
        let answer = self.answers.get_mut(&request)?;
        answer.matcher = Some(matcher);
        answer.is_slow = is_slow;
        match next {
            Err(reason) => Some(MaskEvent::Failed(request, reason)),
            Ok(Next::End) => Some(MaskEvent::Complete(request)),
            Ok(next) => {
                answer.next = Some(match next {
                    // Compared now, while other threads fill masks, and not when the last one has come.
                    Next::Masked(mask) => Next::Masked(self.numbers.shared(mask)),
                    next => next,
                });
                std::mem::take(&mut answer.is_late).then_some(MaskEvent::LateMask(request))
            }
        }
    }

    /// The masks of the oldest step in flight. None until all are there, unless the step `waits_no_longer`: then rows
    /// whose masks are late are left out.
    pub fn masks_of(
        &mut self,
        step: u64,
        rows: &[AwaitingRow],
        waits_no_longer: bool,
    ) -> Option<Vec<StepMasks>> {
        let is_missing = |(_, request): &AwaitingRow| {
            let answer = self.answers.get(request);
            answer.is_some_and(|it| it.next.is_none() && step > it.void_until)
        };
        if !waits_no_longer && rows.iter().any(is_missing) {
            return None;
        }
        let mut masks = self.message(step);
        let mut messages = Vec::new();
        for (row, request) in rows {
            self.add_row(step, *row, *request, &mut masks);
            if masks.new_masks.len() >= self.num_masks_in_frame() {
                messages.push(std::mem::replace(&mut masks, self.message(step)));
            }
        }
        masks.is_last = true;
        messages.push(masks);
        Some(messages)
    }

    fn message(&self, step: u64) -> StepMasks {
        StepMasks {
            step,
            num_mask_words: self.num_mask_words,
            ..StepMasks::default()
        }
    }

    fn num_masks_in_frame(&self) -> usize {
        MAX_FRAME_BYTES / (4 * (1 + self.num_mask_words as usize))
    }

    fn add_row(&mut self, step: u64, row: u32, request: RequestId, masks: &mut StepMasks) {
        let Some(answer) = self.answers.get_mut(&request) else {
            return masks.left_out.push(row);
        };
        if step <= answer.void_until {
            return masks.left_out.push(row);
        }
        match &answer.next {
            Some(Next::Any | Next::Free) => {}
            Some(Next::Masked(mask)) => {
                let (number, is_new) = self.numbers.number_of(mask);
                masks.masked.push(MaskedRow {
                    row,
                    position: 0,
                    mask: number,
                });
                if is_new {
                    masks.new_masks.push(NewMask {
                        mask: number,
                        words: mask.words.clone(),
                    });
                }
            }
            Some(Next::End) => masks.left_out.push(row),
            None => {
                answer.is_late = true;
                self.left_out.push(request);
                self.own.metrics.masks.num_late.inc();
                masks.left_out.push(row);
            }
        }
    }
}
