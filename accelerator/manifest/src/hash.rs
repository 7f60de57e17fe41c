//! BLAKE3 sums.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};

/// The BLAKE3 sum of some bytes (O'Connor, Aumasson, Neves and Wilcox-O'Hearn, 2020), as
/// `b3sum` prints it.
///
/// ```
/// use accelerator_manifest::ContentHash;
///
/// let hash = ContentHash::of(b"");
/// assert!(hash.to_string().starts_with("af1349b9f5f9a1a6"));
/// assert_eq!(hash.to_string().parse::<ContentHash>()?, hash);
/// # Ok::<(), accelerator_manifest::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContentHash([u8; 32]);

impl ContentHash {
    /// The sum of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl From<blake3::Hash> for ContentHash {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ContentHash {
    type Err = Error;

    /// Reads 64 hexadecimal digits.
    fn from_str(text: &str) -> Result<Self> {
        blake3::Hash::from_hex(text)
            .map(Self::from)
            .map_err(|error| {
                let message =
                    format!("expected the 64 hexadecimal digits of a BLAKE3 sum: {error}");
                Error::new(Kind::Corrupt, message)
            })
    }
}

impl TryFrom<String> for ContentHash {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<ContentHash> for String {
    fn from(hash: ContentHash) -> Self {
        hash.to_string()
    }
}
