//! The text threads: a request's JSON in, requests for the scheduler out.

use std::sync::Arc;

use crossbeam_channel::Sender;
use plait_core::{Micros, Policy};
use plait_openai::{
    ApiError, GenerateRequest, Grammars, LogprobsBudget, Prepared, RequestError, prepare,
};
use plait_text::ModelText;

use crate::clock::since;
use crate::masks::{ConstrainedAnswer, grammar_failed};
use crate::metrics::Rejection;
use crate::output_queue::StreamId;
use crate::request_seeds::SeedSource;
use crate::shared::Shared;
use crate::text_queue::{Job, TextQueue};

/// A request for the driver.
#[derive(Debug)]
pub struct Admission {
    /// The stream of its answer.
    pub stream: StreamId,
    /// When it was submitted.
    pub received: Micros,
    /// The scheduler's requests and the answer's text.
    pub prepared: Prepared,
    /// What constrains each choice of all prompts, in order; empty if nothing does.
    pub constrained: Vec<ConstrainedAnswer>,
}

/// What one text thread works with.
pub struct TextWorker {
    /// Tokenizer and template.
    pub model: Arc<ModelText>,
    /// Longest prompt plus output.
    pub max_model_len: u32,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Whether requests may have a priority.
    pub policy: Policy,
    /// For requests without a seed.
    pub seeds: SeedSource,
    /// For requests that constrain their answers.
    pub grammars: Arc<Grammars>,
    /// For requests with `prompt_logprobs`.
    pub logprobs: LogprobsBudget,
    /// The rest of the engine.
    pub shared: Arc<Shared>,
    /// To the drivers, by replica.
    pub admissions: Vec<Sender<Admission>>,
    /// What to prepare.
    pub queue: Arc<TextQueue>,
}

impl TextWorker {
    /// Prepares requests until the queue is closed and empty.
    pub fn run(&self) {
        while let Some(job) = self.queue.take() {
            if self.shared.pending_streams.is_wanted(job.stream) {
                self.handle(job);
            } else {
                self.shared.leave_pending(job.stream);
            }
        }
    }

    fn handle(&self, job: Job) {
        let Job {
            stream,
            json,
            received,
            ..
        } = job;
        let start = self.shared.clock.now();
        let prepared = self.prepare(&json);
        let elapsed = since(start, self.shared.clock.now());
        self.queue.measure(json.len(), elapsed);
        match prepared {
            Ok((prepared, constrained)) => self.admit(Admission {
                stream,
                received,
                prepared,
                constrained,
            }),
            Err((rejection, error)) => self.reject(stream, rejection, &error),
        }
    }

    /// Sends a request to the replica on which it costs least.
    fn admit(&self, admission: Admission) {
        let stream = admission.stream;
        let requests = admission.prepared.prompts.iter().map(|it| &it.request);
        let Some(replica) = self.shared.routes.choose(stream, requests) else {
            let error = self.shared.status.refusal();
            return self.reject(stream, Rejection::NotReady, &error);
        };
        if self.admissions[replica as usize].send(admission).is_err() {
            self.shared.routes.finish(stream);
            let error = ApiError::unavailable("the server has stopped; start it again");
            self.reject(stream, Rejection::NotReady, &error);
        }
        self.shared.replica(replica).mailbox.wakeup().signal();
    }

    fn prepare(
        &self,
        json: &[u8],
    ) -> Result<(Prepared, Vec<ConstrainedAnswer>), (Rejection, ApiError)> {
        let mut prepared = self.check(json).map_err(|error| {
            let rejection = match error.code {
                "context_length_exceeded" => Rejection::TooLong,
                _ => Rejection::Invalid,
            };
            (rejection, error.into())
        })?;
        prepared
            .reserve(&self.logprobs)
            .map_err(|error| (Rejection::QueueFull, error))?;
        let constrained = self
            .constrain(&prepared)
            .map_err(|error| (Rejection::Invalid, error.into()))?;
        Ok((prepared, constrained))
    }

    /// The matchers of all choices, which have the same grammar, with the masks of their first tokens.
    fn constrain(&self, prepared: &Prepared) -> Result<Vec<ConstrainedAnswer>, RequestError> {
        let choices = prepared.prompts.iter().flat_map(|it| &it.choices);
        let grammars = choices.filter_map(|choice| choice.grammar.as_ref());
        grammars
            .map(|grammar| ConstrainedAnswer::begin(grammar, self.vocab_size))
            .collect::<Result<_, _>>()
            .map_err(grammar_failed)
    }

    fn check(&self, json: &[u8]) -> Result<Prepared, RequestError> {
        let request: GenerateRequest =
            serde_json::from_slice(json).map_err(|error| RequestError {
                param: "request".into(),
                code: "invalid_request",
                message: format!("the request cannot be read: {error}"),
            })?;
        check_priority(request.client.priority, self.policy)?;
        let seed = &mut || self.seeds.draw();
        prepare(
            &self.model,
            &request,
            self.max_model_len,
            &self.grammars,
            seed,
        )
    }

    fn reject(&self, stream: StreamId, rejection: Rejection, error: &ApiError) {
        if self.shared.leave_pending(stream) {
            self.shared.metrics.rejections.count(rejection);
            self.shared.output_queue.put_error(stream, error);
        }
    }
}

/// Rejects a priority that would have no effect.
fn check_priority(priority: i64, policy: Policy) -> Result<(), RequestError> {
    if priority == 0 || policy.is_by_priority() {
        return Ok(());
    }
    let problem = format!(
        "`priority` is {priority}, but this server's --policy reads none; leave it out, or start the server with \
         --policy priority or fair"
    );
    Err(RequestError::invalid("priority", problem))
}
