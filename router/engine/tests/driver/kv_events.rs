//! Claims about KV events: a listener knows which pages are cached.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicU64, Ordering};

use plait_engine::Timeouts;
use serde::Deserialize;
use serde_bytes::ByteBuf;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::Harness;

const KEY: &str = "000102030405060708090a0b0c0d0e0f";
const WAIT_MS: i32 = 60_000;

/// Streams of all tests, so that none comes twice.
static NEXT_STREAM: AtomicU64 = AtomicU64::new(0);

/// The fields of every event that the tests read.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    block_hashes: Vec<ByteBuf>,
    #[serde(default)]
    token_ids: Vec<u32>,
    #[serde(default)]
    block_size: usize,
}

#[derive(Deserialize)]
struct Batch {
    events: Vec<Event>,
    hash_key_id: String,
    data_parallel_rank: Option<u32>,
}

/// A listener as docs/kv-events.md describes it.
struct Listener {
    changes: zmq::Socket,
    requests: zmq::Socket,
    last: Option<i64>,
    pages: BTreeSet<Vec<u8>>,
    num_snapshots: u32,
    hash_key_id: String,
    replica: Option<u32>,
}

impl Listener {
    fn connect(folder: &TempDir) -> Self {
        Self::connect_to(folder, "")
    }

    /// `suffix` is that of the replica's endpoints.
    fn connect_to(folder: &TempDir, suffix: &str) -> Self {
        let context = zmq::Context::new();
        let [changes, requests] =
            [(zmq::SUB, "events"), (zmq::DEALER, "replay")].map(|(kind, name)| {
                let socket = context.socket(kind).unwrap();
                socket.set_linger(0).unwrap();
                socket.set_rcvtimeo(WAIT_MS).unwrap();
                let endpoint = endpoint(folder, &format!("{name}{suffix}"));
                socket.connect(&endpoint).unwrap();
                socket
            });
        changes.set_subscribe(b"kv").unwrap();
        let (pages, hash_key_id) = (BTreeSet::new(), String::new());
        Self {
            changes,
            requests,
            last: None,
            pages,
            num_snapshots: 0,
            hash_key_id,
            replica: None,
        }
    }

    /// Asks for all pages.
    fn ask(&mut self) {
        let number = 0_i64.to_be_bytes();
        self.requests.send_multipart([&[][..], &number], 0).unwrap();
        let [_, number, message] = &self.requests.recv_multipart(0).unwrap()[..] else {
            panic!("an answer has three frames");
        };
        self.last = Some(i64::from_be_bytes(number[..].try_into().unwrap()));
        self.apply(message);
        let end = self.requests.recv_multipart(0).unwrap();
        assert_eq!(end[1..], [(-1_i64).to_be_bytes().to_vec(), Vec::new()]);
        self.num_snapshots += 1;
    }

    /// Returns once messages come: a subscription takes a moment.
    fn subscribe(&mut self, harness: &mut Harness) {
        for number in 0.. {
            serve(harness, &[format!("subscription {number}")]);
            if self.changes.poll(zmq::POLLIN, 20).unwrap() > 0 {
                return self.follow();
            }
        }
    }

    /// Follows until it knows what it knew after this message.
    fn follow_to(&mut self, number: i64) {
        while self.last.is_none_or(|last| last < number) {
            assert!(
                self.changes.poll(zmq::POLLIN, i64::from(WAIT_MS)).unwrap() > 0,
                "message {number} never comes"
            );
            self.follow();
        }
    }

    /// Follows the messages that have come; a gap is closed with all pages.
    fn follow(&mut self) {
        while self.changes.poll(zmq::POLLIN, 0).unwrap() > 0 {
            let [_, number, message] = &self.changes.recv_multipart(0).unwrap()[..] else {
                panic!("a message has three frames");
            };
            let number = i64::from_be_bytes(number[..].try_into().unwrap());
            match self.last {
                Some(last) if number <= last => {}
                Some(last) if number == last + 1 => {
                    self.last = Some(number);
                    self.apply(message);
                }
                _ => self.ask(),
            }
        }
    }

    fn apply(&mut self, message: &[u8]) {
        let batch: Batch = rmp_serde::from_slice(message).unwrap();
        self.hash_key_id = batch.hash_key_id;
        self.replica = batch.data_parallel_rank;
        for event in batch.events {
            let hashes = event.block_hashes.into_iter().map(ByteBuf::into_vec);
            match event.kind.as_str() {
                "AllBlocksCleared" => self.pages.clear(),
                "BlockStored" => {
                    assert_eq!(hashes.len() * event.block_size, event.token_ids.len());
                    self.pages.extend(hashes);
                }
                "BlockRemoved" => {
                    for hash in hashes {
                        assert!(self.pages.remove(&hash), "only a stored page is removed");
                    }
                }
                other => panic!("an event {other}"),
            }
        }
    }
}

fn endpoint(folder: &TempDir, name: &str) -> String {
    format!("ipc://{}", folder.path().join(name).display())
}

/// A directory that other users cannot reach.
fn folder() -> TempDir {
    let only_mine = Permissions::from_mode(0o700);
    let mut builder = tempfile::Builder::new();
    builder
        .prefix("plait")
        .permissions(only_mine)
        .tempdir_in("/tmp")
        .unwrap()
}

