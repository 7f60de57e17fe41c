/// The first eight bytes of a hash: enough to tell two values apart that nobody made alike on purpose.
pub(crate) fn short(hash: &blake3::Hash) -> u64 {
    let start = hash.as_bytes().iter().take(8);
    start.fold(0, |number, &byte| number << 8 | u64::from(byte))
}
