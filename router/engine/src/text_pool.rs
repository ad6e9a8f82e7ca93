//! The text threads: a request's JSON in, requests for the scheduler out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::{Receiver, Sender};
use plait_core::{Micros, Policy};
use plait_openai::{ApiError, GenerateRequest, Prepared, RequestError, prepare};
use plait_text::ModelText;

use crate::metrics::Rejection;
use crate::output_queue::StreamId;
use crate::request_seeds::SeedSource;
use crate::shared::Shared;

/// Threads that tokenise. With one, a long prompt would delay all requests after it.
pub const NUM_TEXT_THREADS: usize = 2;

/// Request bytes that may wait to be tokenised.
const MAX_QUEUED_BYTES: usize = 256 << 20;

/// A request as it came.
#[derive(Debug)]
pub struct Job {
    stream: StreamId,
    json: Vec<u8>,
    received: Micros,
}

/// A request for the driver.
#[derive(Debug)]
pub struct Admission {
    /// The stream of its answer.
    pub stream: StreamId,
    /// When it was submitted.
    pub received: Micros,
    /// The scheduler's requests and the answer's text.
    pub prepared: Prepared,
}

/// The way into the text threads: bounded in requests and in bytes.
#[derive(Clone, Debug)]
pub struct TextQueue {
    jobs: Sender<Job>,
    num_bytes: Arc<AtomicUsize>,
}

impl TextQueue {
    /// A queue for `max_queue` requests, its receiver, and the bytes that wait in it.
    pub fn new(max_queue: u32) -> (Self, Receiver<Job>, Arc<AtomicUsize>) {
        let (jobs, receiver) = crossbeam_channel::bounded(max_queue.max(1) as usize);
        let num_bytes = Arc::new(AtomicUsize::new(0));
        (
            Self {
                jobs,
                num_bytes: num_bytes.clone(),
            },
            receiver,
            num_bytes,
        )
    }

    /// Queues a request, or says what is full; never waits.
    pub fn put(&self, stream: StreamId, json: Vec<u8>, received: Micros) -> Result<(), ApiError> {
        let num_bytes = json.len();
        let queued = self.num_bytes.fetch_add(num_bytes, Ordering::Relaxed) + num_bytes;
        let job = Job {
            stream,
            json,
            received,
        };
        if queued > MAX_QUEUED_BYTES || self.jobs.try_send(job).is_err() {
            self.num_bytes.fetch_sub(num_bytes, Ordering::Relaxed);
            let (waiting, limit) = (self.jobs.len(), self.jobs.capacity().unwrap_or(0));
            return Err(ApiError::overloaded(format!(
                "the queue is full: {waiting} requests wait to be tokenised, {limit} of {MAX_QUEUED_BYTES} bytes in \
                 all may; try again later"
            )));
        }
        Ok(())
    }
}

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
    /// The rest of the engine.
    pub shared: Arc<Shared>,
    /// To the driver.
    pub admissions: Sender<Admission>,
    /// Bytes that wait in the queue.
    pub num_queued_bytes: Arc<AtomicUsize>,
}

impl TextWorker {
    /// Prepares requests until the queue is closed and empty.
    pub fn run(&self, jobs: &Receiver<Job>) {
        for job in jobs {
            self.num_queued_bytes
                .fetch_sub(job.json.len(), Ordering::Relaxed);
            if self.shared.pending_streams.is_wanted(job.stream) {
                self.handle(job);
            } else {
                self.shared.pending_streams.leave(job.stream);
            }
            // A driver that drains waits for the last stream to leave the pending ones.
            self.shared.mailbox.wakeup().signal();
        }
    }

    fn handle(&self, job: Job) {
        let Job {
            stream,
            json,
            received,
        } = job;
        match self.prepare(&json) {
            Ok(prepared) => {
                let admission = Admission {
                    stream,
                    received,
                    prepared,
                };
                if self.admissions.send(admission).is_err() {
                    self.reject(
                        stream,
                        Rejection::NotReady,
                        &ApiError::unavailable("the server has stopped"),
                    );
                }
            }
            Err(error) => {
                let rejection = if error.code == "context_length_exceeded" {
                    Rejection::TooLong
                } else {
                    Rejection::Invalid
                };
                self.reject(stream, rejection, &error.into());
            }
        }
    }

    fn prepare(&self, json: &[u8]) -> Result<Prepared, RequestError> {
        let request: GenerateRequest =
            serde_json::from_slice(json).map_err(|error| RequestError {
                param: "request".into(),
                code: "invalid_request",
                message: format!("the request cannot be read: {error}"),
            })?;
        check_priority(request.client.priority, self.policy)?;
        prepare(&self.model, &request, self.max_model_len, &mut || {
            self.seeds.draw()
        })
    }

    fn reject(&self, stream: StreamId, rejection: Rejection, error: &ApiError) {
        if self.shared.pending_streams.leave(stream) {
            self.shared.metrics.requests.reject(rejection);
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
        "`priority` is {priority}, but this server serves in the order of arrival; leave it out, or start the server \
         with --policy priority"
    );
    Err(RequestError::invalid("priority", problem))
}
