//! The compile threads: constraints without a grammar in, requests for the scheduler out.

use std::sync::Arc;
use std::thread;

use plait_openai::{ApiError, Grammars};
use plait_text::ModelText;

use crate::clock::since;
use crate::compile_queue::{CompileJob, CompileQueue, Overflow};
use crate::intake::Intake;
use crate::metrics::Rejection;

/// Compile threads at most.
const MAX_THREADS: usize = 8;

/// One for each four cores, and never fewer than two: a tenant leaves one to the others.
pub fn num_compile_threads() -> usize {
    let num_cores = thread::available_parallelism().map_or(1, usize::from);
    (num_cores / 4).clamp(2, MAX_THREADS)
}

/// What one compile thread works with.
pub struct CompileWorker {
    /// Whose tokens the masks are for.
    pub model: Arc<ModelText>,
    /// Keeps what is compiled.
    pub grammars: Arc<Grammars>,
    /// Takes requests with their grammars.
    pub intake: Arc<Intake>,
    /// What to compile.
    pub queue: Arc<CompileQueue>,
}

impl CompileWorker {
    /// Compiles until the queue is closed.
    pub fn run(&self) {
        while let Some(job) = self.queue.take() {
            let constraint = job.asked.constraint.clone();
            let begin = self.intake.shared.clock.now();
            self.compile(job);
            let took = since(begin, self.intake.shared.clock.now());
            for follower in self.queue.finish(&constraint, took) {
                self.compile(follower);
            }
        }
    }

    fn compile(&self, job: CompileJob) {
        let shared = &self.intake.shared;
        if !shared.pending_streams.is_wanted(job.stream) {
            shared.leave_pending(job.stream);
            return;
        }
        let compiled = self
            .grammars
            .compile(&self.model, &job.asked.constraint, job.tenant);
        match compiled {
            Ok(grammar) => self.intake.admit_constrained(job, &grammar),
            Err(error) => {
                let error = job.asked.refusal(&error);
                let rejection = match error.status {
                    400 => Rejection::Invalid,
                    429 => Rejection::QueueFull,
                    _ => Rejection::NotReady,
                };
                self.intake.reject(job.stream, rejection, &error);
            }
        }
    }
}

