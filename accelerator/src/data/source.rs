//! The items of a data set, and the batches that the batcher makes of them, on a worker or deferred to the caller; a
//! digest of items, by which ranks compare their data sets.

use core::fmt::{self, Write};
use std::sync::{Arc, OnceLock};

use accelerator_plan::{mix, sample_rng_seed};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::{Device, Distribution, Tensor};

use crate::core::draws::drawing;
use crate::core::error::{Error, Kind, Result, caught};

/// The position of a sample, which a function of [`LoaderBuilder::map_samples`] gets.
///
/// [`LoaderBuilder::map_samples`]: super::LoaderBuilder::map_samples
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SamplePlace {
    epoch: u64,
    index: u64,
}

impl SamplePlace {
    /// The epoch that is read.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the position of the sample in the data set or stream. In a stream that is read in parts, it is the
    /// position in the part times the number of parts, plus the part's number.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// Returns the seed for random draws for this sample in this epoch. It does not depend on the rank and worker
    /// that load the sample.
    pub fn rng_seed(&self, seed: u64) -> u64 {
        sample_rng_seed(seed, self.epoch, self.index)
    }
}

/// Samples by index, made into batches. It hides the type of a single item.
pub(super) trait ItemSource<O>: Send + Sync {
    fn len(&self) -> u64;

    fn load(&self, epoch: u64, indices: &[u64], device: &Device) -> Result<DeferredBatch<O>>;

    /// Returns the digests of some items, if items are compared between ranks.
    fn digests(&self) -> Option<Result<Vec<CheckedItem>>>;
}

/// The functions that make a batch of items.
pub(super) struct Batching<I, O> {
    pub(super) batcher: Arc<dyn Batcher<I, O>>,
    /// The thread that calls the batcher: found out with the first batch.
    pub(super) maker: Arc<OnceLock<BatcherThread>>,
    pub(super) map: Option<Arc<Map<I>>>,
}

/// A function that is applied to each item before it is put into a batch.
pub(super) type Map<I> = dyn Fn(I, SamplePlace) -> I + Send + Sync;

impl<I: Send + 'static, O: 'static> Batching<I, O> {
    /// Sets the thread that makes batches, for that many workers.
    pub(super) fn with_workers(self, workers: usize) -> Self {
        if workers == 0 {
            self.maker.get_or_init(|| BatcherThread::Caller);
        }
        self
    }

    pub(super) fn batch(
        &self,
        epoch: u64,
        items: Vec<I>,
        indices: &[u64],
        device: &Device,
    ) -> DeferredBatch<O> {
        let items = match &self.map {
            None => items,
            Some(map) => items
                .into_iter()
                .zip(indices)
                .map(|(item, &index)| map(item, SamplePlace { epoch, index }))
                .collect(),
        };
        DeferredBatch::collate(items, &self.batcher, &self.maker, device)
    }
}

impl<I, O> Clone for Batching<I, O> {
    fn clone(&self) -> Self {
        Self {
            batcher: self.batcher.clone(),
            maker: self.maker.clone(),
            map: self.map.clone(),
        }
    }
}

/// A Burn data set with its batcher.
pub(super) struct Batched<I, O> {
    pub(super) batching: Batching<I, O>,
    pub(super) dataset: Arc<dyn Dataset<I>>,
    /// `None` if items are not compared between ranks.
    pub(super) digest: Option<Digest<I>>,
}

impl<I: Send + 'static, O: 'static> ItemSource<O> for Batched<I, O> {
    fn len(&self) -> u64 {
        self.dataset.len() as u64
    }

    fn load(&self, epoch: u64, indices: &[u64], device: &Device) -> Result<DeferredBatch<O>> {
        let items = read(&*self.dataset, indices)?;
        Ok(self.batching.batch(epoch, items, indices, device))
    }

    fn digests(&self) -> Option<Result<Vec<CheckedItem>>> {
        let digest = self.digest?;
        Some(read_some(&*self.dataset, digest))
    }
}

/// Reads a whole data set for the lengths of its samples.
pub(super) fn lengths<I>(
    dataset: &dyn Dataset<I>,
    length: &dyn Fn(&I) -> usize,
) -> Result<Vec<u64>> {
    const TOGETHER: u64 = 1024;
    let samples = dataset.len() as u64;
    let mut lengths = Vec::with_capacity(dataset.len());
    for start in (0..samples).step_by(TOGETHER as usize) {
        let indices: Vec<u64> = (start..samples.min(start + TOGETHER)).collect();
        let items = caught("reading the lengths of samples", || {
            let items = read(dataset, &indices)?;
            Ok(items
                .iter()
                .map(|item| length(item) as u64)
                .collect::<Vec<_>>())
        })?;
        lengths.extend(items);
    }
    Ok(lengths)
}

fn read<I>(dataset: &dyn Dataset<I>, indices: &[u64]) -> Result<Vec<I>> {
    let wanted = indices.iter().map(|&index| index as usize).collect();
    dataset.get_many(wanted).map_err(|error| {
        let message = format!("the data set failed to deliver the samples {indices:?}");
        Error::new(Kind::Data, message).with_source(error)
    })
}

/// The part of a source from `start` on.
pub(super) struct SourceSlice<O> {
    pub(super) len: u64,
    pub(super) source: Arc<dyn ItemSource<O>>,
    pub(super) start: u64,
}

