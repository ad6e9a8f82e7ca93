//! The text threads: a request's JSON in, requests for the scheduler out, or an answer that needs none. None of them
//! compiles a constraint.

use std::sync::Arc;

use plait_core::Policy;
use plait_openai::{
    ApiError, GenerateRequest, Grammars, LogprobsBudget, Prepared, RequestError, TextCall,
    answer_text_call, prepare,
};
use plait_text::ModelText;

use crate::clock::since;
use crate::compile_pool::reject_overflow;
use crate::compile_queue::{CompileJob, CompileQueue};
use crate::intake::{Admission, Intake};
use crate::metrics::Rejection;
use crate::request_seeds::SeedSource;
use crate::text_queue::{Job, JobKind, TextQueue};

/// What one text thread works with.
pub struct TextWorker {
    /// Tokenizer and template.
    pub model: Arc<ModelText>,
    /// Longest prompt plus output.
    pub max_model_len: u32,
    /// Whether requests may have a priority.
    pub policy: Policy,
    /// For requests without a seed.
    pub seeds: SeedSource,
    /// Those that are compiled by now.
    pub grammars: Arc<Grammars>,
    /// For requests with `prompt_logprobs`.
    pub logprobs: LogprobsBudget,
    /// Takes requests that are ready.
    pub intake: Arc<Intake>,
    /// Takes requests whose constraint is to be compiled.
    pub compiles: Arc<CompileQueue>,
    /// What to prepare.
    pub queue: Arc<TextQueue>,
}

impl TextWorker {
    /// Prepares requests until the queue is closed and empty.
    pub fn run(&self) {
        let shared = &self.intake.shared;
        while let Some(job) = self.queue.take() {
            if shared.pending_streams.is_wanted(job.stream) {
                self.handle(&job);
            } else {
                shared.leave_pending(job.stream);
            }
        }
    }

    fn handle(&self, job: &Job) {
        let clock = &self.intake.shared.clock;
        let start = clock.now();
        let handled = match job.kind {
            JobKind::Generate => self
                .prepare(&job.json)
                .map(|prepared| Handled::Prepared(Box::new(prepared))),
            JobKind::Text => self.answer(&job.json).map(Handled::Answered),
        };
        let elapsed = since(start, clock.now());
        self.queue.measure(job.json.len(), elapsed);
        match handled {
            Ok(Handled::Prepared(prepared)) => self.pass_on(job, *prepared),
            Ok(Handled::Answered(body)) => self.intake.answer(job.stream, &body),
            Err((rejection, error)) => self.intake.reject(job.stream, rejection, &error),
        }
    }

    fn answer(&self, json: &[u8]) -> Result<Vec<u8>, (Rejection, ApiError)> {
        let call: Result<TextCall, _> = serde_json::from_slice(json);
        let answer = call
            .map_err(|error| unreadable(&error))
            .and_then(|call| answer_text_call(&self.model, &call, self.max_model_len));
        answer.map_err(rejected)
    }

    /// To a replica, or to be compiled first.
    fn pass_on(&self, job: &Job, prepared: Prepared) {
        let Some(asked) = prepared.constraint.clone() else {
            return self.intake.admit(Admission {
                stream: job.stream,
                received: job.received,
                prepared,
                constrained: Vec::new(),
            });
        };
        let job = CompileJob {
            stream: job.stream,
            tenant: job.tenant,
            received: job.received,
            prepared,
            asked,
        };
        match self.grammars.known(&job.asked.constraint) {
            Some(Ok(grammar)) => self.intake.admit_constrained(job, &grammar),
            Some(Err(error)) => {
                let error = job.asked.refusal(&error);
                self.intake.reject(job.stream, Rejection::Invalid, &error);
            }
            None => self.queue_to_compile(job),
        }
    }

    fn queue_to_compile(&self, job: CompileJob) {
        let (shared, stream) = (&self.intake.shared, job.stream);
        reject_overflow(&self.intake, &self.compiles.put(job));
        // A client that left before found nothing to take out of the queue.
        if !shared.pending_streams.is_wanted(stream) && self.compiles.forget(stream) {
            shared.leave_pending(stream);
        }
    }

    fn prepare(&self, json: &[u8]) -> Result<Prepared, (Rejection, ApiError)> {
        let mut prepared = self.check(json).map_err(rejected)?;
        prepared
            .reserve(&self.logprobs)
            .map_err(|error| (Rejection::QueueFull, error))?;
        Ok(prepared)
    }

    fn check(&self, json: &[u8]) -> Result<Prepared, RequestError> {
        let request: GenerateRequest =
            serde_json::from_slice(json).map_err(|error| unreadable(&error))?;
        check_priority(request.client.priority, self.policy)?;
        let seed = &mut || self.seeds.draw();
        prepare(&self.model, &request, self.max_model_len, seed)
    }
}

/// What a text thread made of a job.
enum Handled {
    /// For the scheduler.
    Prepared(Box<Prepared>),
    /// The whole answer.
    Answered(Vec<u8>),
}

fn unreadable(error: &serde_json::Error) -> RequestError {
    RequestError {
        param: "request".into(),
        code: "invalid_request",
        message: format!("the request cannot be read: {error}"),
    }
}

fn rejected(error: RequestError) -> (Rejection, ApiError) {
    let rejection = match error.code {
        "context_length_exceeded" => Rejection::TooLong,
        _ => Rejection::Invalid,
    };
    (rejection, error.into())
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
