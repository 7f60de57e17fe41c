//! Compares the data sets of ranks, by a digest of some items, of whatever type.

use core::fmt::{self, Write};

use accelerator_plan::mix;
use burn::data::dataset::Dataset;

use crate::core::error::{Error, Kind, Result};
use crate::core::panic_text::caught;

/// The number of items that are compared.
const ITEMS: u64 = 8;

/// The number of bytes of an item's text that are compared.
const LIMIT: usize = 64 << 10;

/// The treatment of items: compared between ranks, or trusted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ItemCheck {
    Compared,
    Trusted,
}

/// The hint for an index that gives another item each time.
pub(crate) const DRAWN_HINT: &str = "(Burn's `SamplerDataset` draws anew at each read, also `with_seed`: give the \
                                     builder the data set beneath it, and draw with its `weighted` or `sampler`; leave \
                                     augmentation to `map_samples`; where items are meant to differ, say \
                                     `without_item_check`)";

/// Makes a number of an item, and a text.
pub(super) type Digest<I> = fn(&I) -> ItemReading;

/// The digest of an item.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct ItemReading {
    /// The sum of its words.
    sum: u64,
    /// The beginning of its `Debug` text.
    start: String,
}

/// An item of a data set, read twice.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct ItemDigest {
    index: usize,
    first: ItemReading,
    again: u64,
}

/// Reads items that lie evenly over the data set.
pub(super) fn read_some<I>(dataset: &dyn Dataset<I>, digest: Digest<I>) -> Result<Vec<ItemDigest>> {
    let last = (dataset.len() as u64).saturating_sub(1);
    let mut chosen: Vec<usize> = (0..ITEMS)
        .map(|item| (u128::from(last) * u128::from(item) / u128::from(ITEMS - 1)) as usize)
        .collect();
    chosen.dedup();
    if dataset.is_empty() {
        chosen.clear();
    }
    let read = || -> Result<Vec<ItemReading>> {
        caught("a data set", || {
            let items = dataset.get_many(chosen.clone()).map_err(|error| {
                let message = format!("the data set failed to deliver the samples {chosen:?}");
                Error::new(Kind::Data, message).with_source(error)
            })?;
            Ok(items.iter().map(digest).collect())
        })
    };
    let both = read()?.into_iter().zip(read()?);
    let items = chosen.into_iter().zip(both);
    let items = items.map(|(index, (first, again))| ItemDigest {
        index,
        first,
        again: again.sum,
    });
    Ok(items.collect())
}

impl ItemDigest {
    /// Tells if its index gives another item each time.
    pub(super) fn changes_between_reads(&self) -> bool {
        self.first.sum != self.again
    }

    /// Returns the text that ranks compare: for an item that changes between reads, that alone.
    pub(super) fn fingerprint(&self) -> String {
        match self.changes_between_reads() {
            true => "drawn".to_owned(),
            false => format!("{:016x}", self.first.sum),
        }
    }
}

/// Formats the digest for errors.
impl fmt::Display for ItemDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { index, first, .. } = self;
        match self.changes_between_reads() {
            true => f.write_str("items that change from one read to the next")?,
            false => write!(f, "the item {index}")?,
        }
        write!(f, " (`{}`)", first.start)
    }
}

/// Hashes the words of an item's `Debug` text, whatever their order (a `HashMap`'s differs per process), without
/// addresses.
pub(super) fn of_debug<I: fmt::Debug>(item: &I) -> ItemReading {
    let mut words = WordHasher::default();
    // It fails when it has got enough.
    let is_cut = write!(words, "{item:?}").is_err();
    words.end_word();
    let WordHasher {
        has_map,
        mut start,
        sum,
        ..
    } = words;
    if start.chars().count() > SHOWN {
        start = start.chars().take(SHOWN).chain(['…']).collect();
    }
    ItemReading {
        // What of a map lies before the end depends on its order.
        sum: if is_cut && has_map { 0 } else { sum },
        start,
    }
}

/// The number of characters of an item's text that errors show.
const SHOWN: usize = 120;

/// Adds up words.
#[derive(Debug, Default)]
struct WordHasher {
    bytes: usize,
    /// Set if there is a map or a set in it, so that words may come in any order.
    has_map: bool,
    is_address: bool,
    /// The last byte that is not a space.
    last: u8,
    length: usize,
    start: String,
    sum: u64,
    word: u64,
}

