//! What a request changes about the logits that its tokens are sampled from.

use serde::{Deserialize, Serialize};

use crate::malformed::Malformed;

/// Words of a record before its lists.
const HEAD: usize = 11;
const FRAME: usize = 8;

/// Changes of one new slot's logits, in the order penalties, bias, allowed and closed tokens. Only requests that
/// ask for some have one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adjustment {
    /// Which slot; it is among the plan's new slots.
    pub slot: u32,
    /// Subtracted once from each token of the output.
    pub presence_penalty: f32,
    /// Subtracted from a token for each time that the output has it.
    pub frequency_penalty: f32,
    /// Divides positive logits of tokens in prompt or output, and multiplies the others.
    pub repetition_penalty: f32,
    /// Until the output has so many tokens, `end_ids` are closed.
    pub min_tokens: u32,
    /// The prompt's tokens, each once; empty without a repetition penalty.
    pub prompt_ids: Vec<u32>,
    /// The output so far: not empty after a preemption.
    pub output_ids: Vec<u32>,
    /// Added to these tokens.
    pub bias: Vec<TokenBias>,
    /// The only tokens that may be sampled; empty for all.
    pub allowed_ids: Vec<u32>,
    /// Tokens that end the output.
    pub end_ids: Vec<u32>,
    /// Sequences that the output may not have.
    pub bad_words: Vec<Vec<u32>>,
}

/// What is added to one token's logit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenBias {
    /// Which token.
    pub id: u32,
    /// How much.
    pub bias: f32,
}

impl Default for Adjustment {
    /// Changes nothing.
    fn default() -> Self {
        Self {
            slot: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            min_tokens: 0,
            prompt_ids: Vec::new(),
            output_ids: Vec::new(),
            bias: Vec::new(),
            allowed_ids: Vec::new(),
            end_ids: Vec::new(),
            bad_words: Vec::new(),
        }
    }
}

impl Adjustment {
    /// Words that it takes on the wire.
    pub fn num_words(&self) -> usize {
        let of_bad_words: usize = self.bad_words.iter().map(|word| 1 + word.len()).sum();
        HEAD + self.prompt_ids.len()
            + self.output_ids.len()
            + 2 * self.bias.len()
            + self.allowed_ids.len()
            + self.end_ids.len()
            + of_bad_words
    }

    /// The floats with their names.
    fn floats(&self) -> impl Iterator<Item = (&'static str, f32)> {
        let penalties = [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
            ("repetition_penalty", self.repetition_penalty),
        ];
        let biases = self.bias.iter().map(|token| ("bias", token.bias));
        penalties.into_iter().chain(biases)
    }
}

/// Replaces the contents of `words` by the records.
pub fn fill(words: &mut Vec<u32>, adjustments: &[Adjustment]) {
    words.clear();
    for it in adjustments {
        let count = |num: usize| u32::try_from(num).expect("a frame is capped at 16 MiB");
        words.extend([
            it.slot,
            it.presence_penalty.to_bits(),
            it.frequency_penalty.to_bits(),
            it.repetition_penalty.to_bits(),
            it.min_tokens,
            count(it.prompt_ids.len()),
            count(it.output_ids.len()),
            count(it.bias.len()),
            count(it.allowed_ids.len()),
            count(it.end_ids.len()),
            count(it.bad_words.len()),
        ]);
        words.extend(&it.prompt_ids);
        words.extend(&it.output_ids);
        words.extend(it.bias.iter().flat_map(|it| [it.id, it.bias.to_bits()]));
        words.extend(&it.allowed_ids);
        words.extend(&it.end_ids);
        for word in &it.bad_words {
            words.push(count(word.len()));
            words.extend(word);
        }
    }
}

/// The records in a frame.
pub fn read(words: &[u32]) -> Result<Vec<Adjustment>, Malformed> {
    let mut rest = words;
    let mut adjustments = Vec::new();
    while !rest.is_empty() {
        let given = words.len();
        let cut = Malformed::CutAdjustment {
            frame: FRAME,
            given,
        };
        let adjustment = take(&mut rest).ok_or(cut)?;
        let mut floats = adjustment.floats();
        if let Some((field, value)) = floats.find(|(_, value)| !value.is_finite()) {
            return Err(Malformed::NotFinite {
                slot: adjustment.slot,
                field,
                value: value.to_string(),
            });
        }
        drop(floats);
        adjustments.push(adjustment);
    }
    Ok(adjustments)
}

/// The next record; `None` if it is cut, or has a bad word without tokens.
fn take(rest: &mut &[u32]) -> Option<Adjustment> {
    let (head, after) = rest.split_first_chunk::<HEAD>()?;
    *rest = after;
    let [
        slot,
        presence,
        frequency,
        repetition,
        min_tokens,
        lists @ ..,
    ] = *head;
    let [prompt, output, bias, allowed, ends, num_bad_words] = lists;
    Some(Adjustment {
        slot,
        presence_penalty: f32::from_bits(presence),
        frequency_penalty: f32::from_bits(frequency),
        repetition_penalty: f32::from_bits(repetition),
        min_tokens,
        prompt_ids: take_ids(rest, prompt)?,
        output_ids: take_ids(rest, output)?,
        bias: take_bias(rest, bias)?,
        allowed_ids: take_ids(rest, allowed)?,
        end_ids: take_ids(rest, ends)?,
        bad_words: take_bad_words(rest, num_bad_words)?,
    })
}

fn take_ids(rest: &mut &[u32], num: u32) -> Option<Vec<u32>> {
    let (ids, after) = rest.split_at_checked(num as usize)?;
    *rest = after;
    Some(ids.to_vec())
}

fn take_bias(rest: &mut &[u32], num: u32) -> Option<Vec<TokenBias>> {
    let words = take_ids(rest, num.checked_mul(2)?)?;
    let pairs = words.as_chunks::<2>().0.iter();
    let biases = pairs.map(|&[id, bias]| TokenBias {
        id,
        bias: f32::from_bits(bias),
    });
    Some(biases.collect())
}

fn take_bad_words(rest: &mut &[u32], num: u32) -> Option<Vec<Vec<u32>>> {
    let mut bad_words = Vec::new();
    for _ in 0..num {
        let length = take_ids(rest, 1)?[0];
        bad_words.push(take_ids(rest, length).filter(|word| !word.is_empty())?);
    }
    Some(bad_words)
}
