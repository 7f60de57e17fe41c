//! Digests of layouts, which ranks compare. Ranks that share memory rely on them for who writes
//! what, so they must be collision resistant.

/// A BLAKE3 digest of numbers.
#[derive(Debug, Default)]
pub(crate) struct DigestBuilder(blake3::Hasher);

impl DigestBuilder {
    pub(crate) fn add(&mut self, number: usize) {
        self.0.update(&(number as u64).to_le_bytes());
    }

    pub(crate) fn finish(&self) -> Digest {
        self.0.finalize().into()
    }
}

pub(crate) type Digest = [u8; blake3::OUT_LEN];
