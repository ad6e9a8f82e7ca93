//! What a request changes about its logits: from the body's fields to what the worker gets.

use std::collections::BTreeMap;
use std::sync::Arc;

use plait_core::TokenId;
use plait_proto::{Adjustment, TokenBias};
use plait_text::{ModelText, Penalties};

use crate::error::RequestError;
use crate::limits::{self, MAX_BAD_WORD_TOKENS, Numbers};
use crate::prompt_encoder::check_ids;
use crate::request::{GenerateRequest, LogitFields};

/// The changes of one request that all its choices share, prompts apart; `None` if there are none.
pub(crate) fn adjustment(
    model: &ModelText,
    request: &GenerateRequest,
    numbers: &Numbers,
    stop_ids: &[TokenId],
) -> Result<Option<Adjustment>, RequestError> {
    let penalties = request.sampling.penalties(model.generation_defaults());
    let fields = &request.logits;
    limits::check_logits(fields)?;
    let asked = Adjustment {
        presence_penalty: penalties.presence,
        frequency_penalty: penalties.frequency,
        repetition_penalty: penalties.repetition,
        min_tokens: numbers.min_tokens,
        bias: bias(model, &fields.logit_bias)?,
        allowed_ids: allowed_ids(model, fields)?,
        end_ids: match numbers.min_tokens {
            0 => Vec::new(),
            _ => end_ids(model, stop_ids),
        },
        bad_words: bad_words(model, fields)?,
        ..Adjustment::default()
    };
    check_some_are_open(&asked)?;
    let has_lists = !asked.bias.is_empty()
        || !asked.allowed_ids.is_empty()
        || !asked.end_ids.is_empty()
        || !asked.bad_words.is_empty();
    Ok((penalties != Penalties::NONE || has_lists).then_some(asked))
}

/// What must wait for the least tokens: the model's own ends, also where they end nothing, and the request's.
fn end_ids(model: &ModelText, stop_ids: &[TokenId]) -> Vec<TokenId> {
    let own = model.eos_token_ids();
    let others = stop_ids.iter().filter(|id| !own.contains(id));
    own.iter().chain(others).copied().collect()
}

/// The changes for one prompt. Its tokens count for a repetition penalty only.
pub(crate) fn of_prompt(asked: &Adjustment, prompt: &[TokenId]) -> Arc<Adjustment> {
    let mut of_prompt = asked.clone();
    #[expect(clippy::float_cmp, reason = "exactly 1 changes nothing")]
    let is_counted = asked.repetition_penalty != 1.0;
    if is_counted {
        of_prompt.prompt_ids = prompt.to_vec();
        of_prompt.prompt_ids.sort_unstable();
        of_prompt.prompt_ids.dedup();
    }
    Arc::new(of_prompt)
}

fn bias(model: &ModelText, asked: &BTreeMap<String, f64>) -> Result<Vec<TokenBias>, RequestError> {
    let biases = asked.iter().map(|(name, bias)| {
        let id: i64 = name
            .parse()
            .map_err(|_| limits::not_a_token_id("logit_bias", name))?;
        let ids = check_ids(model, "logit_bias", &[id])?;
        Ok(TokenBias {
            id: ids[0],
            bias: *bias as f32,
        })
    });
    let mut biases = biases.collect::<Result<Vec<_>, _>>()?;
    // "7" and "007" are one token: its last bias counts.
    biases.reverse();
    biases.sort_by_key(|token| token.id);
    biases.dedup_by_key(|token| token.id);
    Ok(biases)
}

fn allowed_ids(model: &ModelText, fields: &LogitFields) -> Result<Vec<TokenId>, RequestError> {
    let Some(asked) = &fields.allowed_token_ids else {
        return Ok(Vec::new());
    };
    let mut ids = check_ids(model, "allowed_token_ids", asked)?.to_vec();
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// Each word's tokens, where a text begins with it and after a space.
fn bad_words(model: &ModelText, fields: &LogitFields) -> Result<Vec<Vec<TokenId>>, RequestError> {
    let mut all: Vec<Vec<TokenId>> = Vec::new();
    for (index, word) in fields.bad_words.iter().enumerate() {
        let param = format!("bad_words[{index}]");
        let word = word.trim_start();
        let plain = tokens(model, &param, word)?;
        // Another tokenisation of the same length is the word with its space; a longer one has the space apart,
        // before the plain word's own tokens.
        let spaced = model.encode(&format!(" {word}"), false, plain.len());
        if let Ok(spaced) = spaced
            && spaced.len() == plain.len()
            && spaced[0] != plain[0]
        {
            all.push(check_ids(model, &param, &spaced)?.to_vec());
        }
        all.push(plain);
    }
    Ok(all)
}

fn tokens(model: &ModelText, param: &str, word: &str) -> Result<Vec<TokenId>, RequestError> {
    let tokens = model.encode(word, false, MAX_BAD_WORD_TOKENS).ok();
    let tokens = tokens.filter(|tokens| (1..=MAX_BAD_WORD_TOKENS).contains(&tokens.len()));
    let tokens = tokens.ok_or_else(|| limits::bad_word_error(param, word))?;
    Ok(check_ids(model, param, &tokens)?.to_vec())
}

/// Of a request that allows some tokens only, one at least is not a bad word.
fn check_some_are_open(asked: &Adjustment) -> Result<(), RequestError> {
    let is_bad = |id: &TokenId| asked.bad_words.iter().any(|word| word[..] == [*id]);
    if asked.allowed_ids.is_empty() || !asked.allowed_ids.iter().all(is_bad) {
        return Ok(());
    }
    let message = "`allowed_token_ids` has no token that `bad_words` allows; allow another, or leave one of them out";
    Err(RequestError::invalid("allowed_token_ids", message))
}
