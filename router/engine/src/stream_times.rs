//! When what happened to a stream, for its record of use: noted by drivers a few times a stream, never a token.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use plait_core::Micros;
use plait_openai::ResponseWriter;

/// Preemptions of a stream that are noted; more are left out.
const MAX_PREEMPTIONS: usize = 16;

/// What a stream's times are of. The numbers are those of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Moment {
    /// Its first row is in a plan.
    FirstRow = 0,
    /// The first token of any choice.
    FirstToken = 1,
    /// A choice gave its pages back.
    Preempted = 2,
    /// Nothing follows.
    End = 3,
}

/// The times of one stream, wherever it runs.
#[derive(Debug)]
pub struct StreamTimes {
    received: Micros,
    noted: Mutex<Vec<(Moment, Micros)>>,
}

impl StreamTimes {
    /// Of a stream that came at this time.
    pub fn new(received: Micros) -> Self {
        Self {
            received,
            noted: Mutex::default(),
        }
    }

    /// Notes a moment; of preemptions the first ones, of all others the first.
    pub fn note(&self, moment: Moment, now: Micros) {
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        let num_before = noted.iter().filter(|(it, _)| *it == moment).count();
        let most = match moment {
            Moment::Preempted => MAX_PREEMPTIONS,
            _ => 1,
        };
        if num_before < most {
            noted.push((moment, now));
        }
    }

    /// Appends each moment: a byte that says which, and the microseconds since the stream came as a u64.
    pub fn write(&self, payload: &mut Vec<u8>) {
        let noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        for (moment, time) in noted.iter() {
            payload.push(*moment as u8);
            payload.extend_from_slice(&time.0.saturating_sub(self.received.0).to_le_bytes());
        }
    }
}

/// An answer that is being written, with the times of its stream.
#[derive(Debug)]
pub struct TimedResponse {
    writer: Box<ResponseWriter>,
    /// Drivers note them.
    pub times: Arc<StreamTimes>,
}

impl TimedResponse {
    /// An answer before its first token.
    pub fn new(writer: ResponseWriter, times: Arc<StreamTimes>) -> Self {
        Self {
            writer: Box::new(writer),
            times,
        }
    }
}

impl Deref for TimedResponse {
    type Target = ResponseWriter;

    fn deref(&self) -> &ResponseWriter {
        &self.writer
    }
}

impl DerefMut for TimedResponse {
    fn deref_mut(&mut self) -> &mut ResponseWriter {
        &mut self.writer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_moments_are_kept_and_the_first_preemptions() {
        let times = StreamTimes::new(Micros(100));
        for now in [150, 160] {
            times.note(Moment::FirstRow, Micros(now));
        }
        for now in 0..20 {
            times.note(Moment::Preempted, Micros(200 + now));
        }
        let mut payload = Vec::new();
        times.write(&mut payload);
        assert_eq!(payload.len(), 9 * (1 + MAX_PREEMPTIONS));
        assert_eq!(payload[..9], [0, 50, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(payload[9..11], [2, 100]);
    }
}
