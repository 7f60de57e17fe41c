use core::fmt;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use burn::data::dataloader::{DataLoader, DataLoaderIterator};

use super::batch::{Batch, BatchInfo, StepShare};
use super::cursor::EpochPosition;
use super::epoch::{PrefetchedBatches, Worker, WorkerShutdown, failed};
use super::source::DeferredBatch;
use crate::context::Context;
use crate::core::error::{Error, Kind, Result};

/// One of Burn's own data loaders, with your promise that it gives the same batches in the same order on every rank.
/// Each rank reads all of it, and ranks can compare only its length.
///
/// Burn's builder keeps the promise with at most one worker. With `num_workers(2)` and more the
/// order depends on timing, and ranks would use some samples twice and others never. Build with
/// [`LoaderBuilder`](super::LoaderBuilder) where you can: it reads this rank's share only.
///
/// It is read on a thread, so its batcher must not draw from the device's generator, from which the model draws
/// meanwhile.
///
/// ```
/// use accelerator::data::AssumeDeterministic;
/// use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
/// use burn::data::dataset::InMemDataset;
/// use burn::tensor::Device;
///
/// struct Listed;
/// impl Batcher<u32, Vec<u32>> for Listed {
///     fn batch(&self, items: Vec<u32>, _device: &Device) -> Vec<u32> { items }
/// }
///
/// let shares = accelerator::launch(2, |accelerator| {
///     let loader = DataLoaderBuilder::new(Listed)
///         .batch_size(2)
///         .build(InMemDataset::new((0..6).collect()));
///     let loader = accelerator.prepare(AssumeDeterministic(loader))?;
///     loader.epoch(0).map(|batch| batch.map(|batch| batch.real())).collect()
/// })?;
/// // Three batches: rank 1 is idle in the second round.
/// assert_eq!(shares, [[2, 2], [2, 0]]);
/// # let _: &Vec<Vec<usize>> = &shares;
/// # Ok::<(), accelerator::Error>(())
/// ```
pub struct AssumeDeterministic<O>(
    /// The loader.
    pub Arc<dyn DataLoader<O>>,
);

impl<O> fmt::Debug for AssumeDeterministic<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AssumeDeterministic")
            .finish_non_exhaustive()
    }
}

/// The number of batches that are read ahead.
const AHEAD: usize = 2;

/// Shares out a loader that can only be read from its start: every rank reads all of it and
/// keeps each `W`-th batch. What a batch counts is what the loader's progress says it holds.
///
/// If an epoch is continued, the batches used before are read and dropped.
///
/// The last round may not have a batch for every rank. The others are idle then: they get the
/// round's first batch, which counts for nothing.
pub(super) fn feed<O: Send + 'static>(
    loader: Arc<dyn DataLoader<O>>,
    context: &Context,
    start: EpochPosition,
) -> PrefetchedBatches<O> {
    let (rank, world_size) = (context.rank(), context.world_size());
    // Its iterator borrows the loader, so it lives and dies on one thread.
    let worker = Worker::start(AHEAD, WorkerShutdown::Awaited, move |sender| {
        let rounds = AssumedSteps {
            ahead: None,
            items: loader.iter(),
            processed: 0,
            rank,
            world_size,
        };
        if let Err(error) = rounds.run(start, sender) {
            // Nobody listens any more if this fails.
            let _ = sender.send(Err(error));
        }
    });
    match worker {
        Ok(worker) => Box::new(worker),
        Err(error) => failed(error),
    }
}

struct AssumedSteps<'a, O> {
    /// The batch after the round, read to know whether there is one.
    ahead: Option<BatchCounter<O>>,
    items: Box<dyn DataLoaderIterator<O> + 'a>,
    processed: usize,
    rank: usize,
    world_size: usize,
}

struct BatchCounter<O> {
    value: O,
    samples: usize,
}

impl<O> AssumedSteps<'_, O> {
    fn run(
        mut self,
        start: EpochPosition,
        sender: &SyncSender<Result<Batch<DeferredBatch<O>>>>,
    ) -> Result<()> {
        self.ahead = self.read()?;
        for _ in 0..start.step {
            if self.round()?.is_none() {
                return Ok(());
            }
        }
        for step in start.step.. {
            let Some((mine, share)) = self.round()? else {
                return Ok(());
            };
            let ahead = self.ahead.as_ref().map_or(0, |batch| batch.samples);
            let info = BatchInfo {
                consumed: (self.processed - ahead) as u64,
                epoch: start.epoch,
                indices: Vec::new(),
                is_last: self.ahead.is_none(),
                len: mine.samples,
                real: match share {
                    StepShare::Idle => 0,
                    StepShare::Used => mine.samples,
                },
                share,
                step,
                uneven: false,
            };
            let batch = Batch::new(DeferredBatch::Ready(mine.value), info);
            if sender.send(Ok(batch)).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// This rank's batch of the next `W`.
    fn round(&mut self) -> Result<Option<(BatchCounter<O>, StepShare)>> {
        let Some(first) = self.ahead.take() else {
            return Ok(None);
        };
        let share = match self.rank {
            0 => StepShare::Used,
            _ => StepShare::Idle,
        };
        let mut mine = (first, share);
        for rank in 1..self.world_size {
            match self.read()? {
                Some(batch) if rank == self.rank => mine = (batch, StepShare::Used),
                Some(_) => {}
                None => return Ok(Some(mine)),
            }
        }
        self.ahead = self.read()?;
        Ok(Some(mine))
    }

    fn read(&mut self) -> Result<Option<BatchCounter<O>>> {
        let Some(value) = self.items.next() else {
            return Ok(None);
        };
        let value = value.map_err(|error| {
            Error::new(Kind::Data, "the data loader failed to deliver a batch").with_source(error)
        })?;
        let processed = self.items.progress().items_processed;
        let samples = processed.saturating_sub(self.processed);
        self.processed = processed;
        if samples == 0 {
            return Err(Error::new(
                Kind::Data,
                "the data loader's progress does not say how many items a batch holds, so it \
                 cannot be weighed; build it with `accelerator::data::LoaderBuilder`",
            ));
        }
        Ok(Some(BatchCounter { value, samples }))
    }
}
