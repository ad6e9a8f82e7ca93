//! What rank 0 sampled in a step.

use serde::{Deserialize, Serialize};

use crate::extensible::Extensible;
use crate::kind::Kind;
use crate::malformed::Malformed;
use crate::msgpack::{pack, unpack};
use crate::word_arrays;

/// Stands for the token of a row whose logits were NaN or infinite.
pub const FAILED_ROW: u32 = u32::MAX;

/// The tokens of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepResult {
    /// Which step.
    pub step: u64,
    /// From taking the plan to having the tokens.
    pub elapsed_us: u64,
    /// Tokens accepted of each row that samples, in row order; 0 of one that was left out for lack of its mask.
    pub num_accepted: Vec<u32>,
    /// Their ids, one row after the other; [`FAILED_ROW`] of a row that failed.
    pub token_ids: Vec<u32>,
    /// Records of the accepted tokens whose request asked for some; read them by [`LogprobRecords`].
    pub logprobs: Vec<u32>,
    /// Records of the prompt tokens that this step's prefill rows predicted.
    pub prompt_logprobs: Vec<u32>,
    /// Elements (f32) of a vector for each prefill row that ended a pooled prompt, in row order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pooled: Vec<u32>,
}

/// Frame 1 of a step's result.
#[derive(Serialize, Deserialize)]
pub struct ResultHeader {
    step: u64,
    elapsed_us: u64,
}

impl ResultHeader {
    pub fn of(result: &StepResult) -> Self {
        Self {
            step: result.step,
            elapsed_us: result.elapsed_us,
        }
    }
}

/// The frames of a result after its kind.
pub fn encode_result(result: &StepResult) -> Vec<Vec<u8>> {
    let mut header = Vec::new();
    pack(&mut header, &ResultHeader::of(result));
    let arrays = [
        &result.num_accepted,
        &result.token_ids,
        &result.logprobs,
        &result.prompt_logprobs,
    ];
    let pooled = (!result.pooled.is_empty()).then_some(&result.pooled);
    std::iter::once(header)
        .chain(
            arrays
                .into_iter()
                .chain(pooled)
                .map(|array| word_arrays::frame(array)),
        )
        .collect()
}

/// The result in frame 1 and the arrays after it, which are whole words.
pub fn decode_result(header: &[u8], arrays: &[&[u8]]) -> Result<StepResult, Malformed> {
    let Extensible(ResultHeader { step, elapsed_us }) = unpack(Kind::StepResult, header)?;
    check_pooled(arrays)?;
    let array = |index: usize| word_arrays::read(arrays.get(index).copied().unwrap_or_default());
    let [num_accepted, token_ids, logprobs, prompt_logprobs, pooled] = std::array::from_fn(array);
    check_accepted(&num_accepted, token_ids.len())?;
    Ok(StepResult {
        step,
        elapsed_us,
        num_accepted,
        token_ids,
        logprobs,
        prompt_logprobs,
        pooled,
    })
}

/// A frame without vectors is left out, so that a result has one encoding.
fn check_pooled(arrays: &[&[u8]]) -> Result<(), Malformed> {
    match arrays {
        [_, _, _, _, []] => Err(Malformed::EmptyLastFrame {
            kind: Kind::StepResult,
            frame: 6,
        }),
        _ => Ok(()),
    }
}

fn check_accepted(num_accepted: &[u32], num_token_ids: usize) -> Result<(), Malformed> {
    let expected = num_accepted
        .iter()
        .map(|&accepted| u64::from(accepted))
        .sum();
    if num_token_ids as u64 != expected {
        return Err(Malformed::WordCount {
            kind: Kind::StepResult,
            frame: 3,
            given: num_token_ids,
            expected,
        });
    }
    Ok(())
}

/// One token's log-probability and the best of its position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogprobRecord<'a> {
    /// The token's own, in nats.
    pub logprob: f32,
    /// Its place among all tokens; the most probable one has 1.
    pub rank: u32,
    /// The K most probable tokens, best first.
    pub top_ids: &'a [u32],
    top_bits: &'a [u32],
}

impl LogprobRecord<'_> {
    /// Log-probabilities of `top_ids`, in nats.
    pub fn top_logprobs(&self) -> impl Iterator<Item = f32> {
        self.top_bits.iter().map(|&bits| f32::from_bits(bits))
    }
}

/// Takes records from a result's frame, front to back. A request's K gives their length.
#[derive(Clone, Copy, Debug)]
pub struct LogprobRecords<'a> {
    words: &'a [u32],
}

impl<'a> LogprobRecords<'a> {
    /// The records of `StepResult::logprobs` or `StepResult::prompt_logprobs`.
    pub fn new(words: &'a [u32]) -> Self {
        Self { words }
    }

    /// The next record, of `num_top` best tokens; None if the frame has less.
    pub fn take(&mut self, num_top: u32) -> Option<LogprobRecord<'a>> {
        let num_top = num_top as usize;
        let (record, rest) = self.words.split_at_checked(2 + 2 * num_top)?;
        self.words = rest;
        let (top_ids, top_bits) = record[2..].split_at(num_top);
        Some(LogprobRecord {
            logprob: f32::from_bits(record[0]),
            rank: record[1],
            top_ids,
            top_bits,
        })
    }

    /// All records are taken.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }
}
