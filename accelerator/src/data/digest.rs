//! Whether ranks read the same data set: a digest of some items, of whatever type.

use core::fmt::{self, Write};

use accelerator_plan::mix;
use burn::data::dataset::Dataset;

use super::feed::caught;
use crate::error::{Error, Kind, Result};

/// How many items are compared.
const ITEMS: u64 = 8;

/// How much of the text of an item is compared, in bytes.
const LIMIT: usize = 64 << 10;

/// Whether ranks compare items.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ItemCheck {
    Compared,
    Trusted,
}

/// What to do where an index gives another item each time.
pub(crate) const DRAWN_HINT: &str = "(Burn's `SamplerDataset` draws anew at each read, also `with_seed`: give the \
                                     builder the data set beneath it, and draw with its `weighted` or `sampler`; leave \
                                     augmentation to `map_samples`; where items are meant to differ, say \
                                     `without_item_check`)";

/// Makes a number of an item.
pub(super) type Digest<I> = fn(&I) -> u64;

/// Some items of a data set, read twice.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct ItemDigests {
    first: u64,
    again: u64,
}

impl ItemDigests {
    /// Reads items that lie evenly over the data set.
    pub(super) fn of<I>(dataset: &dyn Dataset<I>, digest: Digest<I>) -> Result<Self> {
        let last = (dataset.len() as u64).saturating_sub(1);
        let mut chosen: Vec<usize> = (0..ITEMS)
            .map(|item| (u128::from(last) * u128::from(item) / u128::from(ITEMS - 1)) as usize)
            .collect();
        chosen.dedup();
        if dataset.is_empty() {
            chosen.clear();
        }
        let read = || -> Result<u64> {
            let items = caught("a data set", || {
                dataset.get_many(chosen.clone()).map_err(|error| {
                    let message = format!("the data set failed to deliver the samples {chosen:?}");
                    Error::with_source(Kind::Data, message, error)
                })
            })?;
            let digests: Vec<u64> = items.iter().map(digest).collect();
            Ok(mix(&digests))
        };
        Ok(Self {
            first: read()?,
            again: read()?,
        })
    }

    /// Whether an index gives another item each time.
    pub(super) fn changes_between_reads(self) -> bool {
        self.first != self.again
    }

    /// What ranks compare: where items differ between reads, that alone.
    pub(super) fn fingerprint(self) -> String {
        match self.changes_between_reads() {
            true => "drawn".to_owned(),
            false => format!("{:016x}", self.first),
        }
    }
}

/// As errors show it.
impl fmt::Display for ItemDigests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.changes_between_reads() {
            true => f.write_str("items that change from one read to the next"),
            false => write!(f, "items of digest {:016x}", self.first),
        }
    }
}

/// Hashes the words of an item's `Debug` text, whatever their order (a `HashMap`'s differs per process), without
/// addresses.
pub(super) fn of_debug<I: fmt::Debug>(item: &I) -> u64 {
    let mut words = Words::default();
    // It fails when it has got enough.
    let _ = write!(words, "{item:?}");
    words.end_word();
    words.sum
}

/// Adds up words.
#[derive(Debug, Default)]
struct Words {
    bytes: usize,
    is_address: bool,
    length: usize,
    sum: u64,
    word: u64,
}

impl Words {
    fn end_word(&mut self) {
        if self.length > 0 && !self.is_address {
            self.sum = self.sum.wrapping_add(mix(&[self.word]));
        }
        (self.is_address, self.length, self.word) = (false, 0, 0);
    }
}

impl Write for Words {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        /// Of FNV-1a.
        const PRIME: u64 = 0x0100_0000_01b3;
        for byte in text.bytes() {
            if !(byte.is_ascii_alphanumeric() || b"+-._".contains(&byte) || byte >= 0x80) {
                self.end_word();
                continue;
            }
            self.is_address |=
                self.length == 1 && byte == b'x' && self.word == u64::from(b'0') * PRIME;
            self.word = (self.word ^ u64::from(byte)).wrapping_mul(PRIME);
            self.length += 1;
        }
        self.bytes += text.len();
        match self.bytes > LIMIT {
            true => Err(fmt::Error),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn items_differ_by_what_they_hold() {
        assert_ne!(of_debug(&[0.0_f32, 1.0]), of_debug(&[-0.0_f32, 1.0]));
        assert_ne!(of_debug(&[0.1_f32]), of_debug(&[0.1_f32.next_up()]));
        assert_ne!(of_debug(&"wörter"), of_debug(&"wörtern"));
        assert_ne!(of_debug(&vec![0_u8; 10]), of_debug(&vec![0_u8; 11]));
        assert_eq!(of_debug(&Some([1, 2])), of_debug(&Some([1, 2])));
    }

    #[test]
    fn neither_the_order_of_a_map_nor_an_address_counts() {
        let map = || -> HashMap<u32, String> { (0..50).map(|x| (x, x.to_string())).collect() };
        assert_eq!(of_debug(&map()), of_debug(&map()));
        let changed = |change: fn(&mut HashMap<u32, String>)| {
            let mut map = map();
            change(&mut map);
            map
        };
        for other in [
            changed(|map| drop(map.insert(7, "8".to_owned()))),
            changed(|map| drop(map.remove(&7))),
            changed(|map| drop(map.insert(50, "50".to_owned()))),
        ] {
            assert_ne!(of_debug(&other), of_debug(&map()), "{other:?}");
        }
        let (one, other) = (1, 1);
        assert_eq!(of_debug(&&raw const one), of_debug(&&raw const other));
    }
}
