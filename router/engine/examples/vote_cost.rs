//! What agreeing on a step costs: the decision by function call, and a round of votes between engines
//! over ZeroMQ, from one decision to the next, on idle engines.
//!
//! `cargo run --release -p plait-engine --example vote_cost` prints one JSON object a case and line. Numbers that
//! follow it (`-- 2 16 64`) are those of replicas and engines. Engines are threads here, each with a ZeroMQ context (and so an I/O thread) of its own: on fewer
//! cores than engines they wait for each other.

#![allow(
    clippy::unwrap_used,
    reason = "a measurement that cannot go on says where"
)]
#![allow(
    clippy::print_stdout,
    reason = "its result is the table that it prints"
)]

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use plait_core::{GraphSize, Micros, StepId, Vote, decide};
use plait_engine::Wakeup;
use plait_engine::group::{
    ClientKeys, Exchange, GroupSettings, GroupTimeouts, Role, Seat, ServerKeys,
};
use zmq::CurveKeyPair;

const NUM_CALLS: usize = 20_000;
const NUM_WARM_UP: usize = 200;
const NUM_ROUNDS: usize = 2_000;
const GRAPHS: [u32; 12] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 1024];

fn main() {
    let given: Vec<u32> = std::env::args()
        .skip(1)
        .map(|it| it.parse().expect("numbers of replicas"))
        .collect();
    let (of_replicas, of_engines) = match given.as_slice() {
        [] => (vec![64], vec![2, 4, 8]),
        given => (given.to_vec(), given.to_vec()),
    };
    for num_replicas in of_replicas {
        by_function_call(num_replicas);
        in_one_engine(num_replicas);
    }
    for num_engines in of_engines {
        over_zeromq("ipc", num_engines);
        over_zeromq("tcp", num_engines);
    }
}

/// A thread for each replica, from one decision to the next.
fn in_one_engine(num_replicas: u32) {
    let wakeups: Vec<_> = (0..num_replicas)
        .map(|_| Arc::new(Wakeup::new().unwrap()))
        .collect();
    let settings = GroupSettings {
        role: Role::Alone,
        num_replicas: vec![num_replicas],
        ..group_settings(0, 1, "", &[])
    };
    let seats = Seat::of_engine(&settings, wakeups.clone(), Micros(0)).unwrap();
    let threads: Vec<JoinHandle<_>> = seats
        .into_iter()
        .zip(wakeups)
        .map(|(seat, wakeup)| thread::spawn(move || rounds_of_seat(seat, &wakeup)))
        .collect();
    let mut times: Vec<Vec<Duration>> = threads.into_iter().map(|it| it.join().unwrap()).collect();
    print(
        &format!("decision, {num_replicas} replicas of one engine"),
        times.swap_remove(0),
    );
}

