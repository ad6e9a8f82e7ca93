//! An engine with ranks around it, and what its clients read.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use plait_core::{PageSettings, Policy, SchedulerSettings};
use plait_engine::{Clock, ERROR, Engine, LAST, SystemClock, Timeouts, USED};
use plait_proto::Fingerprint;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::fake_worker::{Behavior, Fault, Worker};
use crate::manual_clock::ManualClock;
use crate::model;

/// The configuration's fingerprint of the harness's workers.
pub const CONFIG: Fingerprint = [3; 16];

/// Longer than anything here takes on a busy machine; reaching it is a failure.
const FOREVER: Duration = Duration::from_secs(60);

/// Everything that came for one stream.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub body: String,
    pub is_over: bool,
    /// HTTP status and Retry-After.
    pub error: Option<(u16, u16)>,
    /// Tokens of prompts and output, once they were told.
    pub num_used: Option<u64>,
}

impl Answer {
    /// The events of the stream but `[DONE]`.
    pub fn chunks(&self) -> Vec<Value> {
        let events = self
            .body
            .split("\n\n")
            .filter_map(|event| event.strip_prefix("data: "));
        events
            .filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }

    /// The first choice's text.
    pub fn text(&self) -> String {
        let chunks = self.chunks();
        chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["text"].as_str())
            .collect()
    }

    pub fn finish_reason(&self) -> Option<String> {
        let chunks = self.chunks();
        chunks.iter().find_map(|chunk| {
            chunk["choices"][0]["finish_reason"]
                .as_str()
                .map(str::to_owned)
        })
    }

    pub fn message(&self) -> String {
        let body: Value = serde_json::from_str(&self.body).unwrap();
        body["error"]["message"].as_str().unwrap().to_owned()
    }
}

pub struct Harness {
    pub engine: Engine,
    pub workers: Vec<Worker>,
    answers: HashMap<u64, Answer>,
    ended: Vec<u64>,
    fault: Arc<Mutex<Option<Fault>>>,
    clock: Arc<ManualClock>,
    _folder: TempDir,
}

/// Settings that suit most tests; `change` is merged in, each field where it belongs.
pub fn settings(folder: &TempDir, change: &Value) -> Value {
    let mut settings = json!({
        "model": folder.path(), "served_model_name": "alphabet", "run_dir": folder.path(), "num_ranks": 1, "num_replicas": 1,
        "max_model_len": null, "draft_tokens": 0, "text_threads": 2, "seed": 0,
        "load_timeout_seconds": 1800.0, "capture_timeout_seconds": 1800.0, "log_level": "error",
        "scheduler": SchedulerSettings {
            max_batch_tokens: Some(64), max_seqs: Some(32), policy: Policy::Priority, max_queue: 64, max_queue_tokens: 65536,
            ..SchedulerSettings::default()
        },
        "pages": PageSettings { page_size: 16, ..PageSettings::default() },
    });
    for (name, value) in change.as_object().unwrap() {
        let component = ["scheduler", "pages"]
            .into_iter()
            .find(|it| settings[it].get(name).is_some());
        match component {
            Some(component) => settings[component][name] = value.clone(),
            None => settings[name] = value.clone(),
        }
    }
    settings
}

impl Harness {
    /// An engine without ranks, on the system's clock.
    pub fn alone(change: &Value, timeouts: Timeouts) -> Self {
        let (unused, clock) = (Arc::default(), Arc::new(SystemClock::start()));
        Self::start(change, timeouts, unused, clock)
    }

    /// The same on a clock that [`Harness::advance`] moves.
    pub fn on_clock(change: &Value, timeouts: Timeouts, clock: &Arc<ManualClock>) -> Self {
        Self::start(change, timeouts, clock.clone(), clock.clone())
    }

    fn start(
        change: &Value,
        timeouts: Timeouts,
        manual: Arc<ManualClock>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let folder = tempfile::Builder::new()
            .prefix("plait")
            .tempdir_in("/tmp")
            .unwrap();
        model::write(folder.path());
        let settings = settings(&folder, change).to_string();
        let engine = Engine::start_with(settings.as_bytes(), timeouts, clock).unwrap();
        engine.set_config_fingerprint(CONFIG);
        Self {
            engine,
            workers: Vec::new(),
            answers: HashMap::new(),
            ended: Vec::new(),
            fault: Arc::default(),
            clock: manual,
            _folder: folder,
        }
    }

