//! The thread that publishes.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::counter::Counter;

use super::message::Origin;
use super::queue::KvEventQueue;
use super::stored_pages::StoredPages;
use super::{ENDPOINT, KvEventsProblem, KvEventsSettings, REPLAY_ENDPOINT};

/// Messages that wait for one listener at most. libzmq drops more, and the listener sees the gap.
const MAX_UNREAD: i32 = 1000;
/// Snapshots that wait for one listener at most.
const MAX_UNREAD_SNAPSHOTS: i32 = 4;
/// Events of one message at most.
const MAX_EVENTS: usize = 4096;
/// Bytes of a subscription or request at most.
const MAX_REQUEST_BYTES: i64 = 1024;
/// Requests that are answered before the next events.
const MAX_ANSWERS_A_PASS: usize = 8;
/// Grace period of the closing sockets for what they have queued.
const LINGER_MILLIS: i32 = 200;
/// The number that ends an answer.
const END: i64 = -1;

/// Publishes events until the queue is closed.
pub struct Publisher {
    queue: Arc<KvEventQueue>,
    listeners: zmq::Socket,
    /// Where listeners ask for all pages.
    requests: Option<zmq::Socket>,
    topic: String,
    origin: Origin,
    pages: StoredPages,
    /// Number of the next message.
    next: i64,
    num_messages: Counter,
}

impl Publisher {
    /// Listens at `endpoint`, which the settings have checked.
    pub fn bind(
        settings: &KvEventsSettings,
        endpoint: &str,
        origin: Origin,
        queue: Arc<KvEventQueue>,
        num_messages: Counter,
    ) -> Result<Self, KvEventsProblem> {
        let context = zmq::Context::new();
        let listeners = listen(&context, zmq::PUB, MAX_UNREAD, ENDPOINT, endpoint)?;
        let replay = settings.kv_events_replay_endpoint.as_deref();
        let requests = replay.map(|endpoint| {
            listen(
                &context,
                zmq::ROUTER,
                MAX_UNREAD_SNAPSHOTS,
                REPLAY_ENDPOINT,
                endpoint,
            )
        });
        Ok(Self {
            queue,
            listeners,
            requests: requests.transpose()?,
            topic: settings.kv_events_topic.clone(),
            origin,
            pages: StoredPages::default(),
            next: first_number(),
            num_messages,
        })
    }

    /// Where events are published and where all pages can be asked for, with the ports that were taken.
    pub fn endpoints(&self) -> Vec<String> {
        let sockets = std::iter::once(&self.listeners).chain(&self.requests);
        sockets
            .filter_map(|socket| socket.get_last_endpoint().ok()?.ok())
            .collect()
    }

    /// Publishes until the queue is closed. The first message says that there are no pages: whoever listened
    /// to an earlier process forgets its own.
    pub fn run(mut self) {
        let cleared = self.origin.snapshot(seconds(), std::iter::empty());
        self.publish(&cleared);
        loop {
            // An answer holds what had happened before its request came.
            let listeners = self.asking_listeners();
            let Some(events) = self.queue.take() else {
                return;
            };
            for some in events.chunks(MAX_EVENTS) {
                let message = self.origin.changes(seconds(), some);
                self.publish(&message);
            }
            self.pages.apply(events);
            for listener in listeners {
                self.answer(&listener);
            }
            self.wait();
        }
    }

    fn wait(&self) {
        let mut items = vec![zmq::PollItem::from_fd(
            self.queue.wakeup().fd(),
            zmq::POLLIN,
        )];
        items.extend(
            self.requests
                .iter()
                .map(|socket| socket.as_poll_item(zmq::POLLIN)),
        );
        match zmq::poll(&mut items, -1) {
            Ok(_) | Err(zmq::Error::EINTR) => {}
            Err(error) => panic!("polling valid descriptors failed: {error}"),
        }
    }

    fn publish(&mut self, message: &[u8]) {
        let frames = [self.topic.as_bytes(), &self.next.to_be_bytes(), message];
        // A PUB socket drops what a slow listener does not take. It never waits.
        let _sent = self.listeners.send_multipart(frames, zmq::DONTWAIT);
        self.next += 1;
        self.num_messages.inc();
    }

    /// Listeners that ask for all pages. A request is listener, empty frame, number. Whatever the number, the
    /// answer holds all pages.
    fn asking_listeners(&self) -> Vec<Vec<u8>> {
        let requests =
            std::iter::from_fn(|| self.requests.as_ref()?.recv_multipart(zmq::DONTWAIT).ok());
        let well_formed = requests.take(MAX_ANSWERS_A_PASS).filter_map(|request| {
            match <[_; 3]>::try_from(request) {
                Ok([listener, empty, number])
                    if empty.is_empty() && number.len() == size_of::<i64>() =>
                {
                    Some(listener)
                }
                _ => None,
            }
        });
        well_formed.collect()
    }

    fn answer(&self, listener: &[u8]) {
        let Some(socket) = &self.requests else {
            return;
        };
        let last = (self.next - 1).to_be_bytes();
        let pages = self.origin.snapshot(seconds(), self.pages.iter());
        for (number, message) in [(last, &pages[..]), (END.to_be_bytes(), &[])] {
            // A listener that does not read its answer asks again.
            let _sent = socket.send_multipart([listener, &[], &number, message], zmq::DONTWAIT);
        }
    }
}

fn listen(
    context: &zmq::Context,
    kind: zmq::SocketType,
    max_unread: i32,
    setting: &'static str,
    endpoint: &str,
) -> Result<zmq::Socket, KvEventsProblem> {
    let bind = || {
        let socket = context.socket(kind)?;
        socket.set_linger(LINGER_MILLIS)?;
        socket.set_sndhwm(max_unread)?;
        socket.set_maxmsgsize(MAX_REQUEST_BYTES)?;
        socket.bind(endpoint)?;
        Ok(socket)
    };
    bind().map_err(|error: zmq::Error| KvEventsProblem::Socket {
        setting,
        endpoint: endpoint.to_owned(),
        reason: error.to_string(),
    })
}

/// Microseconds since the epoch. The numbers of a process begin after those of any before it, so a listener
/// sees a gap when the server was started again.
fn first_number() -> i64 {
    i64::try_from(since_epoch().as_micros()).expect("the epoch was less than 292,000 years ago")
}

fn seconds() -> f64 {
    since_epoch().as_secs_f64()
}

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}
