//! Deterministic numbers (splitmix64): an input follows from its target, seed and number alone.

/// A stream of numbers.
pub struct Random(u64);

impl Random {
    /// The numbers of one input.
    pub fn of_input(target: &str, seed: u64, number: u64) -> Self {
        let of_name = target.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut mixed = Self(of_name ^ seed.rotate_left(32));
        Self(
            mixed
                .next()
                .wrapping_add(number.wrapping_mul(0xd1b5_4a32_d192_ed03)),
        )
    }

    /// Any number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("it is below a usize")
    }

    /// Any byte.
    pub fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    /// One of these, of which there is at least one.
    pub fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}
