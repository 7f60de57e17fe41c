//! Digests of layouts, which ranks compare. Ranks that share memory rely on them for who writes
//! what, so they must be collision resistant.

/// The numbers of a layout, for their BLAKE3 digest.
#[derive(Debug, Default)]
pub(crate) struct DigestBuilder(Vec<u8>);

impl DigestBuilder {
    pub(crate) fn add(&mut self, number: usize) {
        self.0.extend_from_slice(&(number as u64).to_le_bytes());
    }

    pub(crate) fn finish(&self) -> Digest {
        blake3::hash(&self.0).into()
    }
}

pub(crate) type Digest = [u8; blake3::OUT_LEN];
