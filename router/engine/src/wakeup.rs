//! An eventfd that wakes another thread, or Python's event loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

/// Readable from the first [`Wakeup::signal`] to the next [`Wakeup::clear`].
#[derive(Debug)]
pub struct Wakeup(OwnedFd);

impl Wakeup {
    /// A new one, not readable.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// For poll; owned by this value.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Makes it readable. A write fails only if it is readable.
    pub fn signal(&self) {
        let _already_readable = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable. Call it before looking for what was signalled.
    pub fn clear(&self) {
        let mut count = [0; 8];
        let _was_unreadable = rustix::io::read(&self.0, &mut count);
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
