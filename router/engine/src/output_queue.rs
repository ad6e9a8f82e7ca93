//! Packed records on their way to clients, and the eventfd that announces them.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::{io, mem};

use plait_openai::ApiError;

use crate::metrics::Ending;
use crate::stream_times::StreamTimes;
use crate::wakeup::Wakeup;

/// Bytes that may wait for Python. Beyond this the threads that make them wait, and generation with them, so memory
/// does not grow. Python takes everything at once and bounds each slow client's backlog itself.
pub const MAX_FOR_PYTHON: usize = 64 << 20;
/// Bytes that may wait for the writer thread, which waits for nothing but Python.
pub const MAX_FOR_WRITER: usize = 4 << 20;

/// Record flag: the last one of its stream.
pub const LAST: u8 = 1;
/// Record flag: the payload is an error.
pub const ERROR: u8 = 2;
/// Record flag: the client reads too slowly, and the stream is cut off.
pub const TOO_SLOW: u8 = 4;
/// Record flag: the client is gone.
pub const GONE: u8 = 8;
/// Record flag: the payload is two u64, the tokens of the stream's prompts and of its output, and a byte, the
/// [`Ending`] of the choice that ended last; then the stream's times ([`StreamTimes::write`]). It comes once a stream
/// that began to be served has ended, in whatever way: before an error record, around any other last one.
pub const USED: u8 = 16;

/// Bytes of a record before its payload: stream, flags, length.
const HEADER_BYTES: usize = 8 + 1 + 4;

/// Number that Python gives to one HTTP answer.
pub type StreamId = u64;

/// Records on their way to one reader, filled by other threads and emptied whole.
#[derive(Debug)]
pub struct OutputQueue {
    untaken: Mutex<Untaken>,
    max_untaken_bytes: usize,
    taken: Condvar,
    wakeup: Wakeup,
}

#[derive(Debug, Default)]
struct Untaken {
    bytes: Vec<u8>,
    closed: bool,
}

impl OutputQueue {
    /// An empty one, in which so many bytes may wait.
    pub fn new(max_untaken_bytes: usize) -> io::Result<Self> {
        Ok(Self {
            untaken: Mutex::default(),
            max_untaken_bytes,
            taken: Condvar::new(),
            wakeup: Wakeup::new()?,
        })
    }

    /// What the reader watches.
    pub fn wakeup(&self) -> &Wakeup {
        &self.wakeup
    }

    /// All records so far. It clears the eventfd first, so that a later record signals again.
    pub fn take(&self) -> Vec<u8> {
        self.wakeup.clear();
        let bytes = mem::take(&mut self.lock().bytes);
        self.taken.notify_all();
        bytes
    }

    /// Adds records and empties `records`; waits while too many bytes are untaken.
    pub fn put(&self, records: &mut Vec<u8>) {
        let untaken = self.lock();
        let mut untaken = self
            .taken
            .wait_while(untaken, |untaken| {
                untaken.bytes.len() > self.max_untaken_bytes && !untaken.closed
            })
            .unwrap_or_else(PoisonError::into_inner);
        if untaken.bytes.is_empty() {
            mem::swap(&mut untaken.bytes, records);
        } else {
            untaken.bytes.extend_from_slice(records);
        }
        records.clear();
        drop(untaken);
        self.wakeup.signal();
    }

    /// Bytes that wait for the reader now.
    pub fn num_untaken(&self) -> usize {
        self.lock().bytes.len()
    }

    /// Adds a whole answer; waits as [`OutputQueue::put`] does.
    pub fn put_answer(&self, stream: StreamId, body: &[u8]) {
        let mut records = Vec::new();
        append_record(&mut records, stream, |payload| {
            payload.extend_from_slice(body);
            ((), LAST)
        });
        self.put(&mut records);
    }

    /// Adds one error record without ever waiting.
    pub fn put_error(&self, stream: StreamId, error: &ApiError) {
        append_error(&mut self.lock().bytes, stream, error);
        self.wakeup.signal();
    }

