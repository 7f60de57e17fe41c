//! The purpose of an operation, in words of the program that calls it.

use std::fmt;

/// A short text that travels with the header of an operation; empty where nobody gave one.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) struct Purpose {
    bytes: [u8; Self::BOUND],
    len: u8,
}

impl Purpose {
    pub(crate) const NONE: Self = Self {
        bytes: [0; Self::BOUND],
        len: 0,
    };

    /// The beginning of `text`, as much of it as fits.
    pub(crate) fn new(text: &str) -> Self {
        let mut end = text.len().min(Self::BOUND);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = [0; Self::BOUND];
        bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
        Self {
            bytes,
            // At most BOUND, which fits.
            len: end as u8,
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        // Cut at a character boundary by the only constructor.
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or("?")
    }

    /// The text as words, zeros behind it; nothing where there is no purpose.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        let used = usize::from(self.len).next_multiple_of(size_of::<u64>());
        let words = self.bytes[..used].as_chunks().0.iter();
        words.map(|word| u64::from_le_bytes(*word))
    }

    /// The most bytes of a purpose.
    pub(crate) const BOUND: usize = 40;
}

impl fmt::Debug for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_keep_their_beginning() {
        let long = Purpose::new(&format!("{}ä", "x".repeat(Purpose::BOUND - 1)));
        assert_eq!(long.as_str(), "x".repeat(Purpose::BOUND - 1));
        let fits = "x".repeat(Purpose::BOUND);
        assert_eq!(Purpose::new(&fits).as_str(), fits);
    }
}