impl WordHasher {
    fn end_word(&mut self) {
        if self.length > 0 && !self.is_address {
            self.sum = self.sum.wrapping_add(mix(&[self.word]));
        }
        (self.is_address, self.length, self.word) = (false, 0, 0);
    }

    /// The fields of a struct stand behind its name, and those of a map behind none.
    fn note(&mut self, byte: u8) {
        let is_name = self.last.is_ascii_alphanumeric() || self.last == b'_' || self.last >= 0x80;
        self.has_map |= byte == b'{' && !is_name;
        if byte != b' ' {
            self.last = byte;
        }
    }
}

impl Write for WordHasher {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        /// The prime of FNV-1a.
        const PRIME: u64 = 0x0100_0000_01b3;
        if self.start.len() <= 4 * SHOWN {
            self.start.extend(text.chars().take(SHOWN + 1));
        }
        for byte in text.bytes() {
            if !(byte.is_ascii_alphanumeric() || b"+-._".contains(&byte) || byte >= 0x80) {
                self.end_word();
                self.note(byte);
                continue;
            }
            self.is_address |=
                self.length == 1 && byte == b'x' && self.word == u64::from(b'0') * PRIME;
            self.word = (self.word ^ u64::from(byte)).wrapping_mul(PRIME);
            self.length += 1;
            self.last = byte;
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
    use std::collections::{HashMap, HashSet};

    use super::*;

    fn sum<I: fmt::Debug>(item: &I) -> u64 {
        of_debug(item).sum
    }

    #[test]
    fn items_differ_by_what_they_hold() {
        assert_ne!(sum(&[0.0_f32, 1.0]), sum(&[-0.0_f32, 1.0]));
        assert_ne!(sum(&[0.1_f32]), sum(&[0.1_f32.next_up()]));
        assert_ne!(sum(&"wörter"), sum(&"wörtern"));
        assert_ne!(sum(&vec![0_u8; 10]), sum(&vec![0_u8; 11]));
        assert_eq!(sum(&Some([1, 2])), sum(&Some([1, 2])));
    }

    #[test]
    fn neither_the_order_of_a_map_nor_an_address_counts() {
        let map = || -> HashMap<u32, String> { (0..50).map(|x| (x, x.to_string())).collect() };
        assert_eq!(sum(&map()), sum(&map()));
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
            assert_ne!(sum(&other), sum(&map()), "{other:?}");
        }
        let (one, other) = (1, 1);
        assert_eq!(sum(&&raw const one), sum(&&raw const other));
    }

    #[test]
    fn a_long_item_is_compared_by_its_start_unless_it_holds_a_map() {
        #[derive(Debug)]
        struct Image {
            _pixels: Vec<u8>,
            _words: HashMap<u32, u32>,
        }
        let image = |first: u8, words: u32| {
            let mut pixels = vec![0; 100_000];
            pixels[0] = first;
            sum(&Image {
                _pixels: pixels,
                _words: (0..words).map(|x| (x, x)).collect(),
            })
        };
        assert_eq!(image(1, 0), image(1, 0));
        assert_ne!(image(1, 0), image(2, 0));
        // Each map has an order of its own.
        let words = || -> HashMap<u32, u32> { (0..6000).map(|x| (x, 0)).collect() };
        let text = format!("{:?}", words());
        assert!(text.len() < LIMIT && text != format!("{:?}", words()));
        assert_eq!(sum(&words()), sum(&words()));
        let words =
            || -> HashMap<u32, String> { (0..6000).map(|x| (x, "word".repeat(3))).collect() };
        assert!(format!("{:?}", words()).len() > LIMIT);
        assert_eq!(sum(&words()), sum(&words()));
        let sets = || -> HashSet<u32> { (0..20_000).collect() };
        assert_eq!(sum(&(1, sets())), sum(&(1, sets())));
    }

    #[test]
    fn errors_show_how_an_item_begins() {
        assert_eq!(of_debug(&[1, 2]).start, "[1, 2]");
        let long = of_debug(&vec![7_u8; 100_000]).start;
        assert_eq!(long.chars().count(), SHOWN + 1);
        assert!(long.starts_with("[7, 7, ") && long.ends_with('…'), "{long}");
        let wide = of_debug(&"ö".repeat(1000)).start;
        assert_eq!(wide.chars().count(), SHOWN + 1);
    }
}
