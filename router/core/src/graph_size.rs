//! Sizes of captured steps, and the one that a group's step takes.

use crate::group::Vote;

/// What fits into a captured step: `plait_worker.graph_sizes.GraphSize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphSize {
    /// Tokens of prefill rows.
    pub prompt_tokens: u32,
    /// Prefill rows; the last is never used.
    pub prompt_rows: u32,
    /// Rows that decode one token.
    pub decode_rows: u32,
    /// Cached tokens of all prefill rows, if their attention is planned before each replay.
    pub context_tokens: Option<u32>,
}

impl GraphSize {
    /// A step without prompts.
    pub fn of_decode_rows(decode_rows: u32) -> Self {
        Self {
            prompt_tokens: 0,
            prompt_rows: 0,
            decode_rows,
            context_tokens: None,
        }
    }

    /// Tokens of the step.
    pub fn num_tokens(&self) -> u32 {
        self.prompt_tokens + self.decode_rows
    }

    /// Whether the rows of a replica fit. A replica without prompts may replay any size: its prefill rows are
    /// unused then.
    pub fn fits(&self, vote: &Vote) -> bool {
        let context = self.context_tokens.unwrap_or(u32::MAX);
        vote.num_decode_rows <= self.decode_rows
            && vote.num_prefill_tokens <= self.prompt_tokens
            && vote.num_prefill_rows < self.prompt_rows.max(1)
            && vote.num_context_tokens <= context
    }
}

/// The fewest tokens for which every replica has a graph that holds its rows; None runs the step without graphs.
///
/// Replicas exchange rows in buffers of as many tokens. Which of its graphs of that many tokens a replica replays is
/// its own choice.
pub(crate) fn common_bucket(votes: &[Vote], graphs: &[GraphSize]) -> Option<u32> {
    if !votes.iter().all(|vote| vote.can_graph) {
        return None;
    }
    let most_tokens = votes.iter().map(|vote| vote.num_tokens).max()?;
    let roomy = graphs.iter().map(GraphSize::num_tokens);
    let roomy = roomy.filter(|num_tokens| *num_tokens >= most_tokens.max(1));
    let all_fit = |num_tokens: &u32| {
        let of_size = || {
            graphs
                .iter()
                .filter(|size| size.num_tokens() == *num_tokens)
        };
        votes
            .iter()
            .all(|vote| of_size().any(|size| size.fits(vote)))
    };
    roomy.filter(all_fit).min()
}
