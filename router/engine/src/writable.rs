//! Waits until a socket takes bytes again, or something is signalled.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::event::{Timespec, epoll};

use crate::output_queue::{OutputQueue, StreamId};

const MAX_EVENTS: usize = 64;
/// Marks the queue's eventfd; no stream has this number.
const SIGNALLED: u64 = u64::MAX;

/// The sockets that took nothing, and a queue.
#[derive(Debug)]
pub struct Writable(OwnedFd);

impl Writable {
    /// Wakes for `queue`, and for no socket yet.
    pub fn new(queue: &OutputQueue) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(SIGNALLED);
        epoll::add(&epoll, queue.wakeup(), data, epoll::EventFlags::IN)?;
        Ok(Self(epoll))
    }

    /// Waits for a signal, a socket, or the timeout; the streams whose sockets take bytes again go into `writable`.
    pub fn wait(&self, timeout: Option<Timespec>, writable: &mut Vec<StreamId>) {
        let mut events = [const { MaybeUninit::uninit() }; MAX_EVENTS];
        // An interrupted wait is a short one.
        if let Ok((events, _)) = epoll::wait(&self.0, &mut events, timeout.as_ref()) {
            let streams = events.iter().map(|event| event.data.u64());
            writable.extend(streams.filter(|stream| *stream != SIGNALLED));
        }
    }

    /// Watches a stream's socket; false if the system refuses.
    pub fn watch(&self, stream: StreamId, socket: &OwnedFd) -> bool {
        let data = epoll::EventData::new_u64(stream);
        epoll::add(&self.0, socket, data, epoll::EventFlags::OUT).is_ok()
    }

    /// Watches it no longer. Closing it would not be enough: Python has the same socket open.
    pub fn forget(&self, socket: &OwnedFd) {
        let _unwatched = epoll::delete(&self.0, socket);
    }
}
