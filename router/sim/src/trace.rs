//! Arrivals: recorded traces and synthetic ones.

mod azure;
mod distinct;
mod mooncake;
mod poisson;
mod scenario;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;

use plait_core::{Micros, TokenId};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::error::SimError;
use crate::time_units::micros;
pub use distinct::num_distinct_tokens;
pub use poisson::Poisson;
pub use scenario::{Profile, Scenario};

/// Most requests in one trace.
const MAX_REQUESTS: usize = 10_000_000;
/// Most tokens of a prompt or an answer: the longest context that `plait serve` takes.
const MAX_TOKENS: u32 = 1 << 24;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Time of arrival, from the trace's beginning.
    pub at: Micros,
    /// Tokens of its prompt.
    pub num_prompt: u32,
    /// Tokens of its answer.
    pub num_output: u32,
    /// Whose it is.
    pub tenant: u32,
    /// Smaller goes first.
    pub priority: i32,
    /// What its prompt shares with others.
    pub content: Content,
}

/// The tokens of a prompt. Only their equality counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Shared with no other prompt.
    Unique(TokenId),
    /// One id for each block of [`mooncake::BLOCK_TOKENS`] tokens. Equal ids mean equal tokens.
    Blocks(Box<[TokenId]>),
    /// A prefix that others share, then tokens of its own.
    Prefixed {
        /// Equal ids mean equal prefixes.
        prefix: TokenId,
        /// Tokens of the prefix.
        num_prefix: u32,
        /// Shared with no other prompt.
        own: TokenId,
    },
}

impl Arrival {
    /// The prompt's tokens.
    pub fn prompt(&self) -> Arc<[TokenId]> {
        let num_prompt = self.num_prompt as usize;
        match &self.content {
            Content::Unique(token) => std::iter::repeat_n(*token, num_prompt).collect(),
            Content::Blocks(ids) => ids
                .iter()
                .flat_map(|id| std::iter::repeat_n(*id, mooncake::BLOCK_TOKENS as usize))
                .take(num_prompt)
                .collect::<Vec<TokenId>>()
                .into(),
            Content::Prefixed {
                prefix,
                num_prefix,
                own,
            } => std::iter::repeat_n(*prefix, *num_prefix as usize)
                .chain(std::iter::repeat(*own))
                .take(num_prompt)
                .collect::<Vec<TokenId>>()
                .into(),
        }
    }
}

/// Reads a trace by its file ending: `.csv` in Azure's format, `.jsonl` in Mooncake's.
///
/// The arrivals are in order of time and begin at 0.
pub fn read(path: &Path) -> Result<Vec<Arrival>, SimError> {
    let ending = path.extension().and_then(|ending| ending.to_str());
    let reader = match ending {
        Some("csv") => azure::read,
        Some("jsonl") => mooncake::read,
        _ => {
            let allowed = "a trace ends in .csv (Azure's columns TIMESTAMP, ContextTokens, GeneratedTokens) or .jsonl (Mooncake's keys timestamp, input_length, output_length, hash_ids)";
            return Err(SimError::setting("--trace", &path.display(), allowed));
        }
    };
    let file = File::open(path).map_err(|source| SimError::File {
        path: path.to_owned(),
        source,
    })?;
    let mut arrivals = reader(path, BufReader::new(file))?;
    if arrivals.is_empty() {
        return Err(SimError::content(
            path,
            "it holds no request; at least one is needed",
        ));
    }
    begin_at_zero(&mut arrivals);
    Ok(arrivals)
}

fn begin_at_zero(arrivals: &mut [Arrival]) {
    arrivals.sort_by_key(|arrival| arrival.at);
    let first = arrivals.first().map_or(0, |arrival| arrival.at.0);
    for arrival in arrivals {
        arrival.at.0 -= first;
    }
}

/// Deals the requests to `num` tenants at random.
pub fn deal(arrivals: &mut [Arrival], num: u32, seed: u64) {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    for arrival in arrivals {
        arrival.tenant = below(&mut generator, num);
    }
}

/// Plays the trace `scale` times as fast.
pub fn speed_up(arrivals: &mut [Arrival], scale: f64) {
    for arrival in arrivals {
        arrival.at = micros(arrival.at.0 as f64 / scale);
    }
}

/// A random number below `num`.
fn below(generator: &mut ChaCha8Rng, num: u32) -> u32 {
    let product = u64::from(generator.next_u32()) * u64::from(num);
    u32::try_from(product >> 32).expect("less than num")
}

/// A token count within its limits, or what is wrong with it.
fn num_tokens(name: &str, given: u64) -> Result<u32, String> {
    match u32::try_from(given) {
        Ok(num) if (1..=MAX_TOKENS).contains(&num) => Ok(num),
        _ => Err(format!("{name} is {given}; allowed: 1 to {MAX_TOKENS}")),
    }
}

/// Fails if the trace has too many requests.
fn check_room(path: &Path, line: u64, num_taken: usize) -> Result<(), SimError> {
    if num_taken < MAX_REQUESTS {
        return Ok(());
    }
    let problem = format!("a trace has {MAX_REQUESTS} requests at most; cut it here");
    Err(SimError::line(path, line, problem))
}
