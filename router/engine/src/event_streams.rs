//! Event streams whose sockets the writer thread has: Python writes how each begins and ends, Rust what comes between.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::Duration;

use plait_core::Micros;
use rustc_hash::{FxHashMap, FxHashSet};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

use crate::clock::since;
use crate::output_queue::{GONE, LAST, Record, StreamId, TOO_SLOW, USED, append_record};
use crate::writable::Writable;

/// How far a stream has come.
#[derive(Debug)]
enum Stage {
    /// Its first record goes to Python, which writes the head of the answer.
    Unbegun,
    /// Python writes the first record; the socket will come, or the stream be released.
    Begun,
    /// What follows goes here.
    HandedOver(OwnedFd),
}

#[derive(Debug)]
struct EventStream {
    stage: Stage,
    /// In HTTP's chunks.
    unsent: Vec<u8>,
    max_unsent_bytes: usize,
    /// How long bytes may stay unsent.
    write_limit: Duration,
    stalled_since: Option<Micros>,
    /// The last record, for Python once everything before is sent.
    last: Option<Vec<u8>>,
}

/// What became of a record.
enum Taken {
    ForPython,
    Kept,
    /// Too much is unsent already.
    TooMuch,
}

/// The streams that were announced, by number.
#[derive(Debug)]
pub struct EventStreams {
    streams: FxHashMap<StreamId, EventStream>,
    /// Have something to send since the last [`EventStreams::send`].
    filled: FxHashSet<StreamId>,
    stalled: FxHashSet<StreamId>,
    unread: Vec<StreamId>,
    for_python: Vec<u8>,
    writable: Writable,
}

impl EventStreams {
    /// None. `writable` watches the sockets that take nothing for now.
    pub fn new(writable: Writable) -> Self {
        Self {
            streams: FxHashMap::default(),
            filled: FxHashSet::default(),
            stalled: FxHashSet::default(),
            unread: Vec::new(),
            for_python: Vec::new(),
            writable,
        }
    }

    /// Where to wait for sockets.
    pub fn writable(&self) -> &Writable {
        &self.writable
    }

    /// Records that are Python's to write.
    pub fn for_python(&mut self) -> &mut Vec<u8> {
        &mut self.for_python
    }

    /// Streams that nobody reads any more, since the last call. Their requests must be aborted.
    pub fn take_unread(&mut self) -> Vec<StreamId> {
        std::mem::take(&mut self.unread)
    }

    /// Whether some socket takes nothing for now.
    pub fn has_stalled(&self) -> bool {
        !self.stalled.is_empty()
    }

    /// An event stream whose socket will come.
    pub fn announce(&mut self, stream: StreamId, max_unsent_bytes: usize) {
        let announced = EventStream {
            stage: Stage::Unbegun,
            unsent: Vec::new(),
            max_unsent_bytes,
            write_limit: Duration::MAX,
            stalled_since: None,
            last: None,
        };
        self.streams.insert(stream, announced);
    }

    /// Python has written the first record and everything else of its own.
    pub fn hand_over(&mut self, stream: StreamId, socket: OwnedFd, write_limit: Duration) {
        if let Some(open) = self.streams.get_mut(&stream) {
            open.stage = Stage::HandedOver(socket);
            open.write_limit = write_limit;
            self.filled.insert(stream);
        }
    }

    /// Python is done with the stream.
    pub fn release(&mut self, stream: StreamId) {
        if let Some(open) = self.streams.remove(&stream) {
            self.forget(stream, &open.stage);
        }
    }

    /// Adds `comment` to every stream that waits for its next record.
    pub fn comment(&mut self, comment: &[u8]) {
        for (stream, open) in &mut self.streams {
            let waits = matches!(open.stage, Stage::HandedOver(_)) && open.last.is_none();
            if waits && open.unsent.is_empty() {
                append_chunk(&mut open.unsent, comment);
                self.filled.insert(*stream);
            }
        }
    }

    /// Takes a record.
    pub fn take(&mut self, record: &Record<'_>) {
        if record.flags & USED != 0 {
            self.for_python.extend_from_slice(record.packed);
            return;
        }
        let Some(open) = self.streams.get_mut(&record.stream) else {
            self.for_python.extend_from_slice(record.packed);
            return;
        };
        let is_last = record.flags & LAST != 0;
        match open.take(record) {
            Taken::ForPython => {
                self.for_python.extend_from_slice(record.packed);
                if is_last {
                    self.streams.remove(&record.stream);
                }
            }
            Taken::Kept => {
                self.filled.insert(record.stream);
            }
            Taken::TooMuch => {
                open.last = Some(bare_record(record.stream, TOO_SLOW));
                self.unread.push(record.stream);
            }
        }
    }

