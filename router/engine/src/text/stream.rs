//! From a request's tokens to the bytes that its client reads.

use plait_core::{FinishReason, TokenId};

use super::logprobs::TokenLogprobs;

/// Writes the answer of one HTTP request: server-sent events, or one body at the end.
///
/// It owns all it needs and lives on the output thread.
#[derive(Debug)]
pub struct StreamText {}

/// What new tokens mean for a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Pushed {
    /// It goes on.
    Continue,
    /// A stop string ended it: the scheduler is to be told ([`plait_core::Event::Stop`]). Tokens that still come
    /// for this choice are ignored.
    StopString,
}

/// Whether a request has more to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum StreamState {
    /// Some choice goes on.
    Open,
    /// All choices ended and the answer is complete.
    Ended,
}

impl StreamText {
    /// Takes one choice's new tokens and appends what the client can read now to `out`, perhaps nothing.
    ///
    /// With `ends_with_stop_id` the last token is one that ends the output; its text is not shown. `logprobs` has one
    /// record for each token where the request asked for them.
    pub fn push(
        &mut self,
        choice: usize,
        tokens: &[TokenId],
        ends_with_stop_id: bool,
        logprobs: Option<&[TokenLogprobs]>,
        out: &mut Vec<u8>,
    ) -> Pushed {
        let _ = (choice, tokens, ends_with_stop_id, logprobs, out);
        todo!()
    }

    /// Takes the records of prompt positions `first_position ..`; repeated ones (after a preemption) are fine.
    pub fn push_prompt_logprobs(
        &mut self,
        choice: usize,
        first_position: u32,
        records: &[TokenLogprobs],
    ) {
        let _ = (choice, first_position, records);
        todo!()
    }

    /// Ends one choice and appends what is left of its text, or the whole answer, to `out`.
    pub fn finish(
        &mut self,
        choice: usize,
        reason: FinishReason,
        out: &mut Vec<u8>,
    ) -> StreamState {
        let _ = (choice, reason, out);
        todo!()
    }
}
