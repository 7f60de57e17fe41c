//! Shuffled orders, computed index by index, and the mixing of numbers into seeds.

/// A keyed permutation of `0..len`: the shuffled order of one epoch, in constant memory.
///
/// [`index`](Self::index) answers for any position, so there is no list of indices in memory,
/// every rank computes the same order without communication, and resuming costs nothing.
///
/// The construction is a Feistel network of ten rounds over the bits of the position, split in two
/// halves that take turns, as in FF1 (NIST SP 800-38G), with SplitMix64's finalizer as its round
/// function (Luby and Rackoff, 1988, show why few rounds suffice). The network permutes the next
/// power of two; results outside `0..len` are fed through it again until they fall inside ("cycle
/// walking": Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), fewer than two
/// passes on average. Up to 64 samples, where so few rounds would prefer some orders, the order is
/// a table of 64 bytes instead, drawn by Fisher and Yates' shuffle. It shuffles training data well;
/// it keeps no secrets.
///
/// ```
/// use accelerator_plan::Permutation;
///
/// let order = Permutation::new(5, 42, 0);
/// let mut seen: Vec<u64> = (0..5).map(|position| order.index(position)).collect();
/// seen.sort();
/// assert_eq!(seen, [0, 1, 2, 3, 4]);
///
/// // Any position of a huge data set, at once.
/// assert!(Permutation::new(1_000_000_000_000, 42, 3).index(999_999_999_999) < 1_000_000_000_000);
/// ```
#[derive(Clone, Debug)]
pub struct Permutation {
    len: u64,
    method: Method,
}

impl Permutation {
    /// The order of `len` samples in this epoch of a run with this seed.
    ///
    /// Seed and epoch are mixed, not added: epoch 1 of seed 7 is not epoch 0 of seed 8.
    #[must_use]
    pub fn new(len: u64, seed: u64, epoch: u64) -> Self {
        let draw = |number: usize| mix(&[PERMUTATION_TAG, seed, epoch, number as u64]);
        let method = match usize::try_from(len) {
            Ok(len) if len <= TABLE => Method::Table(shuffled(len, draw)),
            _ => Method::Network(Network::new(len, draw)),
        };
        Self { len, method }
    }

    /// The sample that comes at `position` of the epoch, in constant time.
    ///
    /// # Panics
    ///
    /// If `position` is not below the number of samples, as indexing a slice does.
    #[must_use]
    pub fn index(&self, position: u64) -> u64 {
        assert!(
            position < self.len,
            "position {position} of a permutation of {}",
            self.len
        );
        match &self.method {
            Method::Table(table) => table[position as usize].into(),
            Method::Network(network) => {
                let mut index = network.permute(position);
                // Ends: repeated, a permutation of the domain comes back to `position` at last.
                while index >= self.len {
                    index = network.permute(index);
                }
                index
            }
        }
    }
}

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
/// It shares no values with the seeds of a [`Permutation`], by a tag of its own.
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

/// The method by which the order is computed.
#[derive(Clone, Debug)]
enum Method {
    Table([u8; TABLE]),
    Network(Network),
}

/// A Feistel network over the smallest power of two that holds the samples.
#[derive(Clone, Debug)]
struct Network {
    low_bits: u32,
    low_mask: u64,
    high_mask: u64,
    keys: [u64; ROUNDS],
}

impl Network {
    /// A network for more than one sample; `key` gives the key of each round.
    fn new(len: u64, key: impl Fn(usize) -> u64) -> Self {
        let bits = u64::BITS - (len - 1).leading_zeros();
        let low_bits = bits.div_ceil(2);
        Self {
            low_bits,
            low_mask: (1 << low_bits) - 1,
            high_mask: (1 << (bits - low_bits)) - 1,
            keys: std::array::from_fn(key),
        }
    }

    fn permute(&self, value: u64) -> u64 {
        let mut low = value & self.low_mask;
        let mut high = value >> self.low_bits;
        for keys in self.keys.chunks_exact(2) {
            low ^= step(keys[0] ^ high) & self.low_mask;
            high ^= step(keys[1] ^ low) & self.high_mask;
        }
        high << self.low_bits | low
    }
}

/// The numbers below `len`, shuffled, at the front of a table; `draw` gives one random number for
/// each.
fn shuffled(len: usize, draw: impl Fn(usize) -> u64) -> [u8; TABLE] {
    // Fits: `TABLE` is below 256.
    let mut table = std::array::from_fn(|position| position as u8);
    for last in (1..len).rev() {
        // The high half of the product is uniform in `0..=last`, but for one part in 2^58.
        let chosen = (u128::from(draw(last)) * (last as u128 + 1)) >> u64::BITS;
        table.swap(last, chosen as usize);
    }
    table
}

