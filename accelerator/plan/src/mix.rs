//! The one function that turns several numbers into a seed.

/// Mixes numbers into one well-spread seed; it depends on every part, on their order and on how
/// many there are.
///
/// Each part is folded into the state by exclusive or, followed by one step of SplitMix64 (Steele,
/// Lea and Flood, "Fast splittable pseudorandom number generators", 2014), whose finalizer is
/// variant 13 of Stafford's mixers. The results are part of the format of a run: the same parts
/// give the same seed in every version. It is no cryptographic hash.
#[must_use]
pub fn mix(parts: &[u64]) -> u64 {
    parts
        .iter()
        .fold(step(parts.len() as u64), |state, part| step(state ^ part))
}

/// The seed of the random numbers that belong to one sample in one epoch, such as its
/// augmentation: the same on whichever rank, worker or world size the sample is loaded.
///
/// It shares no values with the seeds of a [`Permutation`](crate::Permutation), by a tag of its own.
///
/// ```
/// use accelerator_plan::sample_rng_seed;
///
/// assert_ne!(sample_rng_seed(42, 0, 7), sample_rng_seed(42, 1, 7));
/// assert_ne!(sample_rng_seed(42, 0, 7), sample_rng_seed(42, 0, 8));
/// ```
#[must_use]
pub fn sample_rng_seed(seed: u64, epoch: u64, index: u64) -> u64 {
    mix(&[SAMPLE_TAG, seed, epoch, index])
}

/// Advances the state of SplitMix64 by the golden ratio, and finalizes it.
pub(crate) fn step(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// "sample" in ASCII.
const SAMPLE_TAG: u64 = 0x7361_6d70_6c65;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn step_is_splitmix64() {
        // The first outputs of the published generator for the seed 1234567.
        let golden = 0x9e37_79b9_7f4a_7c15_u64;
        assert_eq!(step(1_234_567), 6_457_827_717_110_365_317);
        assert_eq!(
            step(golden.wrapping_add(1_234_567)),
            3_203_168_211_198_807_973
        );
    }

    #[test]
    fn stays_what_it_is() {
        assert_eq!(mix(&[3, 5]), 12_948_217_871_304_839_085);
        assert_eq!(sample_rng_seed(42, 1, 7), 17_172_437_388_168_177_484);
    }

    #[test]
    fn seeds_of_neighbours_are_distinct() {
        let mut seen = HashSet::new();
        for seed in 0..20 {
            for epoch in 0..20 {
                for index in 0..50 {
                    assert!(
                        seen.insert(sample_rng_seed(seed, epoch, index)),
                        "{seed} {epoch} {index}"
                    );
                }
            }
        }
    }

    #[test]
    fn one_flipped_bit_flips_half_of_the_result() {
        let mut flipped = 0;
        for bit in 0..64 {
            flipped += (mix(&[3, 5]) ^ mix(&[3 ^ (1 << bit), 5])).count_ones();
            flipped += (mix(&[3, 5]) ^ mix(&[3, 5 ^ (1 << bit)])).count_ones();
        }
        let mean = f64::from(flipped) / 128.0;
        assert!((31.0..33.0).contains(&mean), "{mean} bits of 64");
    }
}