impl<O> ItemSource<O> for SourceSlice<O> {
    fn len(&self) -> u64 {
        self.len
    }

    fn load(&self, epoch: u64, indices: &[u64], device: &Device) -> Result<DeferredBatch<O>> {
        let moved: Vec<_> = indices.iter().map(|index| index + self.start).collect();
        self.source.load(epoch, &moved, device)
    }

    fn digests(&self) -> Option<Result<Vec<CheckedItem>>> {
        None
    }
}

/// The result of a batcher, or the function that makes it.
pub(super) enum DeferredBatch<O> {
    Ready(O),
    /// A function to call on the thread that asks for the batch, with the seed of its random numbers, if the
    /// generator is this rank's own.
    Deferred(Box<dyn FnOnce(Option<u64>) -> O + Send>),
}

/// The thread that makes the batches of a batcher.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum BatcherThread {
    /// The one that asks for them, between the draws of two steps: a device has one generator, and dropout
    /// draws from it too.
    Caller,
    /// The one that loads them.
    Worker,
}

impl<O: 'static> DeferredBatch<O> {
    /// A batch of the items. While it is not known who makes it, the caller does, and finds out whether the
    /// batcher draws from the device.
    pub(super) fn collate<I: Send + 'static>(
        items: Vec<I>,
        batcher: &Arc<dyn Batcher<I, O>>,
        maker: &Arc<OnceLock<BatcherThread>>,
        device: &Device,
    ) -> Self {
        if maker.get() == Some(&BatcherThread::Worker) {
            return Self::Ready(batcher.batch(items, device));
        }
        let (batcher, maker, device) = (batcher.clone(), maker.clone(), device.clone());
        Self::Deferred(Box::new(move |seed| {
            let Some(seed) = seed else {
                maker.get_or_init(|| BatcherThread::Worker);
                return batcher.batch(items, &device);
            };
            let _turn = drawing();
            device.seed(seed);
            let batch = batcher.batch(items, &device);
            maker.get_or_init(|| match has_drawn(&device, seed) {
                true => {
                    tracing::info!(
                        "a batcher draws from the device: it is called where batches are asked for, and not \
                         by workers (reported once per loader)"
                    );
                    BatcherThread::Caller
                }
                false => BatcherThread::Worker,
            });
            batch
        }))
    }
}

impl<O> DeferredBatch<O> {
    /// A panic of the batcher is an error, as it is on a worker.
    pub(super) fn resolve(self, seed: Option<u64>) -> Result<O> {
        match self {
            Self::Ready(value) => Ok(value),
            Self::Deferred(make) => caught("making a batch", || Ok(make(seed))),
        }
    }
}

/// Tells if something was drawn since the generator was set from the seed. It tells nobody its state.
fn has_drawn(device: &Device, seed: u64) -> bool {
    let draw = || Tensor::<1>::random([8], Distribution::Default, device).into_data();
    let next = draw();
    device.seed(seed);
    next != draw()
}

const ITEMS: u64 = 8;

/// The number of bytes of an item's text that are compared.
const LIMIT: usize = 64 << 10;

/// The hint for an index that gives another item each time.
pub(crate) const DRAWN_HINT: &str = "(Burn's `SamplerDataset` draws anew at each read, also `with_seed`: give the \
                                     builder the data set beneath it, and draw with its `weighted` or `sampler`; leave \
                                     augmentation to `map_samples`; where items are meant to differ, say \
                                     `without_item_check`)";

pub(super) type Digest<I> = fn(&I) -> ItemDigest;

#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct ItemDigest {
    /// The sum of its words.
    sum: u64,
    /// The beginning of its `Debug` text.
    start: String,
}

/// An item of a data set, read twice.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct CheckedItem {
    index: u64,
    first: ItemDigest,
    again: u64,
}

/// Reads items that lie evenly over the data set.
fn read_some<I>(dataset: &dyn Dataset<I>, digest: Digest<I>) -> Result<Vec<CheckedItem>> {
    let last = (dataset.len() as u64).saturating_sub(1);
    let mut chosen: Vec<u64> = (0..ITEMS)
        .map(|item| (u128::from(last) * u128::from(item) / u128::from(ITEMS - 1)) as u64)
        .collect();
    chosen.dedup();
    if dataset.is_empty() {
        chosen.clear();
    }
    let digests = || -> Result<Vec<ItemDigest>> {
        caught("a data set", || {
            let items = read(dataset, &chosen)?;
            Ok(items.iter().map(digest).collect())
        })
    };
    let both = digests()?.into_iter().zip(digests()?);
    let items = chosen.into_iter().zip(both);
    let items = items.map(|(index, (first, again))| CheckedItem {
        index,
        first,
        again: again.sum,
    });
    Ok(items.collect())
}

impl CheckedItem {
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
impl fmt::Display for CheckedItem {
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
pub(super) fn of_debug<I: fmt::Debug>(item: &I) -> ItemDigest {
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
    ItemDigest {
        // What of a map lies before the end depends on its order.
        sum: if is_cut && has_map { 0 } else { sum },
        start,
    }
}

/// The number of characters of an item's text that errors show.
const SHOWN: usize = 120;

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