/// A replica that publishes; it keeps `num_pages` pages of four tokens.
fn publishing(folder: &TempDir, key: &Value, num_pages: u32) -> Harness {
    Harness::ready(&settings(folder, key), |rank| rank.num_pages = num_pages)
}

fn settings(folder: &TempDir, key: &Value) -> Value {
    json!({
        "page_size": 4, "hash_key": key,
        "kv_events": {
            "kv_events_endpoint": endpoint(folder, "events"),
            "kv_events_replay_endpoint": endpoint(folder, "replay"),
            "kv_events_topic": "kv", "kv_events_public": false,
        },
    })
}

/// Serves prompts one after another.
fn serve(harness: &mut Harness, prompts: &[String]) {
    for prompt in prompts {
        let stream = NEXT_STREAM.fetch_add(1, Ordering::Relaxed);
        harness.submit(stream, prompt, &json!({"max_tokens": 2}));
        harness.answer(stream);
    }
}

fn prompts(num: u32) -> Vec<String> {
    (0..num)
        .map(|number| format!("{number:03} and what follows").repeat(2))
        .collect()
}

#[expect(clippy::cast_sign_loss, reason = "a number of pages")]
fn num_cached(harness: &Harness) -> usize {
    harness.metric("plait_kv_pages{state=\"cached\"}") as usize
}

#[test]
fn a_listener_knows_the_cached_pages_after_evictions() {
    let folder = folder();
    let mut harness = publishing(&folder, &Value::Null, 32);
    let mut early = Listener::connect(&folder);
    early.subscribe(&mut harness);
    let num_snapshots = early.num_snapshots;
    serve(&mut harness, &prompts(40));
    assert!(
        harness.metric("plait_prefix_evictions_total") > 100.0,
        "pages were evicted"
    );
    let mut late = Listener::connect(&folder);
    late.ask();
    early.follow_to(late.last.unwrap());
    assert_eq!(early.num_snapshots, num_snapshots, "no message was missing");
    assert_eq!(early.pages, late.pages);
    assert!(!late.pages.is_empty());
    harness.wait_until("all pages are cached", |harness| {
        num_cached(harness) == late.pages.len()
    });
}

#[test]
fn replicas_with_one_key_publish_equal_hashes_for_equal_prompts() {
    let [one, equal, other, drawn] = [
        json!(KEY),
        json!(KEY),
        json!(KEY.replace('0', "f")),
        Value::Null,
    ]
    .map(|key| {
        let folder = folder();
        let mut harness = publishing(&folder, &key, 64);
        serve(&mut harness, &prompts(2));
        let mut listener = Listener::connect(&folder);
        listener.ask();
        (listener.pages, listener.hash_key_id)
    });
    assert_eq!(one, equal);
    for (pages, id) in [other, drawn] {
        assert!(pages.is_disjoint(&one.0));
        assert_ne!(id, one.1);
    }
}

#[test]
fn each_replica_of_an_engine_publishes_its_own_pages() {
    let folder = folder();
    let mut harness = Harness::replicas(2, &settings(&folder, &Value::Null), |_| {});
    let mut ask = |prompts: &[String]| {
        serve(&mut harness, prompts);
        ["", "_dp1"].map(|suffix| {
            let mut listener = Listener::connect_to(&folder, suffix);
            listener.ask();
            listener
        })
    };
    let listeners = ask(&prompts(1));
    assert_eq!(
        listeners.each_ref().map(|each| each.replica),
        [Some(0), Some(1)]
    );
    assert_eq!(
        listeners
            .iter()
            .filter(|each| !each.pages.is_empty())
            .count(),
        1,
        "one replica has the prompt"
    );
    let [first, second] = ask(&prompts(1)).map(|each| each.pages);
    assert!(
        first.is_disjoint(&second),
        "and gets it again: its pages are there"
    );
}

#[test]
fn a_listener_that_does_not_read_delays_nobody_and_finds_the_gap() {
    let folder = folder();
    let mut harness = publishing(&folder, &Value::Null, 32);
    let mut slow = Listener::connect(&folder);
    slow.subscribe(&mut harness);
    let num_snapshots = slow.num_snapshots;
    serve(&mut harness, &prompts(60));
    // As if libzmq had dropped a message.
    slow.changes.recv_multipart(0).unwrap();
    let mut other = Listener::connect(&folder);
    other.ask();
    slow.follow_to(other.last.unwrap());
    assert_eq!(
        slow.num_snapshots,
        num_snapshots + 1,
        "it saw that a message was missing"
    );
    assert_eq!(slow.pages, other.pages);
}

#[test]
fn an_address_that_others_reach_is_refused_with_what_to_do() {
    let folder = folder();
    let settings = json!({"kv_events": {
        "kv_events_endpoint": "tcp://0.0.0.0:*", "kv_events_replay_endpoint": null, "kv_events_topic": "",
        "kv_events_public": false,
    }});
    let settings = crate::harness::settings(&folder, &settings).to_string();
    crate::model::write(folder.path());
    let clock = std::sync::Arc::new(plait_engine::SystemClock::start());
    let refused = plait_engine::Engine::start_with(settings.as_bytes(), Timeouts::default(), clock);
    let problem = refused.err().unwrap().to_string();
    assert!(
        problem.contains("--kv-events-endpoint is tcp://0.0.0.0:*"),
        "{problem}"
    );
    assert!(problem.contains("--kv-events-public"), "{problem}");
}
