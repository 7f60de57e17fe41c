use core::fmt;
use core::iter::FusedIterator;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accelerator_plan::mix;
use burn::tensor::Device;

use super::batch::Batch;
use super::cursor::{Mark, Pass, Spot};
use super::feed::Feed;
use super::prepared::Place;
use crate::error::Result;
use crate::timeline::Timeline;

/// This rank's batches of one epoch; see [`PreparedLoader::epoch`](super::PreparedLoader::epoch).
///
/// An error is the last thing that it yields. Leaving it before its end is fine: its workers stop.
#[must_use = "an epoch is an iterator"]
pub struct Epoch<O> {
    /// After an error too: what follows it would depend on the number of workers.
    ended: bool,
    feed: Feed<O>,
    pass: Arc<Pass>,
    reseed: Reseed,
    remaining: Option<u64>,
    timeline: Timeline,
    waited: Duration,
}

impl<O> Epoch<O> {
    pub(super) fn new(
        feed: Feed<O>,
        pass: Arc<Pass>,
        reseed: Reseed,
        steps: Option<u64>,
        timeline: Timeline,
    ) -> Self {
        Self {
            ended: false,
            feed,
            pass,
            reseed,
            remaining: steps,
            timeline,
            waited: Duration::ZERO,
        }
    }

    /// How long `next` waited for batches so far. If it grows by much, add workers.
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

impl<O> Iterator for Epoch<O> {
    type Item = Result<Batch<O>>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = Instant::now();
        let mut batch = if self.ended { None } else { self.feed.next() };
        if !self.ended && batch.is_none() {
            self.pass.finish();
        }
        self.ended = !matches!(batch, Some(Ok(_)));
        let end = Instant::now();
        self.waited += end - start;
        if !self.ended {
            self.timeline.batch_came(start, end);
        }
        if let Some(remaining) = &mut self.remaining {
            *remaining = remaining.saturating_sub(1);
        }
        if let Some(Ok(batch)) = &mut batch {
            let end = Spot {
                epoch: batch.epoch(),
                consumed: batch.info().consumed,
                finished: false,
                step: batch.step() + 1,
            };
            self.pass.advance(end);
            batch.set_mark(Mark {
                pass: self.pass.clone(),
                end,
            });
            self.reseed.at(batch.step());
        }
        batch
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // An error ends the epoch early, so the lower bound is not the number of steps.
        (
            0,
            self.remaining.and_then(|steps| usize::try_from(steps).ok()),
        )
    }
}

impl<O> FusedIterator for Epoch<O> {}

impl<O> Drop for Epoch<O> {
    fn drop(&mut self) {
        self.pass.close();
    }
}

impl<O> fmt::Debug for Epoch<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoch")
            .field("remaining", &self.remaining)
            .field("waited", &self.waited)
            .finish_non_exhaustive()
    }
}

/// Sets the device's generator anew for each step, so that what a step draws depends on its
/// place alone.
pub(super) struct Reseed {
    device: Device,
    epoch: u64,
    place: Place,
}

impl Reseed {
    pub(super) fn new(device: Device, place: Place, epoch: u64) -> Self {
        Self {
            device,
            epoch,
            place,
        }
    }

    fn at(&self, step: u64) {
        let Place {
            number, rank, seed, ..
        } = self.place;
        self.device
            .seed(mix(&[seed, rank as u64, number, self.epoch, step]));
    }
}
