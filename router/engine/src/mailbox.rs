//! Messages of other threads to the driver. Sending never blocks.

use std::sync::{Arc, Mutex, PoisonError};
use std::{io, mem};

use plait_core::RequestId;
use plait_openai::ApiError;

use crate::output_queue::StreamId;
use crate::wakeup::Wakeup;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mail {
    /// A stream's client is gone.
    Abort(StreamId),
    /// A stop string was found in this request's text.
    StopString(RequestId),
    /// This rank's process ended.
    RankEnded {
        /// Which rank.
        rank: u32,
        /// Why.
        reason: String,
        /// From outside: no Fail of its own is on its way.
        is_silenced: bool,
    },
    /// New ranks of a replica that lost its own will dial the link that was left for it.
    Restart,
    /// No new ranks will come, for this reason.
    GiveUp(String),
    /// A stream ends with this error, though its client still reads.
    EndStream {
        /// Which stream.
        stream: StreamId,
        /// What its client reads.
        error: Box<ApiError>,
    },
    /// No prompt that is admitted from now on finds what was computed before.
    FlushCache,
    /// Plan no step, or plan steps again.
    Pause(bool),
    /// Say which requests there are.
    ListRequests,
    /// Finish the running requests, then shut the ranks down.
    Drain,
    /// End now.
    Close,
}

/// Mail for the driver, and the eventfd that wakes it. Its length is bounded: one abort a stream, one stop
/// string a request, one end a rank, one restart a loss, and what operators ask for.
#[derive(Debug)]
pub struct Mailbox {
    mail: Mutex<Vec<Mail>>,
    wakeup: Arc<Wakeup>,
}

impl Mailbox {
    /// An empty one.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            mail: Mutex::default(),
            wakeup: Arc::new(Wakeup::new()?),
        })
    }

    /// Readable when there is mail or an admission.
    pub fn wakeup(&self) -> &Arc<Wakeup> {
        &self.wakeup
    }

    /// Leaves a piece of mail and wakes the driver.
    pub fn put(&self, mail: Mail) {
        self.mail
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(mail);
        self.wakeup.signal();
    }

    /// All mail, in the order in which it came.
    pub fn take(&self) -> Vec<Mail> {
        mem::take(&mut *self.mail.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
