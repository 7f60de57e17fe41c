//! The id that the ranks of a communicator have in common.

use std::fmt;

use crate::error::{Error, Kind, Result};

/// The place where ranks meet, and a random number. One id makes one communicator; it travels from rank 0
/// to the others.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct UniqueId([u8; Self::SIZE]);

impl UniqueId {
    /// The size in bytes.
    pub(crate) const SIZE: usize = 128;

    pub(crate) fn new(bytes: [u8; Self::SIZE]) -> Self {
        Self(bytes)
    }

    /// Reads an id as rank 0 has sent it.
    pub(crate) fn received(bytes: &[u8]) -> Result<Self> {
        match bytes.try_into() {
            Ok(bytes) => Ok(Self(bytes)),
            Err(_) => {
                let message = format!(
                    "rank 0 has sent no id of NCCL's: expected {} bytes, found {}; run one build on all ranks",
                    Self::SIZE,
                    bytes.len()
                );
                Err(Error::new(Kind::Nccl, message))
            }
        }
    }

    pub(crate) fn to_bytes(&self) -> &[u8; Self::SIZE] {
        &self.0
    }
}

impl fmt::Debug for UniqueId {
    /// Leaves out the bytes: whoever knows them may take a rank's place.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("UniqueId(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_do_not_show_what_they_are() {
        let id = UniqueId::received(&[42; UniqueId::SIZE]).unwrap();
        assert!(!format!("{id:?}").contains("42"));
    }

    #[test]
    fn what_is_no_id_is_refused() {
        let error = UniqueId::received(&[42; 3]).unwrap_err();
        assert!(error.to_string().contains("expected 128 bytes, found 3"));
    }
}
