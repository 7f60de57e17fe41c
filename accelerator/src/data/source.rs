use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::Device;

use crate::error::{Error, Kind, Result};

/// Samples by index, made into batches. It hides the type of a single item.
pub(super) trait Source<O>: Send + Sync {
    fn len(&self) -> u64;

    fn load(&self, indices: &[u64], device: &Device) -> Result<O>;
}

/// A Burn data set with its batcher.
pub(super) struct Batched<I, O> {
    pub(super) batcher: Arc<dyn Batcher<I, O>>,
    pub(super) dataset: Arc<dyn Dataset<I>>,
}

impl<I, O> Source<O> for Batched<I, O> {
    fn len(&self) -> u64 {
        self.dataset.len() as u64
    }

    fn load(&self, indices: &[u64], device: &Device) -> Result<O> {
        let wanted = indices.iter().map(|&index| index as usize).collect();
        let items = self.dataset.get_many(wanted).map_err(|error| {
            Error::with_source(
                Kind::Data,
                format!("the data set failed to deliver the samples {indices:?}"),
                error,
            )
        })?;
        Ok(self.batcher.batch(items, device))
    }
}

/// The part of a source from `start` on.
pub(super) struct Slice<O> {
    pub(super) len: u64,
    pub(super) source: Arc<dyn Source<O>>,
    pub(super) start: u64,
}

impl<O> Source<O> for Slice<O> {
    fn len(&self) -> u64 {
        self.len
    }

    fn load(&self, indices: &[u64], device: &Device) -> Result<O> {
        let moved: Vec<_> = indices.iter().map(|index| index + self.start).collect();
        self.source.load(&moved, device)
    }
}