    /// An engine with one rank, ready.
    pub fn ready(change: &Value, behavior: impl FnOnce(&mut Behavior)) -> Self {
        let mut harness = Self::alone(change, Timeouts::default());
        harness.dial(behavior);
        harness.wait_for_phase("ready");
        harness
    }

    /// An engine of so many replicas with a rank each, ready.
    pub fn replicas(num_replicas: u32, change: &Value, behavior: impl Fn(&mut Behavior)) -> Self {
        let mut change = change.clone();
        change["num_replicas"] = num_replicas.into();
        let mut harness = Self::alone(&change, Timeouts::default());
        for replica in 0..num_replicas {
            harness.dial_to(replica, |rank| {
                (rank.rank, rank.world) = (replica, num_replicas);
                rank.fault = Arc::default();
                behavior(rank);
            });
        }
        harness.wait_for_phase("ready");
        harness
    }

    /// Where the ranks of a replica dial.
    pub fn endpoint(&self, replica: u32) -> &str {
        &self.engine.endpoints()[replica as usize]
    }

    /// Time passes for the engine.
    pub fn advance(&self, by: Duration) {
        self.clock.advance(by);
        self.engine.wake();
    }

    /// One more rank dials.
    pub fn dial(&mut self, behavior: impl FnOnce(&mut Behavior)) {
        self.dial_to(0, behavior);
    }

    /// One more rank of a replica dials.
    pub fn dial_to(&mut self, replica: u32, behavior: impl FnOnce(&mut Behavior)) {
        let endpoint = self.endpoint(replica).to_owned();
        self.dial_at(&endpoint, behavior);
    }

    /// One more rank dials this address.
    pub fn dial_at(&mut self, endpoint: &str, behavior: impl FnOnce(&mut Behavior)) {
        let mut good = Behavior::good(CONFIG);
        good.fault = self.fault.clone();
        behavior(&mut good);
        self.workers.push(Worker::start(endpoint, good));
    }

    /// Dials until the rank is ready, after another peer with its name. The socket rejects the rank for good
    /// until it has forgotten that peer, and no event says when that is.
    pub fn dial_until_ready(&mut self) {
        let deadline = Instant::now() + FOREVER;
        while self.status()["phase"] != "ready" {
            assert!(Instant::now() < deadline, "{}", self.status());
            self.workers.clear();
            self.dial(|_| {});
            let retry_at = Instant::now() + Duration::from_secs(2);
            while self.status()["phase"] != "ready" && Instant::now() < retry_at {
                self.await_event();
            }
        }
    }

    /// A rank shows this fault in place of its next answer.
    pub fn inject(&self, fault: Fault) {
        *self.fault.lock().unwrap() = Some(fault);
    }

    /// The rank answers again.
    pub fn clear_fault(&self) {
        *self.fault.lock().unwrap() = None;
    }

    /// The rank that dialled as number `rank` answers so many steps, the warm-up step included, and then waits.
    pub fn hold(&self, rank: usize, num_steps: u64) {
        *self.workers[rank].fault.lock().unwrap() = Some(Fault::SilenceAfter(num_steps));
    }

    /// It goes on.
    pub fn release(&self, rank: usize) {
        *self.workers[rank].fault.lock().unwrap() = None;
    }

    /// Waits until the scheduler has so many requests, and no more is known.
    pub fn wait_until_taken(&mut self, num_requests: usize) {
        self.wait_until("the scheduler has the requests", |harness| {
            let taken = ["running", "waiting"]
                .map(|state| harness.metric(&format!("plait_requests_{state}")));
            taken.iter().sum::<f64>() == num_requests as f64
        });
    }

    /// Submits a streamed completion of `prompt`; `change` is merged into the request.
    pub fn submit(&self, stream: u64, prompt: &str, change: &Value) {
        let mut request = json!({
            "kind": "completion", "id": "cmpl-1", "created": 0, "model": "alphabet", "stream": true,
            "include_usage": false, "prompts": [prompt], "temperature": 0.0,
        });
        request
            .as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
        let tenant = request["tenant"].as_u64().unwrap_or(0);
        self.engine
            .submit(stream, tenant, request.to_string().as_bytes());
    }

    /// Waits until `stream` has ended.
    pub fn answer(&mut self, stream: u64) -> Answer {
        self.wait_until(&format!("stream {stream} ends"), |harness| {
            harness
                .answers
                .get(&stream)
                .is_some_and(|answer| answer.is_over)
        });
        self.answers[&stream].clone()
    }

    /// What has come for `stream` by now.
    pub fn so_far(&mut self, stream: u64) -> Answer {
        self.take();
        self.answers.get(&stream).cloned().unwrap_or_default()
    }

