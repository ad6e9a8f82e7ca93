//! Seeds of the choices of one prompt.

/// The seed of a choice: of the first one the request's own, of each other one a number of both. Equal seeds would make
/// all choices equal.
pub(crate) fn choice_seed(seed: u64, choice: u32) -> u64 {
    match choice {
        0 => seed,
        // Mixed first, so that the choices of seed 1 are not those of seed 2 moved by one.
        _ => mix(mix(seed).wrapping_add(choice.into())),
    }
}

/// The mixing function of `SplitMix64` (Steele, Lea and Flood, 2014): each number has its own.
fn mix(number: u64) -> u64 {
    let mixed = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_choices_of_near_seeds_draw_alike() {
        let seeds: BTreeSet<u64> = (0..64)
            .flat_map(|seed| (0..128).map(move |choice| choice_seed(seed, choice)))
            .collect();
        assert_eq!(seeds.len(), 64 * 128);
        assert_eq!(choice_seed(17, 0), 17);
    }
}
