//! Replays calls on a scheduler and prints what it answers, for comparison with a model of the rules.
//!
//! Each line of standard input is a case in JSON: settings and calls. Each line of standard output is the
//! list of its answers. A step's sampled tokens follow from the step and the row (see [`sampled`]), so that
//! a model can sample the same.
#![allow(
    clippy::print_stdout,
    reason = "its result is the answers that it prints"
)]

use std::io::BufRead;
use std::num::NonZeroU32;

use plait_core::{
    Event, FinishReason, HashSeed, Micros, Output, PageSettings, Plan, Refusal, Request, RequestId,
    RuntimeSettings, Scheduler, SchedulerSettings, Settings, StepResult, TenantId, TokenId,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// One case.
#[derive(Deserialize)]
struct Case {
    scheduler: SchedulerSettings,
    pages: PageSettings,
    num_pages: u32,
    max_model_len: u32,
    max_rows: u32,
    calls: Vec<Call>,
}

/// One call, a microsecond after the call before it.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Call {
    Submit(Ask),
    Plan,
    /// The result of the oldest step in flight; the masks of these sampling rows were late.
    Complete(Vec<usize>),
    /// A late mask has come.
    Mask(u64),
    Abort(u64),
    Stop(u64),
}

#[derive(Deserialize)]
struct Ask {
    prompt: Vec<TokenId>,
    max_tokens: u32,
    stop_ids: Vec<TokenId>,
    priority: i32,
    tenant: u64,
    weight: NonZeroU32,
    salt: u64,
    num_choices: NonZeroU32,
    is_masked: bool,
}

impl Ask {
    fn request(&self) -> Request {
        Request {
            prompt: self.prompt.clone().into(),
            max_tokens: self.max_tokens,
            stop_ids: self.stop_ids.clone().into(),
            num_choices: self.num_choices,
            prompt_logprobs: false,
            is_masked: self.is_masked,
            num_slot_words: 0,
            pooled: None,
            priority: self.priority,
            tenant: TenantId(self.tenant),
            weight: self.weight,
            salt: self.salt,
        }
    }
}

/// A scheduler, and its plans in flight.
struct Replay {
    scheduler: Scheduler,
    in_flight: std::collections::VecDeque<Plan>,
    now: u64,
}

impl Replay {
    fn new(case: &Case) -> Self {
        let mut runtime =
            RuntimeSettings::new(case.num_pages, case.max_model_len, HashSeed([1, 2]));
        runtime.max_rows = Some(case.max_rows);
        let settings = Settings {
            scheduler: case.scheduler.clone(),
            pages: case.pages.clone(),
            runtime,
        };
        Self {
            scheduler: Scheduler::new(settings).expect("the settings fit"),
            in_flight: std::collections::VecDeque::new(),
            now: 0,
        }
    }

    /// The answer, and which requests left the queue unserved.
    fn answer(&mut self, call: &Call) -> Value {
        let answer = self.call(call);
        let rejected = self.scheduler.take_rejected();
        if rejected.is_empty() {
            return answer;
        }
        let ids: Vec<u64> = rejected.iter().map(|it| it.request.0).collect();
        json!({"answer": answer, "rejected": ids})
    }

    fn call(&mut self, call: &Call) -> Value {
        self.now += 1;
        match call {
            Call::Submit(ask) => match self.scheduler.submit(ask.request(), Micros(self.now)) {
                Ok(id) => json!(id.0),
                Err(refusal) => json!(name(&refusal)),
            },
            Call::Plan => match self.scheduler.plan(Micros(self.now)) {
                Some(plan) => {
                    let answer = shown(&plan);
                    self.in_flight.push_back(plan);
                    answer
                }
                None => Value::Null,
            },
            Call::Complete(left_out) => self.complete(left_out),
            Call::Mask(request) => self.take_mask(RequestId(*request)),
            Call::Abort(request) => self.advance(Event::Abort(RequestId(*request))),
            Call::Stop(request) => self.advance(Event::Stop(RequestId(*request))),
        }
    }

    fn complete(&mut self, left_out: &[usize]) -> Value {
        let Some(plan) = self.in_flight.pop_front() else {
            return json!("no step is in flight");
        };
        let num_last_chunks = plan.prefill.iter().filter(|row| row.is_last_chunk).count();
        let num_samples = num_last_chunks + plan.decode.len();
        let num_accepted: Vec<u32> = (0..num_samples)
            .map(|row| u32::from(!left_out.contains(&row)))
            .collect();
        let tokens: Vec<TokenId> = (0..num_samples)
            .filter(|row| !left_out.contains(row))
            .map(|row| sampled(plan.step.0, row))
            .collect();
        self.advance(Event::Result(StepResult {
            step: plan.step,
            num_accepted: &num_accepted,
            token_ids: &tokens,
        }))
    }

    fn take_mask(&mut self, request: RequestId) -> Value {
        let told = self.advance(Event::MaskReady(request));
        assert_eq!(told, json!([]), "a mask ends nothing");
        Value::Null
    }

    fn advance(&mut self, event: Event<'_>) -> Value {
        let mut outputs = Vec::new();
        let advanced = self.scheduler.advance(event, &mut outputs);
        advanced.expect("the result fits its plan");
        outputs.iter().map(told).collect()
    }
}

/// The token of a step's sampling row.
fn sampled(step: u64, row: usize) -> TokenId {
    u32::try_from((step * 31 + row as u64 * 17) % 61).expect("less than 61")
}

fn name(refusal: &Refusal) -> String {
    let shown = format!("{refusal:?}");
    let end = shown.find([' ', '{']).unwrap_or(shown.len());
    shown[..end].to_owned()
}

fn shown(plan: &Plan) -> Value {
    let prefill = plan.prefill.iter();
    let decode = plan.decode.iter();
    let new_slots = plan.new_slots.iter();
    let pages = plan.appended_pages.iter();
    json!({
        "step": plan.step.0,
        "prefill": prefill.map(|row| json!([row.request.0, row.slot.0, row.start, row.length, row.is_last_chunk])).collect::<Vec<_>>(),
        "decode": decode.map(|row| json!([row.request.0, row.slot.0, row.start])).collect::<Vec<_>>(),
        "new_slots": new_slots.map(|new| json!([new.slot.0, new.request.0, new.next_output, new.num_cached])).collect::<Vec<_>>(),
        "freed_slots": plan.freed_slots.iter().map(|slot| slot.0).collect::<Vec<_>>(),
        "appended_pages": pages.map(|(slot, page)| json!([slot.0, page.0])).collect::<Vec<_>>(),
    })
}

fn told(output: &Output) -> Value {
    match output {
        Output::Tokens {
            request, tokens, ..
        } => json!([request.0, tokens[0]]),
        Output::Finished { request, reason } => json!([request.0, reason_name(*reason)]),
        Output::Failed { request } => json!([request.0, "Failed"]),
    }
}

fn reason_name(reason: FinishReason) -> String {
    format!("{reason:?}")
}

fn main() {
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("standard input is text");
        let case: Case = serde_json::from_str(&line).expect("a line is a case");
        let mut replay = Replay::new(&case);
        let answers: Vec<Value> = case.calls.iter().map(|call| replay.answer(call)).collect();
        println!("{}", Value::from(answers));
    }
}