    /// The streams that have ended, in that order.
    pub fn ended(&self) -> &[u64] {
        &self.ended
    }

    pub fn wait_for_phase(&mut self, phase: &str) {
        self.wait_until(&format!("the phase is {phase}"), |harness| {
            harness.status()["phase"] == phase
        });
    }

    /// Waits for something that comes with an event, or soon.
    pub fn wait_until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + FOREVER;
        while !is_so(self) {
            assert!(
                Instant::now() < deadline,
                "waited in vain until {what}: {}",
                self.status()
            );
            self.await_event();
        }
    }

    /// Submits streams 1 to 32, takes nothing, and waits until generation pauses: every token's chunk carries the
    /// id, so that they soon have the 64 MiB that may wait.
    pub fn fill_outbox(&mut self, max_tokens: u32) {
        let request = json!({"max_tokens": max_tokens, "ignore_eos": true, "id": "x".repeat(8192)});
        for stream in 1..=32 {
            self.submit(stream, "abc", &request);
        }
        let deadline = Instant::now() + FOREVER;
        loop {
            let before = self.metric("plait_generated_tokens_total");
            let is_paused = |harness: &Self| {
                before > 32.0 && harness.metric("plait_generated_tokens_total") == before
            };
            if self.holds_for(Duration::from_millis(250), is_paused) {
                return;
            }
            assert!(Instant::now() < deadline, "it goes on: {}", self.status());
        }
    }

    /// Whether something is so for all of `period`.
    pub fn holds_for(&mut self, period: Duration, is_so: impl Fn(&Self) -> bool) -> bool {
        let deadline = Instant::now() + period;
        while is_so(self) {
            if Instant::now() >= deadline {
                return true;
            }
            // Takes nothing: a test may want the engine's output_queue to stay full.
            std::thread::yield_now();
        }
        false
    }

    /// Takes what comes with the next event, or within a moment.
    fn await_event(&mut self) {
        let event = zmq::PollItem::from_fd(self.engine.event_fd(), zmq::POLLIN);
        zmq::poll(&mut [event], 5).unwrap();
        self.take();
    }

    pub fn status(&self) -> Value {
        serde_json::from_slice(&self.engine.status()).unwrap()
    }

    /// Lines of the metrics page have these values.
    pub fn assert_metrics(&self, values: &[(&str, f64)]) {
        for (name, value) in values {
            assert_eq!(self.metric(name), *value, "{name}");
        }
    }

    /// The value of one line of the metrics page.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.engine.metrics();
        let value = page
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value
            .unwrap_or_else(|| panic!("{name} is not in\n{page}"))
            .parse()
            .unwrap()
    }

    /// The tokens of a stream that has ended, once they were told.
    pub fn num_used(&self, stream: u64) -> Option<u64> {
        self.answers.get(&stream)?.num_used
    }

    fn take(&mut self) {
        let taken = self.engine.take();
        let mut records = taken.as_slice();
        while let Some((stream, rest)) = records.split_first_chunk() {
            let (flags, rest) = rest.split_first().unwrap();
            let (length, rest) = rest.split_first_chunk().unwrap();
            let (payload, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
            records = rest;
            let stream = u64::from_le_bytes(*stream);
            let answer = self.answers.entry(stream).or_default();
            answer.add(*flags, payload);
            if flags & LAST != 0 {
                self.ended.push(stream);
            }
        }
    }
}

impl Answer {
    fn add(&mut self, flags: u8, payload: &[u8]) {
        if flags & USED != 0 {
            let (prompt, rest) = payload.split_first_chunk().unwrap();
            let (output, ending) = rest.split_first_chunk().unwrap();
            assert_eq!(
                ending.len() % 9,
                1,
                "a byte says how it ended, nine are a time"
            );
            let num_tokens = u64::from_le_bytes(*prompt) + u64::from_le_bytes(*output);
            let before = self.num_used.replace(num_tokens);
            assert!(before.is_none(), "tokens were told twice");
            return;
        }
        assert!(!self.is_over, "a record came after the last");
        self.is_over = flags & LAST != 0;
        if flags & ERROR == 0 {
            self.body += std::str::from_utf8(payload).unwrap();
            return;
        }
        let (numbers, body) = payload.split_first_chunk::<4>().unwrap();
        let number = |bytes: [u8; 2]| u16::from_le_bytes(bytes);
        self.error = Some((
            number([numbers[0], numbers[1]]),
            number([numbers[2], numbers[3]]),
        ));
        self.body = String::from_utf8(body.to_vec()).unwrap();
    }
}
