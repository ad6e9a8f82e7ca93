//! The writer thread: from the engine's records to the clients' sockets, and what is left to Python.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::Sender;
use rustix::event::Timespec;

use crate::event_streams::EventStreams;
use crate::output_queue::{StreamId, records};
use crate::shared::{Sentinel, Shared};
use crate::writable::Writable;

/// How often stalled sockets are looked at.
const STALL_CHECK: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// From Python to the writer thread.
#[derive(Debug)]
enum WriterMail {
    Announce {
        stream: StreamId,
        max_unsent_bytes: usize,
    },
    HandOver {
        stream: StreamId,
        socket: OwnedFd,
        write_limit: Duration,
    },
    Release(StreamId),
    Comment(Vec<u8>),
    /// Answer when all records from before are taken.
    Sync(Sender<()>),
    Quit,
}

/// A few of each open stream, at most: Python never waits to leave one. None once the thread has ended.
type Mailbox = Mutex<Option<Vec<WriterMail>>>;

/// The writer thread's other end. The thread ends with it.
#[derive(Debug)]
pub struct StreamWriter {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

impl StreamWriter {
    /// Starts the thread.
    pub fn spawn(shared: &Arc<Shared>) -> io::Result<Self> {
        let mailbox = Arc::new(Mutex::new(Some(Vec::new())));
        let writable = Writable::new(&shared.output_queue)?;
        let thread = WriterThread {
            shared: shared.clone(),
            mailbox: mailbox.clone(),
            streams: EventStreams::new(writable),
        };
        let sentinel = Sentinel(shared.clone());
        let thread = thread::Builder::new()
            .name("plait-writer".to_owned())
            .spawn(move || {
                let _sentinel = sentinel;
                thread.run();
            })?;
        Ok(Self {
            shared: shared.clone(),
            mailbox,
            thread: Some(thread),
        })
    }

    /// Call it before the stream's request is submitted.
    pub fn announce(&self, stream: StreamId, max_unsent_bytes: usize) {
        self.send(WriterMail::Announce {
            stream,
            max_unsent_bytes,
        });
    }

    /// What follows the first record goes to `socket`; the client may leave bytes unread for `write_limit`.
    pub fn hand_over(&self, stream: StreamId, socket: OwnedFd, write_limit: Duration) {
        self.send(WriterMail::HandOver {
            stream,
            socket,
            write_limit,
        });
    }

    /// Python is done with an announced stream.
    pub fn release(&self, stream: StreamId) {
        self.send(WriterMail::Release(stream));
    }

    /// Writes bytes to every stream that was handed over and waits.
    pub fn comment(&self, comment: &[u8]) {
        self.send(WriterMail::Comment(comment.to_vec()));
    }

    /// Waits until the writer thread has taken all records so far, and has left to Python what is Python's. Some may
    /// wait for a socket.
    pub fn sync(&self) {
        let (done, synced) = crossbeam_channel::bounded(1);
        self.send(WriterMail::Sync(done));
        // A thread that panicked says so.
        let _ended = synced.recv();
    }

    fn send(&self, mail: WriterMail) {
        if let Some(mailbox) = &mut *lock(&self.mailbox) {
            mailbox.push(mail);
        }
        self.shared.output_queue.wakeup().signal();
    }
}

impl Drop for StreamWriter {
    fn drop(&mut self) {
        self.send(WriterMail::Quit);
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

fn lock(mailbox: &Mailbox) -> MutexGuard<'_, Option<Vec<WriterMail>>> {
    mailbox.lock().unwrap_or_else(PoisonError::into_inner)
}

struct WriterThread {
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    streams: EventStreams,
}

impl Drop for WriterThread {
    fn drop(&mut self) {
        // Nobody waits for an answer to mail that nobody reads.
        *lock(&self.mailbox) = None;
    }
}

impl WriterThread {
    fn run(mut self) {
        let mut writable = Vec::new();
        let mut synced = Vec::new();
        while self.turn(&mut synced) {
            for done in synced.drain(..) {
                let _left = done.send(());
            }
            let timeout = self.streams.has_stalled().then_some(STALL_CHECK);
            self.streams.writable().wait(timeout, &mut writable);
            let now = self.shared.clock.now();
            self.streams.resume(&writable, now);
            self.streams.end_stalled(now);
            self.abort_unread();
            writable.clear();
        }
    }

    /// Everything that has come; false if the thread ends.
    fn turn(&mut self, synced: &mut Vec<Sender<()>>) -> bool {
        // A stream is announced before its request is submitted: in this order no record comes before its mail.
        let taken = self.shared.output_queue.take();
        let goes_on = self.take_mail(synced);
        self.take_records(&taken);
        if !synced.is_empty() {
            let before = self.shared.output_queue.take();
            self.take_records(&before);
        }
        self.streams.send(self.shared.clock.now());
        self.abort_unread();
        if !self.streams.for_python().is_empty() {
            self.shared.python_queue.put(self.streams.for_python());
        }
        goes_on
    }

    fn take_mail(&mut self, synced: &mut Vec<Sender<()>>) -> bool {
        let mail = lock(&self.mailbox).as_mut().map(std::mem::take);
        for mail in mail.unwrap_or_default() {
            match mail {
                WriterMail::Announce {
                    stream,
                    max_unsent_bytes,
                } => self.streams.announce(stream, max_unsent_bytes),
                WriterMail::HandOver {
                    stream,
                    socket,
                    write_limit,
                } => self.streams.hand_over(stream, socket, write_limit),
                WriterMail::Release(stream) => self.streams.release(stream),
                WriterMail::Comment(comment) => self.streams.comment(&comment),
                WriterMail::Sync(done) => synced.push(done),
                WriterMail::Quit => return false,
            }
        }
        true
    }

    fn take_records(&mut self, packed: &[u8]) {
        for record in records(packed) {
            self.streams.take(&record);
        }
    }

    fn abort_unread(&mut self) {
        for stream in self.streams.take_unread() {
            self.shared.abort(stream);
        }
    }
}
