//! A rank made of a thread and a real socket. Its "model" says the alphabet: after a letter comes the
//! next one, after `z` comes `a`.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plait_proto::{
    Bye, CapturedSize, FAILED_ROW, Fingerprint, ForwardDone, Heartbeat, Hello, Message, PROTOCOL,
    PageKind, Plan, StepMasks, StepResult, Welcome, schema_fingerprint,
};
use rustc_hash::FxHashMap;

/// The reported time of every step, unless a test sets another.
pub const STEP_MICROS: u64 = 1000;

/// How a rank behaves.
#[derive(Clone, Debug)]
pub struct Behavior {
    pub rank: u32,
    pub world: u32,
    pub config: Fingerprint,
    pub num_pages: u32,
    /// Kinds of pages after the first.
    pub other_kinds: Vec<PageKind>,
    /// Decode rows of the graphs that it captures.
    pub graphs: Vec<u32>,
    /// It is the replica's first rank, which answers for it.
    pub answers: bool,
    /// From receiving a step to answering it.
    pub step: Duration,
    /// The reported time of every step.
    pub said_micros: u64,
    pub heartbeats: bool,
    /// It has finished a step's forward as soon as the step comes, and asks for the masks.
    pub asks_for_masks: bool,
    /// CURVE keys of a rank on another host.
    pub keys: Option<DiallerKeys>,
    /// Shown in place of the next answer, once a test has put one here.
    pub fault: Arc<Mutex<Option<Fault>>>,
}

/// The engine's public key, and the rank's own pair.
#[derive(Clone, Debug)]
pub struct DiallerKeys {
    pub server: [u8; 32],
    pub public: [u8; 32],
    pub secret: [u8; 32],
}

/// Faults of a rank.
#[derive(Clone, Debug)]
pub enum Fault {
    /// No answer comes until the test clears the fault.
    Silence,
    /// The same once the rank has answered so many steps, the warm-up step included.
    SilenceAfter(u64),
    /// Sends this message instead.
    Say(Message),
    /// Sends this message instead, and nothing after it.
    SayThenSilence(Message),
    /// Sends these frames instead.
    SayFrames(Vec<Vec<u8>>),
    /// Answers with a token that the model lacks.
    WrongToken,
    /// The model computes NaN for the step's last row.
    FailedRow,
    /// Forgets the log-probabilities.
    NoLogprobs,
}

impl Behavior {
    pub fn good(config: Fingerprint) -> Self {
        Self {
            rank: 0,
            world: 1,
            config,
            num_pages: 64,
            other_kinds: Vec::new(),
            graphs: Vec::new(),
            answers: true,
            step: Duration::ZERO,
            said_micros: STEP_MICROS,
            heartbeats: true,
            asks_for_masks: false,
            keys: None,
            fault: Arc::default(),
        }
    }
}

/// What a rank received.
#[derive(Clone, Debug, Default)]
pub struct Log {
    pub welcome: Option<Welcome>,
    pub plans: Vec<Plan>,
    pub masks: Vec<StepMasks>,
    pub most_in_flight: usize,
    /// Plans in flight when each one came.
    pub num_in_flight: Vec<usize>,
    pub refusal: Option<plait_proto::Fail>,
    pub was_drained: bool,
}

/// A rank's thread. It ends with a Drain, a Fail, or when it is dropped.
pub struct Worker {
    pub log: Arc<Mutex<Log>>,
    pub fault: Arc<Mutex<Option<Fault>>>,
    stop: Arc<Mutex<bool>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub fn start(endpoint: &str, behavior: Behavior) -> Self {
        let (log, stop) = (
            Arc::new(Mutex::new(Log::default())),
            Arc::new(Mutex::new(false)),
        );
        let fault = behavior.fault.clone();
        let rank = Rank {
            socket: dial_with(
                endpoint,
                &format!("rank-{}", behavior.rank),
                behavior.keys.as_ref(),
            ),
            behavior,
            log: log.clone(),
            stop: stop.clone(),
            slots: FxHashMap::default(),
            due: VecDeque::new(),
            masks: Vec::new(),
            num_steps: 0,
        };
        let thread = Some(thread::spawn(move || rank.run()));
        Self {
            log,
            fault,
            stop,
            thread,
        }
    }

