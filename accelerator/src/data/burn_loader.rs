use std::sync::Arc;
use std::sync::atomic::Ordering;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;

use super::epoch::Epoch;
use super::order::EpochAssignment;
use super::prepared::{PreparedLoader, Samples};

/// The bare batches, each pass another epoch. Idle batches are left out, since this interface
/// could not say that they do not count.
impl<O: Send + 'static> DataLoader<O> for PreparedLoader<O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let epoch = self.passes.fetch_add(1, Ordering::Relaxed);
        Box::new(BurnIterator {
            done: 0,
            epoch: self.epoch(epoch),
            total: self.num_items(),
        })
    }

    /// Counts the items: 0 for a stream, which does not tell; those of epoch 0 if batches are given.
    fn num_items(&self) -> usize {
        match &self.samples {
            Samples::Opaque(loader) => loader.num_items().div_ceil(self.place.world_size),
            Samples::Planned {
                plan, source, spec, ..
            } => match EpochAssignment::new(spec, plan, source.len(), 0) {
                Ok(assignment) => assignment.share.real(self.place.rank),
                // It is told when batches are asked for.
                Err(_) => 0,
            },
            Samples::Stream { .. } => 0,
        }
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        Arc::new(self.on(device))
    }

    /// A stream has no slices, and is given whole. The numbers of a sampler are those in the slice.
    ///
    /// # Panics
    ///
    /// Never: the part is shared out by the settings that were accepted for the whole.
    #[expect(
        clippy::expect_used,
        reason = "a smaller data set fits wherever the whole did"
    )]
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        Arc::new(
            self.part(start, end)
                .expect("settings that were accepted before"),
        )
    }
}

struct BurnIterator<O> {
    done: usize,
    epoch: Epoch<O>,
    total: usize,
}

impl<O> Iterator for BurnIterator<O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.epoch.next()? {
                Ok(batch) if batch.is_idle() => {}
                Ok(batch) => {
                    self.done += batch.real();
                    return Some(Ok(batch.into_inner()));
                }
                Err(error) => return Some(Err(DatasetError::new(error))),
            }
        }
    }
}

impl<O> DataLoaderIterator<O> for BurnIterator<O> {
    fn progress(&self) -> Progress {
        Progress::new(self.done, self.total, Some("items".to_owned()))
    }
}
