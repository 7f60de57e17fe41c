//! A checksum against accidents, for paths on which a digest, or even a CRC-32, would be a fifth of the time.

/// The checksum of nothing. It is not zero, so that zeros are not their own checksum.
pub(crate) const SEED: u64 = 0x6163_6365_6c5f_7368;

/// The checksum of what `sum` is that of, and one more word.
pub(crate) fn mix(sum: u64, word: u64) -> u64 {
    let mixed = (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 29
}
