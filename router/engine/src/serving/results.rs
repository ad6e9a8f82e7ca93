//! What a step's result says: is it of the plan, and what do the requests get of it.

use std::time::Duration;

use plait_core::{
    Event, FAILED_ROW, FinishReason, Micros, Output, RequestId, StepId, UnexpectedResult,
};
use plait_openai::{ApiError, TokenLogprobs};
use plait_proto::StepResult;
use smallvec::SmallVec;

use super::Serving;
use crate::clock::since;
use crate::logprobs::{self, WrongRecords};
use crate::output::StreamEvent;
use crate::output_queue::StreamId;
use crate::step::StepInFlight;

/// A result that does not fit the plan. The rank cannot be trusted any more.
#[derive(Debug, thiserror::Error)]
pub enum InvalidResult {
    /// Other rows than the plan's.
    #[error(transparent)]
    Unexpected(#[from] UnexpectedResult),
    /// Other log-probabilities than the requests asked for.
    #[error(transparent)]
    Records(#[from] WrongRecords),
    /// A token of a row whose mask was late.
    #[error("step {step} sampled a token in row {row}, which was left out for lack of its mask")]
    LeftOut {
        /// Which step.
        step: u64,
        /// Which of the rows that sample.
        row: u32,
    },
    /// A token outside the vocabulary.
    #[error("step {step} sampled token {token}; the vocabulary has {vocab_size}")]
    Token {
        /// Which step.
        step: u64,
        /// The sampled token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab_size: u32,
    },
}

impl Serving {
    /// Completes a step with its result. After an error the replica must end.
    pub fn complete(&mut self, result: &StepResult, now: Micros) -> Result<(), InvalidResult> {
        self.check_was_sent(result)?;
        self.check_tokens(result)?;
        self.check_left_out(result)?;
        self.measure(result)?;
        let event = Event::Result(plait_core::StepResult {
            step: StepId(result.step),
            num_accepted: &result.num_accepted,
            token_ids: &result.token_ids,
        });
        self.scheduler.advance(event, &mut self.outputs)?;
        let step = self
            .in_flight
            .pop_front()
            .expect("the scheduler knows the result's step, so it was sent");
        self.masks.complete_step();
        self.oldest_since = now;
        self.group_steps.measure(Micros(result.elapsed_us));
        self.emit_prompt_logprobs(&step, result)?;
        let failed = self.emit_pooled(&step, result)?;
        let mut records = logprobs::of_samples(&step, result)?;
        self.note_preempted(now);
        self.emit_outputs(now, &mut records);
        for stream in failed {
            if let Some(others) = self.streams.get(&stream).cloned() {
                self.end_requests(&others, Event::Abort);
            }
        }
        self.record(&step, result);
        Ok(())
    }

    /// Passes the step's time on the worker to the scheduler.
    fn measure(&mut self, result: &StepResult) -> Result<(), UnexpectedResult> {
        let measured = Event::Measured {
            step: StepId(result.step),
            elapsed: Micros(result.elapsed_us),
        };
        self.scheduler.advance(measured, &mut self.outputs)
    }

    /// In a group a step may be planned that the ranks do not have yet.
    fn check_was_sent(&self, result: &StepResult) -> Result<(), UnexpectedResult> {
        let expected = self.in_flight.front().map(|step| StepId(step.step));
        let given = StepId(result.step);
        (expected == Some(given))
            .then_some(())
            .ok_or(UnexpectedResult::Step { given, expected })
    }

    fn check_left_out(&self, result: &StepResult) -> Result<(), InvalidResult> {
        let step = self.in_flight.front();
        let row = step.and_then(|it| it.sampled_though_left_out(&result.num_accepted));
        let step = result.step;
        row.map_or(Ok(()), |row| Err(InvalidResult::LeftOut { step, row }))
    }

    fn check_tokens(&self, result: &StepResult) -> Result<(), InvalidResult> {
        let vocab_size = self.config.vocab_size;
        let is_none = |token: &&u32| **token >= vocab_size && **token != FAILED_ROW;
        match result.token_ids.iter().find(is_none) {
            Some(token) => Err(InvalidResult::Token {
                step: result.step,
                token: *token,
                vocab_size,
            }),
            None => Ok(()),
        }
    }

    fn emit_prompt_logprobs(
        &mut self,
        step: &StepInFlight,
        result: &StepResult,
    ) -> Result<(), InvalidResult> {
        for told in logprobs::of_prompts(step, result)? {
            if !told.records.is_empty() && self.requests.contains_key(&told.request) {
                let logprobs::PromptRecords {
                    request,
                    first_position,
                    records,
                } = told;
                self.events.push(StreamEvent::PromptLogprobs {
                    request,
                    first_position,
                    records,
                });
            }
        }
        Ok(())
    }

    /// The streams that cannot have what they ask for; their errors are told.
    fn emit_pooled(
        &mut self,
        step: &StepInFlight,
        result: &StepResult,
    ) -> Result<Vec<StreamId>, InvalidResult> {
        let mut failed = Vec::new();
        for (request, embedding) in logprobs::of_pooled(step, result)? {
            let Some(live) = self.requests.get(&request) else {
                continue;
            };
            let (stream, dimensions) = (live.stream, live.pooled.and_then(|it| it.dimensions));
            let error = if !embedding.iter().all(|it| it.is_finite()) {
                ApiError::not_finite()
            } else if dimensions.is_some_and(|it| it as usize > embedding.len()) {
                ApiError::dimensions(dimensions, embedding.len())
            } else {
                self.events
                    .push(StreamEvent::Embedding { request, embedding });
                continue;
            };
            if !failed.contains(&stream) {
                failed.push(stream);
                self.events.push(StreamEvent::Fail { stream, error });
            }
        }
        Ok(failed)
    }

    /// Turns the scheduler's outputs into events. `records` belong to the step's sampling rows.
    pub(super) fn emit_outputs(&mut self, now: Micros, records: &mut [Option<Vec<TokenLogprobs>>]) {
        let mut outputs = std::mem::take(&mut self.outputs);
        let mut failed = SmallVec::<[RequestId; 1]>::new();
        let mut rest = outputs.drain(..).peekable();
        while let Some(output) = rest.next() {
            match output {
                Output::Tokens {
                    request,
                    tokens,
                    sampled_row,
                    ..
                } => {
                    self.time_tokens(request, tokens.len(), now);
                    let stops = Output::Finished {
                        request,
                        reason: FinishReason::Stop,
                    };
                    let logprobs = records.get_mut(sampled_row as usize).and_then(Option::take);
                    let ends_with_stop_id = rest.peek() == Some(&stops);
                    let ends = matches!(rest.peek(), Some(Output::Finished { request: ended, .. }) if *ended == request);
                    if !ends {
                        self.masks.accept(request, &tokens);
                    }
                    self.events.push(StreamEvent::Tokens {
                        request,
                        tokens,
                        ends_with_stop_id,
                        logprobs,
                    });
                }
                Output::Finished { request, reason } => self.end(request, reason),
                Output::Failed { request } => failed.push(request),
            }
        }
        drop(rest);
        self.outputs = outputs;
        // Other choices of their streams may have tokens in this step.
        for request in failed {
            tracing::warn!(
                "the model computed NaN or infinity instead of logits for a row: its request ends"
            );
            self.first_uses.end(request);
            self.fail_request(request, ApiError::not_finite());
        }
    }

    fn time_tokens(&mut self, request: RequestId, num_tokens: usize, now: Micros) {
        let metrics = &self.config.own.metrics;
        metrics.requests.generated_tokens.inc_by(num_tokens as u64);
        let live = self
            .requests
            .get_mut(&request)
            .expect("the scheduler ends a request before it forgets it");
        let latency = &metrics.latency;
        match live.take_tokens(num_tokens, now) {
            None => {
                latency
                    .time_to_first_token
                    .observe(since(live.received, now));
                let first_row = live.first_row.unwrap_or(live.received);
                latency.prefill.observe(since(first_row, now));
            }
            Some(last) => latency.inter_token.observe(since(last, now)),
        }
        if std::mem::take(&mut live.awaits_token) {
            self.config.shared.routes.begin_answer(live.stream);
            self.first_uses.sampled(request);
        }
    }

    fn end(&mut self, request: RequestId, reason: FinishReason) {
        let live = self
            .requests
            .remove(&request)
            .expect("each request ends exactly once");
        match reason {
            FinishReason::Abort => self.first_uses.end(request),
            _ => self.first_uses.sampled(request),
        }
        self.num_measured -= usize::from(live.wants_logprobs());
        self.masks.close(request);
        let metrics = &self.config.own.metrics;
        metrics.requests.finish(reason.into());
        let now = self.config.shared.clock.now();
        let latency = &metrics.latency;
        latency.end_to_end.observe(since(live.received, now));
        if let Some(first) = live.first_token {
            latency.decode.observe(since(first, now));
        }
        metrics
            .sizes
            .prompt
            .observe_tokens(live.prompt.num_tokens());
        metrics.sizes.output.observe_tokens(live.num_output);
        if reason != FinishReason::Abort {
            self.events.push(StreamEvent::Finished { request, reason });
        }
        if let Some(requests) = self.streams.get_mut(&live.stream) {
            requests.retain(|other| *other != request);
            if requests.is_empty() {
                self.forget(live.stream);
            }
        }
    }

    fn record(&self, step: &StepInFlight, result: &StepResult) {
        let own = &self.config.own;
        let elapsed = Duration::from_micros(result.elapsed_us);
        own.status.set_step(step.step);
        let Some(kind) = step.kind else {
            own.metrics.group.num_dummies.inc();
            return;
        };
        own.metrics.steps.record(kind, elapsed, &step.work);
        if let Some(recorder) = &self.config.recorder {
            recorder.record(&step.work, elapsed);
        }
    }
}
