//! The way of prepared requests to a replica.

use std::sync::Arc;

use crossbeam_channel::Sender;
use plait_core::Micros;
use plait_grammar::Grammar;
use plait_openai::{ApiError, Prepared};

use crate::compile_queue::CompileJob;
use crate::masks::{ConstrainedAnswer, grammar_failed};
use crate::metrics::Rejection;
use crate::output_queue::StreamId;
use crate::shared::Shared;

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

/// What text threads and compile threads hand requests to.
pub struct Intake {
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// The rest of the engine.
    pub shared: Arc<Shared>,
    /// To the drivers, by replica.
    pub admissions: Vec<Sender<Admission>>,
}

impl Intake {
    /// Sends a request to the replica on which it costs least.
    pub fn admit(&self, admission: Admission) {
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

    /// The same with a constraint that is compiled.
    pub fn admit_constrained(&self, job: CompileJob, grammar: &Grammar) {
        let CompileJob {
            stream,
            received,
            mut prepared,
            ..
        } = job;
        prepared.constrain(grammar);
        match self.begin_answers(&prepared) {
            Ok(constrained) => self.admit(Admission {
                stream,
                received,
                prepared,
                constrained,
            }),
            Err(reason) => {
                let error = ApiError::from(grammar_failed(reason));
                self.reject(stream, Rejection::Invalid, &error);
            }
        }
    }

    /// The matchers of all choices, which have the same grammar, with the masks of their first tokens.
    fn begin_answers(&self, prepared: &Prepared) -> Result<Vec<ConstrainedAnswer>, String> {
        let choices = prepared.prompts.iter().flat_map(|it| &it.choices);
        let grammars = choices.filter_map(|choice| choice.grammar.as_ref());
        grammars
            .map(|grammar| ConstrainedAnswer::begin(grammar, self.vocab_size))
            .collect()
    }

    /// Ends a stream that needs no driver with its whole answer.
    pub fn answer(&self, stream: StreamId, body: &[u8]) {
        if self.shared.leave_pending(stream) {
            self.shared.output_queue.put_answer(stream, body);
        }
    }

    /// Ends a stream that is not at a driver yet.
    pub fn reject(&self, stream: StreamId, rejection: Rejection, error: &ApiError) {
        if self.shared.leave_pending(stream) {
            self.shared.metrics.rejections.count(rejection);
            self.shared.output_queue.put_error(stream, error);
        }
    }
}
