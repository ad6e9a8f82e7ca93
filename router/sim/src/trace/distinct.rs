//! How many prompt tokens an unlimited prefix cache would compute.

use rustc_hash::{FxHashMap, FxHashSet};

use super::{Arrival, Content, mooncake};

/// Prompt tokens, those of equal prefixes counted once.
pub fn num_distinct_tokens(arrivals: &[Arrival]) -> u64 {
    let mut seen = Seen::default();
    arrivals.iter().map(|arrival| seen.add(arrival)).sum()
}

/// Prefixes so far.
#[derive(Default)]
struct Seen {
    prefixes: FxHashSet<u32>,
    /// The number of each block, by the number of the block before it and its id.
    blocks: FxHashMap<(usize, u32), usize>,
}

impl Seen {
    /// Tokens of a prompt that no earlier one begins with.
    fn add(&mut self, arrival: &Arrival) -> u64 {
        let num_prompt = u64::from(arrival.num_prompt);
        match &arrival.content {
            Content::Unique(_) => num_prompt,
            Content::Prefixed {
                prefix, num_prefix, ..
            } => {
                let is_known = !self.prefixes.insert(*prefix);
                num_prompt - u64::from(is_known) * u64::from(*num_prefix)
            }
            Content::Blocks(ids) => {
                let num_known = self.add_blocks(ids) * u64::from(mooncake::BLOCK_TOKENS);
                num_prompt.saturating_sub(num_known)
            }
        }
    }

    /// Number of leading blocks that an earlier prompt has.
    fn add_blocks(&mut self, ids: &[u32]) -> u64 {
        let (mut parent, mut num_known) = (0, 0);
        for id in ids {
            let next = self.blocks.len() + 1;
            let number = *self.blocks.entry((parent, *id)).or_insert(next);
            num_known += u64::from(number != next);
            parent = number;
        }
        num_known
    }
}

#[cfg(test)]
mod tests {
    use plait_core::Micros;

    use super::*;

    fn arrival(num_prompt: u32, content: Content) -> Arrival {
        Arrival {
            at: Micros(0),
            num_prompt,
            num_output: 1,
            tenant: 0,
            priority: 0,
            content,
        }
    }

    #[test]
    fn blocks_count_again_after_another_prefix() {
        let blocks = |ids: &[u32]| arrival(1_024, Content::Blocks(ids.into()));
        let arrivals = [blocks(&[0, 1]), blocks(&[0, 2]), blocks(&[3, 1])];
        assert_eq!(num_distinct_tokens(&arrivals), 1_024 + 512 + 1_024);
    }

    #[test]
    fn a_shared_prefix_counts_once() {
        let prefixed = |own| {
            let content = Content::Prefixed {
                prefix: 0,
                num_prefix: 100,
                own,
            };
            arrival(110, content)
        };
        assert_eq!(num_distinct_tokens(&[prefixed(1), prefixed(2)]), 120);
    }
}