/// Advances the state of SplitMix64 by the golden ratio, and finalizes it.
fn step(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The number of rounds, as many as FF1 has.
const ROUNDS: usize = 10;

/// Up to this many samples the order is a table.
const TABLE: usize = 64;

/// "permute" in ASCII.
const PERMUTATION_TAG: u64 = 0x0070_6572_6d75_7465;

/// "sample" in ASCII.
const SAMPLE_TAG: u64 = 0x7361_6d70_6c65;

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;

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
    fn seeds_stay_what_they_are() {
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

    fn order(len: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let permutation = Permutation::new(len, seed, epoch);
        (0..len)
            .map(|position| permutation.index(position))
            .collect()
    }

    /// Five standard deviations above the mean of a chi-square distribution.
    fn chi_square_bound(degrees: u64) -> f64 {
        let degrees = degrees as f64;
        degrees + 5.0 * (2.0 * degrees).sqrt()
    }

    fn chi_square(counts: impl IntoIterator<Item = u64>, expected: u64) -> f64 {
        counts
            .into_iter()
            .map(|count| (count as f64 - expected as f64).powi(2) / expected as f64)
            .sum()
    }

    #[test]
    fn is_a_bijection_at_every_small_length() {
        for len in (0..300).chain([1023, 1024, 1025, 4999]) {
            let mut seen = order(len, len ^ 3, len);
            seen.sort_unstable();
            assert!(seen.iter().copied().eq(0..len), "length {len}");
        }
    }

    #[test]
    fn reaches_the_whole_range_of_lengths() {
        for len in [1 << 40, (1 << 63) - 1, 1 << 63, u64::MAX] {
            let permutation = Permutation::new(len, 1, 2);
            let mut seen: Vec<_> = (0..1000)
                .chain(len - 1000..len)
                .map(|position| permutation.index(position))
                .collect();
            assert!(seen.iter().all(|&index| index < len));
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), 2000);
            let mean = seen
                .iter()
                .map(|&index| index as f64 / len as f64)
                .sum::<f64>()
                / 2000.0;
            assert!((0.46..0.54).contains(&mean), "length {len}: mean {mean}");
        }
    }

    #[test]
    fn every_order_of_few_samples_is_equally_likely() {
        for (len, orders, expected) in [
            (2, 2, 2000),
            (3, 6, 2000),
            (4, 24, 1000),
            (5, 120, 400),
            (6, 720, 50),
        ] {
            for by_epoch in [false, true] {
                let mut counts: HashMap<Vec<u64>, u64> = HashMap::new();
                for draw in 0..orders * expected {
                    let (seed, epoch) = if by_epoch { (9, draw) } else { (draw, 9) };
                    *counts.entry(order(len, seed, epoch)).or_default() += 1;
                }
                assert_eq!(
                    counts.len() as u64,
                    orders,
                    "orders of {len} samples that occur"
                );
                let chi = chi_square(counts.into_values(), expected);
                assert!(
                    chi < chi_square_bound(orders - 1),
                    "{len} samples: chi-square {chi}"
                );
            }
        }
    }

    #[test]
    fn every_sample_is_equally_likely_at_every_position() {
        for len in [7_u64, 37, 64, 65, 100, 128] {
            let side = usize::try_from(len).unwrap();
            let mut counts = vec![0; side * side];
            for epoch in 0..len * 100 {
                for (position, index) in order(len, 5, epoch).into_iter().enumerate() {
                    counts[position * side + usize::try_from(index).unwrap()] += 1;
                }
            }
            let chi = chi_square(counts, 100);
            assert!(
                chi < chi_square_bound((len - 1) * (len - 1)),
                "{len} samples: chi-square {chi}"
            );
        }
    }

    #[test]
    fn epochs_and_seeds_share_no_pattern() {
        // Two independent orders agree at one position on average; equal differences between
        // neighbours would betray a rotation of one order into the other.
        let len = 1000;
        let rivals = [
            (1, 0),
            (0, 1),
            (1, 1),
            (2, 0),
            (0, 2),
            (1 << 32, 0),
            (0, 1 << 63),
        ];
        let first = order(len, 0, 0);
        for (seed, epoch) in rivals {
            let second = order(len, seed, epoch);
            let fixed = first.iter().zip(&second).filter(|(a, b)| a == b).count();
            assert!(fixed < 10, "({seed}, {epoch}) agrees at {fixed} positions");
            let mut shifts: HashMap<u64, usize> = HashMap::new();
            for (a, b) in first.iter().zip(&second) {
                *shifts.entry((a + len - b) % len).or_default() += 1;
            }
            assert!(
                shifts.values().all(|&count| count < 12),
                "({seed}, {epoch}) is a rotation"
            );
        }
        assert_ne!(order(len, 1, 0), order(len, 0, 1));
        assert_ne!(order(len, 7, 3), order(len, 3, 7));
    }

    #[test]
    fn neighbours_are_torn_apart() {
        let order = order(10_000, 11, 0);
        let kept = order
            .windows(2)
            .filter(|pair| pair[0] + 1 == pair[1])
            .count();
        assert!(
            kept < 10,
            "{kept} neighbours stay neighbours; one is expected"
        );
    }

    #[test]
    fn the_order_stays_what_it_is() {
        // A resumed run must find the order of the run it continues, in every version.
        assert_eq!(order(10, 42, 0), [5, 6, 2, 0, 4, 9, 3, 8, 1, 7]);
        assert_eq!(order(100, 42, 0)[..6], [62, 76, 24, 15, 89, 84]);
        assert_eq!(
            Permutation::new(1_000_000_000_000, 42, 7).index(123_456_789),
            963_187_928_596
        );
    }

    #[test]
    #[should_panic(expected = "position 3 of a permutation of 3")]
    fn refuses_a_position_behind_the_end() {
        let _ = Permutation::new(3, 0, 0).index(3);
    }
}