    /// Sends what was added, one write a stream.
    pub fn send(&mut self, now: Micros) {
        let mut filled = std::mem::take(&mut self.filled);
        for stream in filled.drain() {
            if !self.stalled.contains(&stream) {
                self.send_one(stream, now);
            }
        }
        self.filled = filled;
    }

    /// Goes on with sockets that take bytes again.
    pub fn resume(&mut self, sockets: &[StreamId], now: Micros) {
        for stream in sockets {
            self.send_one(*stream, now);
        }
    }

    /// Shuts the sockets down that were stalled for too long.
    pub fn end_stalled(&mut self, now: Micros) {
        let streams = &self.streams;
        let is_late = |stream: &&StreamId| {
            let open = streams.get(stream);
            open.is_some_and(|open| {
                open.stalled_since
                    .is_some_and(|start| since(start, now) >= open.write_limit)
            })
        };
        let late: Vec<_> = self.stalled.iter().filter(is_late).copied().collect();
        for stream in late {
            self.shut_down(stream);
        }
    }

    /// The client is gone, or as good as that. Python may not see it: it reads nothing from a client that sent its next
    /// request already.
    fn shut_down(&mut self, stream: StreamId) {
        let Some(open) = self.streams.remove(&stream) else {
            return;
        };
        self.forget(stream, &open.stage);
        if let Stage::HandedOver(socket) = open.stage {
            // It may be shut down already.
            let _closed = rustix::net::shutdown(socket, Shutdown::Both);
        }
        self.for_python.extend(bare_record(stream, GONE));
        self.unread.push(stream);
    }

    fn send_one(&mut self, stream: StreamId, now: Micros) {
        let Some(open) = self.streams.get_mut(&stream) else {
            return;
        };
        let Stage::HandedOver(socket) = &open.stage else {
            return;
        };
        match send_all(socket, &mut open.unsent) {
            Ok(true) => {
                open.stalled_since = None;
                if self.stalled.remove(&stream) {
                    self.writable.forget(socket);
                }
                self.end(stream);
            }
            Ok(false) => {
                open.stalled_since.get_or_insert(now);
                if self.stalled.insert(stream) && !self.writable.watch(stream, socket) {
                    self.shut_down(stream);
                }
            }
            Err(_client_gone) => self.shut_down(stream),
        }
    }

    /// Gives Python the last record, now that nothing stands before it.
    fn end(&mut self, stream: StreamId) {
        let last = self
            .streams
            .get_mut(&stream)
            .and_then(|open| open.last.take());
        if let Some(last) = last {
            self.for_python.extend_from_slice(&last);
            self.streams.remove(&stream);
        }
    }

    fn forget(&mut self, stream: StreamId, stage: &Stage) {
        if self.stalled.remove(&stream)
            && let Stage::HandedOver(socket) = stage
        {
            self.writable.forget(socket);
        }
    }
}

impl EventStream {
    fn take(&mut self, record: &Record<'_>) -> Taken {
        match self.stage {
            Stage::Unbegun => {
                self.stage = Stage::Begun;
                return Taken::ForPython;
            }
            _ if self.last.is_some() => {}
            _ if record.flags & LAST != 0 => self.last = Some(record.packed.to_vec()),
            _ if self.unsent.len() > self.max_unsent_bytes => return Taken::TooMuch,
            _ => {
                // One record may repeat all of a long item: it must not count as a client that reads slowly.
                self.max_unsent_bytes = self.max_unsent_bytes.max(2 * record.payload.len());
                append_chunk(&mut self.unsent, record.payload);
            }
        }
        Taken::Kept
    }
}

/// A stream's last record, without payload.
fn bare_record(stream: StreamId, flag: u8) -> Vec<u8> {
    let mut record = Vec::new();
    append_record(&mut record, stream, |_| ((), LAST | flag));
    record
}

/// One chunk of HTTP/1.1's chunked transfer coding (RFC 9112, section 7.1).
fn append_chunk(unsent: &mut Vec<u8>, payload: &[u8]) {
    write!(unsent, "{:x}\r\n", payload.len()).expect("a vector takes all bytes");
    unsent.extend_from_slice(payload);
    unsent.extend_from_slice(b"\r\n");
}

/// Sends what the socket takes now; true if that is everything.
fn send_all(socket: &OwnedFd, unsent: &mut Vec<u8>) -> Result<bool, Errno> {
    let mut num_sent = 0;
    while num_sent < unsent.len() {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::send(socket, &unsent[num_sent..], flags) {
            Ok(num) => num_sent += num,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => break,
            Err(gone) => return Err(gone),
        }
    }
    unsent.drain(..num_sent);
    Ok(unsent.is_empty())
}

#[cfg(test)]
mod tests;