/// Rejects those for whom there is no room.
pub fn reject_overflow(intake: &Intake, overflow: &Overflow) {
    for job in &overflow.rejected {
        let message = format!(
            "`{}` cannot be compiled now: too many others wait for it, and no tenant has more of them than this one; \
             try again later",
            job.asked.param
        );
        let error = ApiError::overloaded(message).retry_after(overflow.retry_after_seconds);
        intake.reject(job.stream, Rejection::QueueFull, &error);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::sync::{Mutex, PoisonError};
    use std::thread::JoinHandle;
    use std::time::Duration;

    use plait_core::{Micros, Policy};
    use plait_openai::LogprobsBudget;
    use serde_json::{Value, json};

    use super::*;
    use crate::clock::SystemClock;
    use crate::intake::Admission;
    use crate::output_queue::StreamId;
    use crate::request_seeds::SeedSource;
    use crate::routes::Routes;
    use crate::shared::Shared;
    use crate::text_pool::TextWorker;
    use crate::text_queue::{Job, JobKind, TextQueue};

    /// A text thread and compile threads, each of which is held at the end of a compilation until the test lets it go.
    struct World {
        shared: Arc<Shared>,
        texts: Arc<TextQueue>,
        compiles: Arc<CompileQueue>,
        admitted: crossbeam_channel::Receiver<Admission>,
        begun: Receiver<()>,
        gate: SyncSender<()>,
        threads: Vec<JoinHandle<()>>,
    }

    impl World {
        fn new(num_compile_threads: usize) -> Self {
            Self::with_compilers(num_compile_threads, num_compile_threads)
        }

        /// So many threads, and a queue for so many.
        fn with_compilers(num_started: usize, num_threads: usize) -> Self {
            let clock = Arc::new(SystemClock::start());
            let shared = Arc::new(Shared::new(clock, 1, Routes::new(1, 16, None)).unwrap());
            let folder =
                Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/recall-gqa");
            let model = Arc::new(ModelText::load(&folder, None).unwrap());
            let (tell, begun) = sync_channel(64);
            let (gate, opened) = sync_channel(64);
            let opened = Mutex::new(opened);
            let grammars = Arc::new(Grammars::new(move |kind, _| {
                if kind == "regex" {
                    tell.send(()).unwrap();
                    let _closed = opened.lock().unwrap_or_else(PoisonError::into_inner).recv();
                }
            }));
            let (admissions, admitted) = crossbeam_channel::bounded(1024);
            let intake = Arc::new(Intake {
                vocab_size: model.vocab_size(),
                shared: shared.clone(),
                admissions: vec![admissions],
            });
            let texts = Arc::new(TextQueue::new(1024, 1));
            let compiles = Arc::new(CompileQueue::new(num_threads));
            let text = TextWorker {
                model: model.clone(),
                max_model_len: 512,
                policy: Policy::Fcfs,
                seeds: SeedSource::new(Some(0)),
                grammars: grammars.clone(),
                logprobs: LogprobsBudget::default(),
                intake: intake.clone(),
                compiles: compiles.clone(),
                queue: texts.clone(),
            };
            let mut threads = vec![thread::spawn(move || text.run())];
            threads.extend((0..num_started).map(|_| {
                let worker = CompileWorker {
                    model: model.clone(),
                    grammars: grammars.clone(),
                    intake: intake.clone(),
                    queue: compiles.clone(),
                };
                thread::spawn(move || worker.run())
            }));
            Self {
                shared,
                texts,
                compiles,
                admitted,
                begun,
                gate,
                threads,
            }
        }

        fn submit(&self, stream: StreamId, tenant: u64, constraint: Option<Value>) {
            let mut request = json!({
                "id": "cmpl-1", "created": 17, "model": "m", "stream": true, "include_usage": false,
                "kind": "completion", "prompts": [[1, 2, 3]],
            });
            if let Some(constraint) = constraint {
                request["constraint"] = constraint;
            }
            assert!(self.shared.pending_streams.enter(stream));
            let put = self.texts.put(Job {
                stream,
                tenant,
                kind: JobKind::Generate,
                json: request.to_string().into_bytes(),
                received: Micros(0),
            });
            assert!(put.rejected.is_empty());
        }

        /// The text thread handles requests in order.
        fn wait_for_texts(&self) {
            self.submit(StreamId::MAX, 7, None);
            assert_eq!(
                self.admitted(),
                StreamId::MAX,
                "the others are in the queue"
            );
        }

        /// Streams that got an error since the last call.
        fn rejected(&self) -> Vec<StreamId> {
            let records = self.shared.output_queue.take();
            let (mut rest, mut streams) = (records.as_slice(), Vec::new());
            while let Some((header, behind)) = rest.split_first_chunk::<13>() {
                let (stream, length) = (header[..8].try_into(), header[9..].try_into());
                streams.push(u64::from_le_bytes(stream.unwrap()));
                rest = &behind[u32::from_le_bytes(length.unwrap()) as usize..];
            }
            streams
        }

        /// The next stream that reaches the driver.
        fn admitted(&self) -> StreamId {
            self.admitted.recv().unwrap().stream
        }

        fn wait_until_one_is_held(&self) {
            self.begun.recv().unwrap();
        }

        fn let_one_go(&self) {
            self.gate.send(()).unwrap();
        }
    }

    impl Drop for World {
        fn drop(&mut self) {
            self.texts.close();
            self.compiles.close();
            let (closed, _) = sync_channel(1);
            drop(std::mem::replace(&mut self.gate, closed));
            for thread in self.threads.drain(..) {
                thread.join().unwrap();
            }
        }
    }

    fn regex(text: &str) -> Option<Value> {
        Some(json!({"param": "guided_regex", "constraint": "regex", "text": text}))
    }

    #[test]
    fn texts_are_admitted_while_a_constraint_is_compiled() {
        let world = World::new(2);
        world.submit(1, 7, regex("a+"));
        world.wait_until_one_is_held();
        for stream in 2..20 {
            world.submit(stream, 7, None);
        }
        let admitted: Vec<_> = (2..20).map(|_| world.admitted()).collect();
        assert_eq!(admitted, (2..20).collect::<Vec<_>>());
        world.let_one_go();
        assert_eq!(world.admitted(), 1);
    }

    #[test]
    fn a_tenant_leaves_a_compile_thread_to_the_others() {
        let world = World::new(2);
        world.submit(1, 7, regex("a+"));
        world.wait_until_one_is_held();
        world.submit(2, 7, regex("b+"));
        world.submit(
            3,
            8,
            Some(json!({"param": "p", "constraint": "choice", "texts": ["a"]})),
        );
        assert_eq!(world.admitted(), 3, "2 waits for the thread that 1 has");
        world.let_one_go();
        assert_eq!(world.admitted(), 1);
        world.wait_until_one_is_held();
        world.let_one_go();
        assert_eq!(world.admitted(), 2);
    }

    #[test]
    fn a_full_queue_answers_429_and_says_when_to_come_again() {
        let world = World::new(2);
        world.submit(1, 7, regex("a+"));
        world.wait_until_one_is_held();
        for stream in 2..=258 {
            world.submit(stream, 7, regex(&format!("b{stream}")));
        }
        // The text thread handles requests in order.
        world.submit(300, 7, None);
        assert_eq!(world.admitted(), 300);
        let record = world.shared.output_queue.take();
        assert_eq!(record[..8], 258_u64.to_le_bytes());
        let body = &record[13..];
        assert_eq!(u16::from_le_bytes([body[0], body[1]]), 429);
        assert!(u16::from_le_bytes([body[2], body[3]]) >= 1);
        let body: Value = serde_json::from_slice(&body[4..]).unwrap();
        let message = body["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("`guided_regex`") && message.contains("try again"),
            "{message}"
        );
    }

    #[test]
    fn who_waits_for_the_same_grammar_takes_no_thread() {
        let world = World::with_compilers(0, 3);
        for (stream, text) in [(1, "a+"), (2, "a+"), (3, "b+")] {
            world.submit(stream, 7, regex(text));
        }
        world.wait_for_texts();
        let first = world.compiles.take().unwrap();
        assert_eq!(first.stream, 1);
        assert_eq!(world.compiles.take().unwrap().stream, 3);
        let constraint = first.asked.constraint;
        let followers = world.compiles.finish(&constraint, Duration::ZERO);
        let followers: Vec<_> = followers.iter().map(|job| job.stream).collect();
        assert_eq!(followers, [2]);
    }

    #[test]
    fn a_tenant_that_waits_for_one_grammar_in_masses_is_the_one_rejected() {
        let world = World::with_compilers(0, 3);
        for stream in 0..=256 {
            world.submit(stream, 7, regex("a+"));
        }
        world.wait_for_texts();
        assert_eq!(world.rejected(), [256]);
        let first = world.compiles.take().unwrap();
        world.submit(300, 7, regex("a+"));
        world.submit(301, 8, regex("b+"));
        world.wait_for_texts();
        assert_eq!(
            world.rejected(),
            [300],
            "and its follower makes room for 8's"
        );
        assert_eq!(world.compiles.take().unwrap().stream, 301);
        let followers = world
            .compiles
            .finish(&first.asked.constraint, Duration::ZERO);
        assert_eq!(followers.len(), 255);
    }

    #[test]
    fn who_left_keeps_no_place() {
        let world = World::with_compilers(0, 3);
        for stream in 0..256 {
            world.submit(stream, 7, regex(&format!("a{stream}")));
        }
        world.wait_for_texts();
        assert!(world.compiles.forget(100) && !world.compiles.forget(100));
        world.submit(256, 7, regex("b"));
        world.wait_for_texts();
        assert!(world.rejected().is_empty());
    }
}
