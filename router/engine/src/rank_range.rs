//! The ranks of one replica, among those of all replicas of an engine.

/// Ranks are numbered through the replicas: replica 0 has the first ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankRange {
    first: u32,
    num: u32,
    world: u32,
}

impl RankRange {
    /// The ranks of a replica, of which the engine has so many of one size.
    pub fn of_replica(replica: u32, num_ranks: u32, num_replicas: u32) -> Self {
        Self {
            first: replica * num_ranks,
            num: num_ranks,
            world: num_ranks * num_replicas,
        }
    }

    /// The rank that answers for the replica.
    pub fn first(self) -> u32 {
        self.first
    }

    /// Ranks of the replica.
    pub fn len(self) -> usize {
        self.num as usize
    }

    /// Ranks of all replicas of the engine.
    pub fn world(self) -> u32 {
        self.world
    }

    /// Their numbers.
    pub fn iter(self) -> std::ops::Range<u32> {
        self.first..self.first + self.num
    }

    /// A rank's place among the replica's; None if it is another replica's.
    pub fn place(self, rank: u32) -> Option<usize> {
        self.iter()
            .contains(&rank)
            .then(|| (rank - self.first) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_numbered_through_the_replicas() {
        let second = RankRange::of_replica(1, 2, 3);
        assert_eq!(second.iter().collect::<Vec<_>>(), [2, 3]);
        assert_eq!((second.place(3), second.place(1)), (Some(1), None));
        assert_eq!(second.world(), 6);
    }
}
