//! Loads that put the scheduler's policies under pressure.

use plait_core::{Micros, TokenId};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use serde::Deserialize;

use super::mooncake::BLOCK_TOKENS;
use super::poisson::{check_load, exponential};
use super::{Arrival, Content, below};
use crate::error::SimError;
use crate::time_units::micros;

/// The kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Chats of eight tenants that arrive 64 at a time, each burst from the next tenant.
    Bursts,
    /// Sixteen requests at a time behind one of 32 prefixes of 8,192 tokens, with answers of 32 tokens.
    Agents,
    /// Chats of fifty tenants, half of them from tenant 0.
    Flood,
    /// Chats, and one prompt of 130,000 tokens after a tenth of them.
    LongPrompt,
    /// Chats of priority 0, and as many long answers of priority 10.
    Priorities,
    /// Conversations of eight turns. Each prompt has what was said before and 512 tokens more.
    Conversations,
}

/// Requests of a profile.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Which load.
    pub profile: Profile,
    /// Mean requests per second.
    pub rate: f64,
    /// Number of requests.
    pub num_prompts: u32,
    /// The same seed gives the same arrivals.
    pub seed: u64,
}

/// Tokens of a prompt and an answer in the mean.
type Size = (u32, u32);
const CHAT: Size = (1_024, 128);
const BATCH: Size = (2_048, 512);
const BURST: u32 = 64;
const NUM_BURSTING: u32 = 8;
const FAN_OUT: u32 = 16;
const NUM_PREFIXES: u32 = 32;
const NUM_AGENT_TENANTS: u32 = 4;
const NUM_PREFIX_TOKENS: u32 = 8_192;
const NUM_FLOODED: u32 = 50;
const LONG_PROMPT: u32 = 130_000;
const LOW_PRIORITY: i32 = 10;
const NUM_TURNS: u32 = 8;
const FIRST_BLOCKS: u32 = 4;
/// Mean seconds from a turn to the next one.
const TURN_SECONDS: f64 = 30.0;

impl Scenario {
    /// The arrivals, in the order of their times.
    pub fn arrivals(&self) -> Result<Vec<Arrival>, SimError> {
        check_load(self.rate, self.num_prompts)?;
        let mut writer = Writer {
            generator: ChaCha8Rng::seed_from_u64(self.seed),
            arrivals: Vec::new(),
            now: 0.0,
        };
        let num_together = self.profile.num_together();
        let mut left = self.num_prompts;
        while left > 0 {
            let num = left.min(num_together);
            self.add(&mut writer, num);
            writer.pass(f64::from(num) / self.rate);
            left -= num;
        }
        writer.arrivals.sort_by_key(|arrival| arrival.at);
        Ok(writer.arrivals)
    }

    /// Requests that arrive together.
    fn add(&self, writer: &mut Writer, num: u32) {
        match self.profile {
            Profile::Bursts => {
                let tenant = writer.len() / BURST % NUM_BURSTING;
                (0..num).for_each(|_| writer.add(tenant, 0, CHAT));
            }
            Profile::Agents => {
                let prefix = writer.below(NUM_PREFIXES);
                (0..num).for_each(|_| writer.add_agent(prefix));
            }
            Profile::Flood => {
                let other = 1 + writer.below(NUM_FLOODED - 1);
                let tenant = if writer.below(2) == 0 { 0 } else { other };
                writer.add(tenant, 0, CHAT);
            }
            Profile::LongPrompt if writer.len() == self.num_prompts / 10 => {
                writer.add_exactly(1, 0, (LONG_PROMPT, CHAT.1));
            }
            Profile::LongPrompt => writer.add(0, 0, CHAT),
            Profile::Priorities if writer.below(2) == 0 => writer.add(1, LOW_PRIORITY, BATCH),
            Profile::Priorities => writer.add(0, 0, CHAT),
            Profile::Conversations => writer.add_conversation(num),
        }
    }
}

impl Profile {
    /// Requests that arrive at one time.
    fn num_together(self) -> u32 {
        match self {
            Self::Bursts => BURST,
            Self::Conversations => NUM_TURNS,
            Self::Agents => FAN_OUT,
            Self::Flood | Self::LongPrompt | Self::Priorities => 1,
        }
    }
}

/// Arrivals while they are drawn.
struct Writer {
    generator: ChaCha8Rng,
    arrivals: Vec<Arrival>,
    now: f64,
}

impl Writer {
    fn len(&self) -> u32 {
        u32::try_from(self.arrivals.len()).expect("MAX_REQUESTS fits")
    }

    fn below(&mut self, num: u32) -> u32 {
        below(&mut self.generator, num)
    }

    /// Lets `seconds` pass in the mean.
    fn pass(&mut self, seconds: f64) {
        self.now += exponential(&mut self.generator) * seconds;
    }

    /// From half to one and a half times the mean.
    fn vary(&mut self, mean: u32) -> u32 {
        mean / 2 + self.below(mean + 1)
    }

    fn add(&mut self, tenant: u32, priority: i32, mean: Size) {
        let size = (self.vary(mean.0), self.vary(mean.1));
        self.add_exactly(tenant, priority, size);
    }

    fn add_exactly(&mut self, tenant: u32, priority: i32, (num_prompt, num_output): Size) {
        let arrival = Arrival {
            at: self.time(),
            num_prompt,
            num_output,
            tenant,
            priority,
            content: Content::Unique(self.len()),
        };
        self.arrivals.push(arrival);
    }

    fn add_agent(&mut self, prefix: TokenId) {
        let num_prompt = NUM_PREFIX_TOKENS + self.vary(256);
        let arrival = Arrival {
            at: self.time(),
            num_prompt,
            num_output: self.vary(32),
            tenant: prefix % NUM_AGENT_TENANTS,
            priority: 0,
            content: Content::Prefixed {
                prefix,
                num_prefix: NUM_PREFIX_TOKENS,
                own: NUM_PREFIXES + self.len(),
            },
        };
        self.arrivals.push(arrival);
    }

    /// A conversation that begins now. A turn's prompt has a block more than the one before; 128 of its tokens are
    /// the answer to that one.
    fn add_conversation(&mut self, num_turns: u32) {
        let first_block = (FIRST_BLOCKS + NUM_TURNS) * self.len();
        let mut seconds = self.now;
        for turn in 0..num_turns {
            let num_blocks = FIRST_BLOCKS + turn;
            let num_output = self.vary(CHAT.1);
            let arrival = Arrival {
                at: micros(seconds * 1e6),
                num_prompt: num_blocks * BLOCK_TOKENS,
                num_output,
                tenant: 0,
                priority: 0,
                content: Content::Blocks((first_block..first_block + num_blocks).collect()),
            };
            self.arrivals.push(arrival);
            seconds += exponential(&mut self.generator) * TURN_SECONDS;
        }
    }

    fn time(&self) -> Micros {
        micros(self.now * 1e6)
    }
}
