//! The items of a data set, and the batches that the batcher makes of them, on a worker or deferred to the caller.

use std::sync::{Arc, OnceLock};

use accelerator_plan::sample_rng_seed;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::{Device, Distribution, Tensor};

use super::digest::{self, Digest, ItemDigest};
use crate::core::error::{Error, Kind, Result};
use crate::core::generator::drawing;
use crate::core::panic_text::caught;

/// The place of the sample that a function of [`LoaderBuilder::map_samples`] gets.
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

    /// Returns the place of the sample in the data set or stream; in a stream that is read in parts, its place in
    /// the part times the number of parts, plus the part's own number.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// The seed of what is drawn for this sample in this epoch: the same on whichever rank and
    /// worker it is loaded.
    pub fn rng_seed(&self, seed: u64) -> u64 {
        sample_rng_seed(seed, self.epoch, self.index)
    }
}

/// Samples by index, made into batches. It hides the type of a single item.
pub(super) trait ItemSource<O>: Send + Sync {
    fn len(&self) -> u64;

    fn load(&self, epoch: u64, indices: &[u64], device: &Device) -> Result<DeferredBatch<O>>;

    /// Returns the digests of some items, if items are compared between ranks.
    fn digests(&self) -> Option<Result<Vec<ItemDigest>>>;
}

/// The functions that make a batch of items.
pub(super) struct Batching<I, O> {
    pub(super) batcher: Arc<dyn Batcher<I, O>>,
    /// The thread that calls the batcher: found out with the first batch.
    pub(super) maker: Arc<OnceLock<BatcherThread>>,
    pub(super) map: Option<Arc<Map<I>>>,
}

/// A function that is applied to each item before.
pub(super) type Map<I> = dyn Fn(I, SamplePlace) -> I + Send + Sync;

impl<I: Send + 'static, O: 'static> Batching<I, O> {
    /// Sets the thread that makes batches, for that many workers.
    pub(super) fn with_workers(self, workers: usize) -> Self {
        if workers == 0 {
            self.maker.get_or_init(|| BatcherThread::Caller);
        }
        self
    }

    /// A batch of items with those indices.
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
    /// The digest, if items are compared between ranks.
    pub(super) digest: Option<Digest<I>>,
}

impl<I: Send + 'static, O: 'static> ItemSource<O> for Batched<I, O> {
    fn len(&self) -> u64 {
        self.dataset.len() as u64
    }

    fn load(&self, epoch: u64, indices: &[u64], device: &Device) -> Result<DeferredBatch<O>> {
        let wanted = indices.iter().map(|&index| index as usize).collect();
        let items = self.dataset.get_many(wanted).map_err(|error| {
            Error::new(
                Kind::Data,
                format!("the data set failed to deliver the samples {indices:?}"),
            )
            .with_source(error)
        })?;
        Ok(self.batching.batch(epoch, items, indices, device))
    }

    fn digests(&self) -> Option<Result<Vec<ItemDigest>>> {
        let digest = self.digest?;
        Some(digest::read_some(&*self.dataset, digest))
    }
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

    fn digests(&self) -> Option<Result<Vec<ItemDigest>>> {
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
                         by workers (said once a loader)"
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
