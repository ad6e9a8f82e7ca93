//! Requests that wait to be tokenised: bounded in number and bytes, taken in turns among tenants.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use plait_core::Micros;

use crate::output_queue::StreamId;
use crate::turns::{Turns, Waits};

/// Request bytes that may wait.
const MAX_BYTES: usize = 256 << 20;
/// Longest Retry-After, in seconds.
const MAX_RETRY_SECONDS: u64 = 600;
/// Weight of the last request in the mean time per byte.
const LAST_WEIGHT: f64 = 0.05;

/// A request as it came.
#[derive(Debug)]
pub struct Job {
    /// The stream of its answer.
    pub stream: StreamId,
    /// Whose turn it takes.
    pub tenant: u64,
    /// What to do.
    pub kind: JobKind,
    /// The request.
    pub json: Vec<u8>,
    /// When it was submitted.
    pub received: Micros,
}

/// What is asked of the text threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Prepare a request for the scheduler: `plait_openai::GenerateRequest`.
    Generate,
    /// Answer a `plait_openai::TextCall`.
    Text,
}

/// What became of a request that was put into a queue.
#[derive(Debug)]
pub struct Put {
    /// Those that are rejected, the put one among them if its tenant has most waiting.
    pub rejected: Vec<Job>,
    /// Requests that wait.
    pub num_waiting: usize,
    /// Seconds until the text threads have worked these off.
    pub retry_after_seconds: u16,
}

/// The way into the text threads.
#[derive(Debug)]
pub struct TextQueue {
    max_jobs: usize,
    num_threads: u32,
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    jobs: Turns<Job>,
    micros_per_byte: f64,
    is_closed: bool,
}

impl Waits for Job {
    fn tenant(&self) -> u64 {
        self.tenant
    }

    fn num_bytes(&self) -> usize {
        self.json.len()
    }
}

impl TextQueue {
    /// A queue of at most `max_jobs` requests for so many threads.
    pub fn new(max_jobs: u32, num_threads: u32) -> Self {
        Self {
            max_jobs: max_jobs.max(1) as usize,
            num_threads: num_threads.max(1),
            waiting: Mutex::default(),
            arrived: Condvar::new(),
        }
    }

    /// Queues a request; never waits. A full queue rejects the last request of the tenant with most.
    pub fn put(&self, job: Job) -> Put {
        let mut waiting = self.lock();
        let tenant = job.tenant;
        waiting.jobs.push(job);
        let mut rejected = Vec::new();
        loop {
            let size = waiting.jobs.size();
            let by_bytes = size.num <= self.max_jobs;
            if by_bytes && size.num_bytes <= MAX_BYTES {
                break;
            }
            rejected.extend(waiting.jobs.drop_last_of_largest(by_bytes, tenant));
        }
        let put = Put {
            rejected,
            num_waiting: waiting.jobs.size().num,
            retry_after_seconds: waiting.retry_after_seconds(self.num_threads),
        };
        drop(waiting);
        self.arrived.notify_one();
        put
    }

    /// The next tenant's first request; waits for one. None once the queue is closed and empty.
    pub fn take(&self) -> Option<Job> {
        let waiting = self.lock();
        let mut waiting = self
            .arrived
            .wait_while(waiting, |it| it.jobs.size().num == 0 && !it.is_closed)
            .unwrap_or_else(PoisonError::into_inner);
        waiting.jobs.take(|_| true)
    }

    /// The client of a request is gone: whether its request waited here. It does no longer.
    pub fn forget(&self, stream: StreamId) -> bool {
        let gone = self.lock().jobs.take_all(|job| job.stream == stream);
        !gone.is_empty()
    }

    /// A thread took so long for a request of so many bytes.
    pub fn measure(&self, num_bytes: usize, elapsed: Duration) {
        let last = elapsed.as_micros() as f64 / num_bytes.max(1) as f64;
        let mean = &mut self.lock().micros_per_byte;
        *mean += LAST_WEIGHT * (last - *mean);
    }

    /// No request comes from now on.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.arrived.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    #[expect(clippy::cast_sign_loss, reason = "bytes and times are not negative")]
    fn retry_after_seconds(&self, num_threads: u32) -> u16 {
        let micros =
            self.jobs.size().num_bytes as f64 * self.micros_per_byte / f64::from(num_threads);
        let seconds = ((micros / 1e6).ceil() as u64).clamp(1, MAX_RETRY_SECONDS);
        u16::try_from(seconds).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(stream: StreamId, tenant: u64, num_bytes: usize) -> Job {
        Job {
            stream,
            tenant,
            kind: JobKind::Generate,
            json: vec![b' '; num_bytes],
            received: Micros(0),
        }
    }

    fn streams(jobs: &[Job]) -> Vec<StreamId> {
        jobs.iter().map(|job| job.stream).collect()
    }

    fn take_all(queue: &TextQueue) -> Vec<StreamId> {
        queue.close();
        std::iter::from_fn(|| queue.take())
            .map(|job| job.stream)
            .collect()
    }

    #[test]
    fn tenants_take_turns_and_each_ones_requests_go_by_arrival() {
        let queue = TextQueue::new(16, 1);
        for (stream, tenant) in [(1, 7), (2, 7), (3, 7), (4, 8), (5, 9), (6, 8)] {
            assert!(queue.put(job(stream, tenant, 1)).rejected.is_empty());
        }
        assert_eq!(take_all(&queue), [1, 4, 5, 2, 6, 3]);
    }

    #[test]
    fn a_full_queue_rejects_the_last_of_the_tenant_with_most() {
        let queue = TextQueue::new(4, 1);
        for stream in 1..=4 {
            assert!(queue.put(job(stream, 7, 1)).rejected.is_empty());
        }
        assert_eq!(streams(&queue.put(job(5, 7, 1)).rejected), [5]);
        assert_eq!(streams(&queue.put(job(6, 8, 1)).rejected), [4]);
        assert_eq!(streams(&queue.put(job(7, 8, 1)).rejected), [3]);
        assert_eq!(
            streams(&queue.put(job(8, 8, 1)).rejected),
            [8],
            "both have two"
        );
        assert_eq!(streams(&queue.put(job(9, 9, 1)).rejected).len(), 1);
        let mut left = take_all(&queue);
        left.sort_unstable();
        assert!(left.contains(&1) && left.contains(&9), "{left:?}");
        assert_eq!(left.len(), 4);
    }

    #[test]
    fn a_queue_full_of_bytes_rejects_by_bytes() {
        let queue = TextQueue::new(100, 1);
        for stream in 0..4 {
            queue.put(job(stream, 7, MAX_BYTES / 4));
        }
        for stream in 4..8 {
            assert_eq!(
                streams(&queue.put(job(stream, 8, 1)).rejected).len(),
                usize::from(stream == 4)
            );
        }
        let mut left = take_all(&queue);
        left.sort_unstable();
        assert_eq!(left, [0, 1, 2, 4, 5, 6, 7]);
    }

    #[test]
    fn retry_after_is_the_time_to_work_off_what_waits() {
        let queue = TextQueue::new(2, 2);
        for _ in 0..200 {
            queue.measure(1000, Duration::from_secs(1));
        }
        queue.put(job(1, 7, 10_000));
        queue.put(job(2, 7, 10_000));
        let put = queue.put(job(3, 7, 10_000));
        assert_eq!((put.num_waiting, put.retry_after_seconds), (2, 10));
    }
}