    /// No thread waits for the reader from now on.
    pub fn close(&self) {
        self.lock().closed = true;
        self.taken.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Untaken> {
        self.untaken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One record as it is packed.
#[derive(Clone, Copy, Debug)]
pub struct Record<'a> {
    /// Whose.
    pub stream: StreamId,
    /// [`LAST`], [`ERROR`], [`TOO_SLOW`], [`GONE`], [`USED`].
    pub flags: u8,
    /// Bytes for the client, or an error.
    pub payload: &'a [u8],
    /// All of it.
    pub packed: &'a [u8],
}

/// The records of what was taken.
pub fn records(mut packed: &[u8]) -> impl Iterator<Item = Record<'_>> {
    std::iter::from_fn(move || {
        let (header, rest) = packed.split_first_chunk::<HEADER_BYTES>()?;
        let [s0, s1, s2, s3, s4, s5, s6, s7, flags, n0, n1, n2, n3] = *header;
        let length = u32::from_le_bytes([n0, n1, n2, n3]) as usize;
        let (record, others) = packed.split_at(HEADER_BYTES + length);
        packed = others;
        Some(Record {
            stream: StreamId::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
            flags,
            payload: &rest[..length],
            packed: record,
        })
    })
}

/// Appends one record whose payload `fill` writes. A record without payload is left out unless it is the
/// last one of its stream.
pub fn append_record<T>(
    records: &mut Vec<u8>,
    stream: StreamId,
    fill: impl FnOnce(&mut Vec<u8>) -> (T, u8),
) -> T {
    let header = records.len();
    records.extend_from_slice(&stream.to_le_bytes());
    records.extend_from_slice(&[0; 5]);
    let payload = records.len();
    let (value, flags) = fill(records);
    let length = records.len() - payload;
    if length == 0 && flags & LAST == 0 {
        records.truncate(header);
        return value;
    }
    let length = u32::try_from(length).expect("a step's text of one stream is far below 4 GiB");
    records[header + 8] = flags;
    records[header + 9..header + HEADER_BYTES].copy_from_slice(&length.to_le_bytes());
    value
}

/// Appends the record that ends a stream with an error.
pub fn append_error(records: &mut Vec<u8>, stream: StreamId, error: &ApiError) {
    append_record(records, stream, |payload| {
        error.write_record(payload);
        ((), LAST | ERROR)
    });
}

/// Appends the record of how many tokens a stream has taken, and when.
pub fn append_used(
    records: &mut Vec<u8>,
    stream: StreamId,
    [prompt, output]: [u64; 2],
    ending: Ending,
    times: &StreamTimes,
) {
    append_record(records, stream, |payload| {
        payload.extend_from_slice(&prompt.to_le_bytes());
        payload.extend_from_slice(&output.to_le_bytes());
        payload.push(ending as u8);
        times.write(payload);
        ((), USED)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_stream_flags_length_payload() {
        let mut records = Vec::new();
        append_record(&mut records, 7, |payload| {
            payload.extend_from_slice(b"data");
            ((), LAST)
        });
        assert_eq!(
            records,
            [
                7, 0, 0, 0, 0, 0, 0, 0, 1, 4, 0, 0, 0, b'd', b'a', b't', b'a'
            ]
        );
    }

    #[test]
    fn an_empty_record_is_left_out_unless_it_is_the_last() {
        let mut records = Vec::new();
        append_record(&mut records, 7, |_| ((), 0));
        assert!(records.is_empty());
        append_record(&mut records, 7, |_| ((), LAST));
        assert_eq!(records.len(), HEADER_BYTES);
    }

    #[test]
    fn an_error_is_the_last_record_and_carries_status_and_seconds() {
        let mut records = Vec::new();
        append_error(&mut records, 1, &ApiError::overloaded("full"));
        assert_eq!(records[8], LAST | ERROR);
        assert_eq!(
            records[HEADER_BYTES..HEADER_BYTES + 5],
            [0xAD, 1, 1, 0, b'{']
        );
    }

    #[test]
    fn records_are_read_as_they_were_packed() {
        let mut packed = Vec::new();
        append_record(&mut packed, 7, |payload| {
            payload.extend_from_slice(b"data");
            ((), 0)
        });
        append_record(&mut packed, u64::MAX - 1, |_| ((), LAST));
        let read: Vec<_> = records(&packed)
            .map(|record| (record.stream, record.flags, record.payload))
            .collect();
        assert_eq!(read, [(7, 0, &b"data"[..]), (u64::MAX - 1, LAST, b"")]);
        let whole: Vec<u8> = records(&packed)
            .flat_map(|record| record.packed.to_vec())
            .collect();
        assert_eq!(whole, packed);
    }

    #[test]
    fn closing_releases_a_thread_that_waits_for_the_reader() {
        let output_queue = std::sync::Arc::new(OutputQueue::new(1000).unwrap());
        output_queue.put(&mut vec![0; 1001]);
        let waiting = std::thread::spawn({
            let output_queue = output_queue.clone();
            move || output_queue.put(&mut vec![0; 1])
        });
        output_queue.close();
        waiting.join().unwrap();
        assert_eq!(output_queue.take().len(), 1002);
    }
}