fn rounds_of_seat(mut seat: Seat, wakeup: &Wakeup) -> Vec<Duration> {
    let mut ends = Vec::with_capacity(NUM_WARM_UP + NUM_ROUNDS);
    for step in 1..=(NUM_WARM_UP + NUM_ROUNDS) as u64 {
        seat.cast(vote(seat.replica(), step), Micros(0)).unwrap();
        while seat.receive(Micros(0)).unwrap().is_none() {
            let mut items = [zmq::PollItem::from_fd(wakeup.fd(), zmq::POLLIN)];
            zmq::poll(&mut items, -1).unwrap();
            wakeup.clear();
        }
        ends.push(Instant::now());
    }
    let ends = &ends[NUM_WARM_UP..];
    ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

fn vote(replica: u32, step: u64) -> Vote {
    let num_tokens = 1 + replica % 256;
    Vote {
        replica,
        step: StepId(step),
        num_prefill_tokens: 0,
        num_prefill_rows: 0,
        num_context_tokens: 0,
        num_decode_rows: num_tokens,
        num_tokens,
        can_graph: true,
        idle: false,
        draining: false,
    }
}

fn by_function_call(num_replicas: u32) {
    let votes: Vec<Vote> = (0..num_replicas).map(|replica| vote(replica, 1)).collect();
    let graphs = GRAPHS.map(GraphSize::of_decode_rows);
    let times = (0..NUM_CALLS).map(|_| {
        let began = Instant::now();
        std::hint::black_box(decide(std::hint::black_box(&votes), num_replicas, &graphs)).unwrap();
        began.elapsed()
    });
    print(
        &format!("decision, {num_replicas} replicas by function call"),
        times.collect(),
    );
}

fn over_zeromq(transport: &str, num_engines: u32) {
    let owners_only = std::fs::Permissions::from_mode(0o700);
    let directory = tempfile::Builder::new().permissions(owners_only).tempdir();
    let directory = directory.unwrap();
    let endpoint = match transport {
        "ipc" => format!("ipc://{}", directory.path().join("group").display()),
        _ => "tcp://127.0.0.1:*".to_owned(),
    };
    let num_pairs = if transport == "tcp" { num_engines } else { 0 };
    let pairs: Vec<CurveKeyPair> = (0..num_pairs)
        .map(|_| CurveKeyPair::new().unwrap())
        .collect();
    let settings = |engine, endpoint: &str| group_settings(engine, num_engines, endpoint, &pairs);
    let first = Exchange::new(settings(0, &endpoint), Micros(0)).unwrap();
    let endpoint = first.endpoint().unwrap().to_owned();
    let members: Vec<JoinHandle<_>> = (1..num_engines)
        .map(|engine| {
            let settings = settings(engine, &endpoint);
            thread::spawn(move || rounds(Exchange::new(settings, Micros(0)).unwrap(), engine))
        })
        .collect();
    let times = rounds(first, 0);
    members
        .into_iter()
        .for_each(|member| drop(member.join().unwrap()));
    print(
        &format!("decision, {num_engines} engines over ZeroMQ, {transport}"),
        times,
    );
}

/// A pair of keys for each engine; none without encryption.
fn group_settings(
    engine: u32,
    num_engines: u32,
    endpoint: &str,
    pairs: &[CurveKeyPair],
) -> GroupSettings {
    let endpoint = endpoint.to_owned();
    let role = match engine {
        0 => Role::Coordinator {
            endpoint,
            keys: pairs.split_first().map(|(own, others)| ServerKeys {
                secret: own.secret_key,
                allowed: others.iter().map(|pair| pair.public_key).collect(),
            }),
        },
        _ => Role::Member {
            engine,
            endpoint,
            keys: pairs.get(engine as usize).map(|own| ClientKeys {
                server: pairs[0].public_key,
                public: own.public_key,
                secret: own.secret_key,
            }),
        },
    };
    GroupSettings {
        role,
        num_replicas: vec![1; num_engines as usize],
        config: [0; 16],
        facts: Vec::new(),
        graphs: GRAPHS.map(GraphSize::of_decode_rows).to_vec().into(),
        max_tokens: 1024,
        timeouts: GroupTimeouts::default(),
    }
}

/// From each decision to the next; then the group drains.
fn rounds(mut exchange: Exchange, replica: u32) -> Vec<Duration> {
    let began = Instant::now();
    let mut ends = Vec::with_capacity(NUM_WARM_UP + NUM_ROUNDS);
    for step in 1.. {
        let is_over = ends.len() == NUM_WARM_UP + NUM_ROUNDS;
        let cast = Vote {
            num_decode_rows: u32::from(!is_over),
            num_tokens: u32::from(!is_over),
            idle: is_over,
            draining: is_over,
            ..vote(replica, step)
        };
        let now = || Micros(u64::try_from(began.elapsed().as_micros()).unwrap());
        exchange.cast(&[cast], now()).unwrap();
        let decision = loop {
            if let Some(decision) = exchange.receive(now()).unwrap() {
                break decision;
            }
            zmq::poll(&mut exchange.poll_items(), -1).unwrap();
        };
        ends.push(Instant::now());
        if decision.stop {
            break;
        }
    }
    ends.pop();
    let ends = &ends[NUM_WARM_UP..];
    ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

fn print(case: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: f64| {
        #[expect(clippy::cast_sign_loss, reason = "a share of a length")]
        let index = ((times.len() - 1) as f64 * share) as usize;
        times[index].as_secs_f64() * 1e6
    };
    println!(
        "{{\"case\": \"{case}\", \"p50\": {:.2}, \"p99\": {:.2}}}",
        at(0.5),
        at(0.99)
    );
}
