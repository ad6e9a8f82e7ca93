//! Mooncake's traces: one JSON object per line, with an id for each block of the prompt.
//!
//! A line may name a tenant and a priority, too.

use std::io::BufRead;
use std::path::Path;

use plait_core::{Micros, TokenId};
use serde::Deserialize;

use super::{Arrival, Content, check_room, num_tokens};
use crate::error::SimError;
use crate::files::next_line;

/// Tokens of one `hash_ids` block. The last block may hold fewer.
pub(super) const BLOCK_TOKENS: u32 = 512;
/// Latest timestamp in milliseconds: a year.
const MAX_TIMESTAMP: u64 = 366 * 24 * 3600 * 1000;

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<TokenId>,
    /// Not in Mooncake's own traces.
    #[serde(default)]
    tenant: u32,
    /// Not in Mooncake's own traces.
    #[serde(default)]
    priority: i32,
}

pub(super) fn read(path: &Path, mut file: impl BufRead) -> Result<Vec<Arrival>, SimError> {
    let mut arrivals = Vec::new();
    for number in 1.. {
        let wrong = |problem| SimError::line(path, number, problem);
        let Some(line) = next_line(&mut file).map_err(wrong)? else {
            break;
        };
        check_room(path, number, arrivals.len())?;
        arrivals.push(arrival(&line).map_err(wrong)?);
    }
    Ok(arrivals)
}

fn arrival(line: &[u8]) -> Result<Arrival, String> {
    let line: Line =
        serde_json::from_slice(line.trim_ascii_end()).map_err(|error| error.to_string())?;
    if line.timestamp > MAX_TIMESTAMP {
        return Err(format!(
            "timestamp is {}; allowed: 0 to {MAX_TIMESTAMP} milliseconds",
            line.timestamp
        ));
    }
    let num_prompt = num_tokens("input_length", line.input_length)?;
    let (given, expected) = (line.hash_ids.len(), num_prompt.div_ceil(BLOCK_TOKENS));
    if given != expected as usize {
        return Err(format!(
            "hash_ids holds {given} ids; an input_length of {num_prompt} has {expected} blocks of {BLOCK_TOKENS} tokens"
        ));
    }
    Ok(Arrival {
        at: Micros(line.timestamp * 1000),
        num_prompt,
        num_output: num_tokens("output_length", line.output_length)?,
        tenant: line.tenant,
        priority: line.priority,
        content: Content::Blocks(line.hash_ids.into()),
    })
}