    pub fn log(&self) -> Log {
        self.log.lock().unwrap().clone()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        *self.stop.lock().unwrap() = true;
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A socket that dials as `routing_id`.
pub fn dial(endpoint: &str, routing_id: &str) -> zmq::Socket {
    dial_with(endpoint, routing_id, None)
}

fn dial_with(endpoint: &str, routing_id: &str, keys: Option<&DiallerKeys>) -> zmq::Socket {
    let socket = zmq::Context::new().socket(zmq::DEALER).unwrap();
    socket.set_identity(routing_id.as_bytes()).unwrap();
    socket.set_linger(100).unwrap();
    if let Some(keys) = keys {
        socket.set_curve_serverkey(&keys.server).unwrap();
        socket.set_curve_publickey(&keys.public).unwrap();
        socket.set_curve_secretkey(&keys.secret).unwrap();
    }
    socket.connect(endpoint).unwrap();
    socket
}

#[derive(Clone, Debug, Default)]
struct Slot {
    last: u32,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
}

struct Rank {
    socket: zmq::Socket,
    behavior: Behavior,
    log: Arc<Mutex<Log>>,
    stop: Arc<Mutex<bool>>,
    slots: FxHashMap<u32, Slot>,
    due: VecDeque<(Instant, Plan)>,
    /// Of steps that are not answered.
    masks: Vec<StepMasks>,
    num_steps: u64,
}

impl Rank {
    fn run(mut self) {
        self.say(&self.hello().into());
        let mut next_heartbeat = Instant::now();
        while !*self.stop.lock().unwrap() {
            if self.behavior.heartbeats && Instant::now() >= next_heartbeat {
                self.say(
                    &Heartbeat {
                        rank: self.behavior.rank,
                        step: self.num_steps,
                    }
                    .into(),
                );
                next_heartbeat = Instant::now() + Duration::from_millis(100);
            }
            let wait = self
                .due
                .front()
                .map_or(Duration::from_millis(20), |(at, _)| {
                    at.saturating_duration_since(Instant::now())
                        .min(Duration::from_millis(20))
                });
            let millis = i64::try_from(wait.as_micros().div_ceil(1000)).unwrap();
            self.socket.poll(zmq::POLLIN, millis).unwrap();
            if !self.receive() || !self.answer_due() {
                return;
            }
        }
    }

    fn hello(&self) -> Hello {
        Hello {
            protocol: PROTOCOL,
            schema: schema_fingerprint(),
            config: self.behavior.config,
            rank: self.behavior.rank,
            world: self.behavior.world,
            pid: std::process::id(),
            device: "test".to_owned(),
            dtype: "float32".to_owned(),
            num_pages: self.behavior.num_pages,
            page_bytes: 1024,
            weight_bytes: 4096,
            other_kinds: self.behavior.other_kinds.clone(),
            graphs: self.behavior.graphs.iter().map(captured).collect(),
            slot_state: None,
        }
    }

    /// Sends. libzmq gives up a connection whose key was refused: then nothing takes a message any more.
    fn say(&self, message: &Message) {
        let frames = plait_proto::encode(message);
        match self.socket.send_multipart(frames, zmq::DONTWAIT) {
            Err(zmq::Error::EAGAIN) if self.behavior.keys.is_some() => {}
            sent => sent.unwrap(),
        }
    }

    /// Handles the messages that have come; false at the end.
    fn receive(&mut self) -> bool {
        while let Ok(frames) = self.socket.recv_multipart(zmq::DONTWAIT) {
            match plait_proto::decode(&frames).unwrap() {
                Message::Welcome(welcome) => self.log.lock().unwrap().welcome = Some(welcome),
                Message::Plan(plan) => self.take_plan(plan),
                Message::StepMasks(masks) => {
                    self.log.lock().unwrap().masks.push(masks.clone());
                    self.masks.push(masks);
                }
                Message::Drain(_) => {
                    self.log.lock().unwrap().was_drained = true;
                    self.say(
                        &Bye {
                            rank: self.behavior.rank,
                            num_steps: self.num_steps,
                        }
                        .into(),
                    );
                    return false;
                }
                Message::Fail(fail) => {
                    self.log.lock().unwrap().refusal = Some(fail);
                    return false;
                }
                other => panic!("the engine sent {other:?}"),
            }
        }
        true
    }

    fn take_plan(&mut self, plan: Plan) {
        let after = self
            .due
            .back()
            .map_or_else(Instant::now, |(at, _)| *at)
            .max(Instant::now());
        if plan.awaits_masks && self.behavior.asks_for_masks && self.behavior.answers {
            self.say(&ForwardDone { step: plan.step }.into());
        }
        self.due
            .push_back((after + self.behavior.step, plan.clone()));
        let mut log = self.log.lock().unwrap();
        log.plans.push(plan);
        log.most_in_flight = log.most_in_flight.max(self.due.len());
        log.num_in_flight.push(self.due.len());
    }

    /// Answers the steps whose time has come; false at the end.
    fn answer_due(&mut self) -> bool {
        while let Some((at, plan)) = self.due.front() {
            if *at > Instant::now() || (plan.awaits_masks && !self.has_masks(plan.step)) {
                return true;
            }
            let fault = match &mut *self.behavior.fault.lock().unwrap() {
                Some(Fault::Silence) => return true,
                Some(Fault::SilenceAfter(steps)) if self.num_steps >= *steps => return true,
                Some(Fault::SilenceAfter(_)) => None,
                fault => fault.take(),
            };
            let plan = plan.clone();
            let mut result = self.compute(&plan);
            match fault {
                Some(Fault::Say(message)) => self.say(&message),
                Some(Fault::SayThenSilence(message)) => {
                    self.say(&message);
                    *self.behavior.fault.lock().unwrap() = Some(Fault::Silence);
                }
                Some(Fault::SayFrames(frames)) => self.socket.send_multipart(frames, 0).unwrap(),
                Some(Fault::WrongToken) => {
                    result.token_ids[0] = 1 << 20;
                    self.say(&result.into());
                }
                Some(Fault::FailedRow) => {
                    *result.token_ids.last_mut().unwrap() = FAILED_ROW;
                    self.say(&result.into());
                }
                Some(Fault::NoLogprobs) => {
                    result.logprobs.clear();
                    self.say(&result.into());
                }
                _ if plan.step == 0 || self.behavior.answers => self.say(&result.into()),
                _ => {}
            }
            self.due.pop_front();
            self.num_steps += 1;
        }
        true
    }

    fn has_masks(&self, step: u64) -> bool {
        self.masks.iter().any(|it| it.step == step && it.is_last)
    }

    /// Sampling rows of a step that accept nothing.
    fn take_left_out(&mut self, step: u64) -> Vec<u32> {
        let (own, others) = std::mem::take(&mut self.masks)
            .into_iter()
            .partition(|it| it.step == step);
        self.masks = others;
        let own: Vec<StepMasks> = own;
        own.into_iter().flat_map(|it| it.left_out).collect()
    }

    fn compute(&mut self, plan: &Plan) -> StepResult {
        let left_out = self.take_left_out(plan.step);
        for slot in &plan.freed_slots {
            self.slots.remove(slot);
        }
        for new in &plan.new_slots {
            let slot = Slot {
                last: 0,
                logprobs: new.sampling.logprobs,
                prompt_logprobs: new.sampling.prompt_logprobs,
            };
            self.slots.insert(new.slot, slot);
        }
        let mut result = StepResult {
            step: plan.step,
            elapsed_us: self.behavior.said_micros,
            ..StepResult::default()
        };
        let mut tokens = plan.token_ids.as_slice();
        for row in &plan.prefill {
            let (chunk, rest) = tokens.split_at(usize::try_from(row.num_token_ids()).unwrap());
            tokens = rest;
            let slot = self.slots.get_mut(&row.slot).unwrap();
            slot.last = chunk[row.length as usize - 1];
            if let Some(num_top) = slot.prompt_logprobs {
                let records = chunk[1..].iter().flat_map(|token| record(*token, num_top));
                result.prompt_logprobs.extend(records);
            }
            if row.is_last_chunk && is_left_out(&left_out, &result) {
                result.num_accepted.push(0);
            } else if row.is_last_chunk {
                sample_one(slot, &mut result);
                result.num_accepted.push(1);
            }
        }
        for row in &plan.decode {
            let slot = self.slots.get_mut(&row.slot).unwrap();
            // Accepts some of the drafts.
            let num_accepted = match is_left_out(&left_out, &result) {
                true => 0,
                false => 1 + slot.last % row.length,
            };
            (0..num_accepted).for_each(|_| sample_one(slot, &mut result));
            result.num_accepted.push(num_accepted);
        }
        result
    }
}

/// Whether the next row that samples is one of these.
fn is_left_out(left_out: &[u32], result: &StepResult) -> bool {
    left_out
        .iter()
        .any(|row| *row as usize == result.num_accepted.len())
}

fn sample_one(slot: &mut Slot, result: &mut StepResult) {
    slot.last = next_letter(slot.last);
    result.token_ids.push(slot.last);
    result.logprobs.extend(
        slot.logprobs
            .into_iter()
            .flat_map(|num_top| record(slot.last, num_top)),
    );
}

fn next_letter(token: u32) -> u32 {
    let letter = token.saturating_sub(u32::from(b'a'));
    u32::from(b'a') + (letter + 1) % 26
}

/// A record that says log-probability `-token`, and of the best tokens 0, 1, ... that it is minus theirs.
fn record(token: u32, num_top: u32) -> Vec<u32> {
    let minus = |token: u32| (-f64::from(token) as f32).to_bits();
    [minus(token), 1]
        .into_iter()
        .chain(0..num_top)
        .chain((0..num_top).map(minus))
        .collect()
}

fn captured(decode_rows: &u32) -> CapturedSize {
    CapturedSize {
        prompt_tokens: 0,
        prompt_rows: 0,
        decode_rows: *decode_rows,
        context_tokens: None,
    }
}
