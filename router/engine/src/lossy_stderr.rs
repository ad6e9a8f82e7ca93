//! Standard error for log lines: a line is dropped rather than block the writer.

use std::io::{self, Write};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Bytes that a writable pipe takes without blocking (PIPE_BUF).
pub const PIECE: usize = 4096;

/// Drops lines if the reader is gone or its pipe is full.
pub struct LossyStderr;

impl Write for LossyStderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let lines = line.split_inclusive(|byte| *byte == b'\n');
        for piece in lines.flat_map(|line| line.chunks(PIECE)) {
            if !is_writable() || io::stderr().write_all(piece).is_err() {
                break;
            }
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn is_writable() -> bool {
    let stderr = rustix::stdio::stderr();
    let mut polled = [PollFd::new(&stderr, PollFlags::OUT)];
    poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready == 1)
        && polled[0].revents().contains(PollFlags::OUT)
}
