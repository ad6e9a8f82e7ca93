//! The sizes of graphs that every rank of an engine captures, as their Hellos tell.

use std::sync::{Arc, PoisonError, RwLock};

use plait_core::GraphSize;
use plait_proto::{CapturedSize, Hello};

/// Shared by the replicas of an engine. Each adds its own before it votes.
#[derive(Clone, Debug, Default)]
pub struct CapturedGraphs {
    common: Arc<RwLock<Option<Arc<[GraphSize]>>>>,
}

impl CapturedGraphs {
    /// Adds what the ranks of a replica capture. Sizes that another rank lacks are left out, and so are those of more
    /// than `max_tokens`: no step is padded to them.
    pub fn add_replica(&self, hellos: &[Hello], max_tokens: u32) {
        for hello in hellos {
            self.add_rank(sizes_from_wire(&hello.graphs, max_tokens));
        }
    }

    /// Adds those of another engine, as its first vote tells. Returns the sizes that it has not captured.
    pub fn add_engine(&self, sizes: &[CapturedSize], max_tokens: u32) -> Vec<GraphSize> {
        let before = self.sizes();
        self.add_rank(sizes_from_wire(sizes, max_tokens));
        let after = self.sizes();
        let lost = before.iter().filter(|size| !after.contains(size));
        lost.copied().collect()
    }

    /// For this engine's first vote.
    pub fn to_wire(&self) -> Vec<CapturedSize> {
        self.sizes().iter().map(size_to_wire).collect()
    }

    fn add_rank(&self, mut sizes: Vec<GraphSize>) {
        let mut common = self.common.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*common {
            sizes.retain(|size| known.contains(size));
        }
        *common = Some(sizes.into());
    }

    /// Those that every rank so far captures.
    pub fn sizes(&self) -> Arc<[GraphSize]> {
        let common = self.common.read().unwrap_or_else(PoisonError::into_inner);
        common.clone().unwrap_or_default()
    }

    /// Tokens of the largest; 0 without any.
    pub fn largest(&self) -> u32 {
        self.sizes()
            .iter()
            .map(GraphSize::num_tokens)
            .max()
            .unwrap_or(0)
    }
}

impl From<Vec<GraphSize>> for CapturedGraphs {
    fn from(sizes: Vec<GraphSize>) -> Self {
        let graphs = Self::default();
        graphs.add_rank(sizes);
        graphs
    }
}

fn sizes_from_wire(sizes: &[CapturedSize], max_tokens: u32) -> Vec<GraphSize> {
    let sizes = sizes.iter().map(size_from_wire);
    sizes
        .filter(|size| (1..=max_tokens).contains(&size.num_tokens()))
        .collect()
}

fn size_to_wire(size: &GraphSize) -> CapturedSize {
    CapturedSize {
        prompt_tokens: size.prompt_tokens,
        prompt_rows: size.prompt_rows,
        decode_rows: size.decode_rows,
        context_tokens: size.context_tokens,
    }
}

fn size_from_wire(size: &CapturedSize) -> GraphSize {
    GraphSize {
        prompt_tokens: size.prompt_tokens,
        prompt_rows: size.prompt_rows,
        decode_rows: size.decode_rows,
        context_tokens: size.context_tokens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(rows: &[u32]) -> Vec<GraphSize> {
        rows.iter()
            .copied()
            .map(GraphSize::of_decode_rows)
            .collect()
    }

    #[test]
    fn a_size_that_one_rank_lacks_is_no_graph_of_the_group() {
        let graphs = CapturedGraphs::from(decode(&[1, 2, 4, 8]));
        assert_eq!(graphs.largest(), 8);
        graphs.add_rank(decode(&[2, 4, 16]));
        assert_eq!(graphs.sizes()[..], decode(&[2, 4]));
        graphs.add_rank(Vec::new());
        assert_eq!((graphs.sizes().len(), graphs.largest()), (0, 0));
    }
}
