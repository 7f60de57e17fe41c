//! This rank's batches of one epoch, with the seed of the device's generator for each.

use core::fmt;
use core::iter::FusedIterator;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use accelerator_collective::TransportKind;
use accelerator_plan::{BatchKind, PlannedBatch, mix};
use burn::tensor::Device;

use super::batch::{Batch, BatchInfo, StepShare, UncountedPadding};
use super::cursor::{ConsumeTicket, EpochPass, EpochPosition};
use super::order::{EpochBatches, Spec};
use super::source::{DeferredBatch, ItemSource};
use crate::context::Context;
use crate::core::draws::{self, drawing};
use crate::core::error::{self, Error, Kind, Result, caught};
use crate::timeline::Timeline;

/// This rank's batches of one epoch; see [`PreparedLoader::epoch`](super::PreparedLoader::epoch).
///
/// An error is the last thing that it yields. Leaving it before its end is fine: its workers stop.
/// Reading begins with the first batch that is asked for.
#[must_use = "an epoch is an iterator"]
pub struct Epoch<O> {
    context: LoaderContext,
    feed: EpochState<O>,
    pass: Arc<EpochPass>,
    remaining: Option<u64>,
}

enum EpochState<O> {
    /// Nothing was asked for yet; so many of its batches are to be left out.
    Closed(OpenEpoch<O>, u64),
    /// The end, also after an error: what follows it would depend on the number of workers.
    Ended,
    /// An error while batches were left out.
    Failed(Error),
    Open(PrefetchedBatches<O>),
}

/// Begins to read behind the first so many batches.
pub(super) type OpenEpoch<O> = Box<dyn FnOnce(u64) -> PrefetchedBatches<O> + Send>;

impl<O> Epoch<O> {
    pub(super) fn new(
        context: LoaderContext,
        open: OpenEpoch<O>,
        pass: Arc<EpochPass>,
        steps: Option<u64>,
    ) -> Self {
        Self {
            context,
            feed: EpochState::Closed(open, 0),
            pass,
            remaining: steps,
        }
    }

    /// Skips the next `batches` batches of this rank; if every rank does the same, that many steps. Nothing
    /// is loaded from a data set; a stream skips them itself; a loader of Burn's own reads and drops them. The other
    /// batches keep their numbers, weights and ends. An epoch that continues after
    /// [`resume`](crate::Accelerator::resume) already skips the batches that were used; a call that skips more than
    /// that logs a warning.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::prelude::*;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
    ///     .batch_size(4)
    ///     .build(InMemDataset::new((0..16).collect()));
    /// let loader = accelerator.prepare(loader)?;
    /// let rest = loader.epoch(0).skip_first_batches(2).collect::<Result<Vec<_>>>()?;
    /// assert_eq!(*rest[0], [8, 9, 10, 11]);
    /// assert_eq!((rest.len(), rest[0].step()), (2, 2));
    /// assert!(rest[1].is_last());
    /// # Ok::<(), Error>(())
    /// ```
    pub fn skip_first_batches(mut self, batches: u64) -> Self {
        if let Some(remaining) = &mut self.remaining {
            *remaining = remaining.saturating_sub(batches);
        }
        match &mut self.feed {
            EpochState::Closed(_, skipped) => {
                *skipped = skipped.saturating_add(batches);
                self.warn_left_out(batches);
            }
            EpochState::Ended | EpochState::Failed(_) => {}
            EpochState::Open(feed) => {
                let mut left_out = feed.take(usize::try_from(batches).unwrap_or(usize::MAX));
                if let Some(error) = left_out.find_map(Result::err) {
                    self.feed = EpochState::Failed(error);
                }
            }
        }
        self
    }

    /// Returns the batches with their numbers in the epoch, which are those of [`Batch::step`]. After
    /// [`resume`](crate::Accelerator::resume) in mid-epoch, the numbers continue; those of [`Iterator::enumerate`],
    /// which this method replaces, would begin at 0 again. Adapters in between count from 0: after `take` or `zip`,
    /// use [`Batch::step`].
    pub fn enumerate(self) -> impl FusedIterator<Item = (usize, Result<Batch<O>>)> {
        let mut next = self.pass.yielded().step as usize;
        self.map(move |batch| {
            let step = batch.as_ref().map_or(next, |batch| batch.step() as usize);
            next = step + 1;
            (step, batch)
        })
    }

    /// An epoch that continues after some step is to leave out so many more.
    fn warn_left_out(&self, batches: u64) {
        let start = self.pass.yielded();
        if start.step > 0 && batches > 0 && self.context.shared.rank() == 0 {
            error::warn(&format!(
                "after `resume` a loader continues after step {} of epoch {}, and `skip_first_batches` leaves out {batches} \
                 more, which are never trained on in this epoch: leave it out where it is to find the place of the \
                 checkpoint, which `resume` does",
                start.step, start.epoch
            ));
        }
    }
}

impl<O> Iterator for Epoch<O> {
    type Item = Result<Batch<O>>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = Instant::now();
        let is_whole = matches!(self.feed, EpochState::Closed(_, 0));
        let mut feed = match core::mem::replace(&mut self.feed, EpochState::Ended) {
            EpochState::Closed(open, skipped) => open(skipped),
            EpochState::Ended => return None,
            EpochState::Failed(error) => return Some(Err(error)),
            EpochState::Open(feed) => feed,
        };
        let mut batch = feed.next().map(|batch| {
            let batch = batch?;
            let seed = self.context.batch_seed(batch.epoch(), batch.step());
            batch.resolve(seed)
        });
        let end = Instant::now();
        match &batch {
            Some(Ok(_)) => {
                self.feed = EpochState::Open(feed);
                self.context.shared.timeline.batch_came(start, end);
            }
            Some(Err(_)) => {}
            None => {
                if is_whole && self.context.shared.rank() == 0 {
                    self.pass.warn_empty();
                }
                self.pass.finish();
            }
        }
        if let Some(remaining) = &mut self.remaining {
            *remaining = remaining.saturating_sub(1);
        }
        if let Some(Ok(batch)) = &mut batch {
            let end = EpochPosition {
                epoch: batch.epoch(),
                consumed: batch.info.consumed,
                digest: self.pass.yielded().digest,
                finished: false,
                step: batch.step() + 1,
            };
            self.pass.advance(end);
            let ticket = ConsumeTicket {
                loader: self.context.number,
                pass: self.pass.clone(),
                end,
            };
            batch.set_ticket(ticket, &self.context.uncounted);
            self.context.seed_step(batch.epoch(), batch.step());
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
            .finish_non_exhaustive()
    }
}

/// A loader's rank, number and device.
#[derive(Clone, Debug)]
pub(super) struct LoaderContext {
    /// The device on which its batches are.
    pub(super) device: Device,
    /// Its number among the loaders of the program.
    pub(super) number: u64,
    pub(super) shared: Arc<Context>,
    pub(super) uncounted: UncountedPadding,
}

impl LoaderContext {
    /// The context of the next loader.
    pub(super) fn new(shared: &Arc<Context>, uncounted: &UncountedPadding) -> Self {
        Self {
            device: shared.device.clone(),
            number: shared.next_loader(),
            shared: shared.clone(),
            uncounted: uncounted.clone(),
        }
    }

    /// Sets the device's generator, so that what a step draws depends on its place alone.
    fn seed_step(&self, epoch: u64, step: u64) {
        let [seed, rank, number] = self.seeds();
        // Another rank of this process may be building a model.
        let _turn = drawing();
        draws::seed(&self.device, mix(&[seed, rank, number, epoch, step]));
    }

    /// The seed of what is drawn for the batch of that step; `None` if other ranks draw from the same
    /// generator, so that it would mean nothing.
    pub(super) fn batch_seed(&self, epoch: u64, step: u64) -> Option<u64> {
        const BATCH: u64 = 1;
        let group = self.shared.group();
        if group.world_size() > 1 && group.transport() == TransportKind::Threads {
            return None;
        }
        let [seed, rank, number] = self.seeds();
        Some(mix(&[seed, rank, number, epoch, step, BATCH]))
    }

    fn seeds(&self) -> [u64; 3] {
        [self.shared.seed, self.shared.rank() as u64, self.number]
    }
}

/// The batches of an epoch, in order.
pub(super) type PrefetchedBatches<O> = Ahead<Batch<DeferredBatch<O>>>;

/// This rank's share of an epoch, by its plan.
pub(super) struct BatchLoader<O> {
    pub(super) context: LoaderContext,
    pub(super) epoch: u64,
    /// The first step of the plan that is wanted.
    pub(super) first: u64,
    pub(super) plan: EpochBatches,
    pub(super) source: Arc<dyn ItemSource<O>>,
    pub(super) spec: Spec,
    /// The number of steps of the epoch done where the plan starts.
    pub(super) steps_before: u64,
}

impl<O: Send + 'static> BatchLoader<O> {
    pub(super) fn feed(self) -> PrefetchedBatches<O> {
        let (first, steps) = (self.first, self.plan.steps(self.rank()));
        let workers = (self.spec.workers as u64).min(steps.saturating_sub(first));
        let loader = Arc::new(self);
        if workers == 0 {
            return Box::new((first..steps).map_while(move |step| loader.load(step)));
        }
        let started: std::io::Result<Vec<_>> = (0..workers)
            .map(|worker| {
                let loader = loader.clone();
                Worker::start(
                    loader.spec.prefetch,
                    WorkerShutdown::Awaited,
                    move |sender| {
                        let steps = (first + worker..steps).step_by(workers as usize);
                        let batches = steps.map_while(|step| {
                            let _loading = loader.context.shared.timeline.load(worker as usize);
                            loader.load(step)
                        });
                        send_all(sender, batches);
                    },
                )
            })
            .collect();
        match started {
            Ok(workers) => Box::new(Workers { next: 0, workers }),
            Err(error) => failed(error),
        }
    }

    fn load(&self, step: u64) -> Option<Result<Batch<DeferredBatch<O>>>> {
        let planned = self.plan.batch(self.rank(), step)?;
        let device = &self.context.device;
        let value = self.source.load(self.epoch, &planned.indices, device);
        Some(value.map(|value| Batch::new(value, self.info(planned))))
    }

    fn rank(&self) -> usize {
        self.context.shared.rank()
    }

    fn info(&self, planned: PlannedBatch) -> BatchInfo {
        BatchInfo {
            consumed: self.plan.consumed_after(planned.step),
            epoch: self.epoch,
            is_last: planned.is_last,
            len: planned.indices.len(),
            real: planned.real,
            share: match planned.kind {
                BatchKind::Idle => StepShare::Idle,
                _ => StepShare::Used,
            },
            step: self.steps_before + planned.step,
            uneven: self.spec.is_uneven(),
            indices: planned.indices,
        }
    }
}

/// A thread that loads ahead. Dropping it stops it.
pub(super) struct Worker<T> {
    items: Option<Receiver<Result<T>>>,
    thread: Option<JoinHandle<()>>,
}

/// The fate of a worker that is dropped in the middle of its work.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum WorkerShutdown {
    /// The worker is waited for: it ends with its current batch.
    Awaited,
    /// The worker is left: it may be waiting for other ranks, and ends when they answer.
    Left,
}

impl<T: Send + 'static> Worker<T> {
    pub(super) fn start(
        ahead: usize,
        ending: WorkerShutdown,
        work: impl FnOnce(&SyncSender<Result<T>>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (sender, items) = sync_channel(ahead);
        let thread = std::thread::Builder::new()
            .name("loader".to_owned())
            .spawn(move || {
                if let Err(error) = caught("a loader's worker", || {
                    work(&sender);
                    Ok(())
                }) {
                    // Nobody listens any more if this fails.
                    let _ = sender.send(Err(error));
                }
            })?;
        Ok(Self {
            items: Some(items),
            thread: (ending == WorkerShutdown::Awaited).then_some(thread),
        })
    }
}

impl<T> Iterator for Worker<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        self.items.as_ref()?.recv().ok()
    }
}

impl<T> Worker<T> {
    /// Lets it end: without a receiver its next send fails.
    fn stop(&mut self) {
        self.items = None;
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // Its panics were caught and sent.
            let _ = thread.join();
        }
    }
}

/// An iterator that is read in order, perhaps ahead.
pub(super) type Ahead<T> = Box<dyn Iterator<Item = Result<T>> + Send>;

/// Reads ahead on a thread, if there is to be one. A panic is an error in both cases.
pub(super) fn read_ahead<T: Send + 'static>(
    spec: &Spec,
    timeline: Timeline,
    mut items: impl Iterator<Item = Result<T>> + Send + 'static,
) -> Ahead<T> {
    if spec.workers == 0 {
        return Box::new(core::iter::from_fn(move || {
            caught("a loader", || Ok(items.next())).unwrap_or_else(|error| Some(Err(error)))
        }));
    }
    let worker = Worker::start(spec.prefetch, WorkerShutdown::Left, move |sender| {
        let items = core::iter::from_fn(|| {
            let _loading = timeline.load(0);
            items.next()
        });
        send_all(sender, items);
    });
    match worker {
        Ok(worker) => Box::new(worker),
        Err(error) => failed(error),
    }
}

/// Sends items until nobody listens, or one is an error.
fn send_all<T>(sender: &SyncSender<Result<T>>, items: impl Iterator<Item = Result<T>>) {
    for item in items {
        let failed = item.is_err();
        if sender.send(item).is_err() || failed {
            return;
        }
    }
}

/// The error of a thread that could not be started.
pub(super) fn failed<T: Send + 'static>(error: std::io::Error) -> Ahead<T> {
    Box::new(std::iter::once(Err(Error::new(
        Kind::Data,
        "a loader's worker thread could not be started",
    )
    .with_source(error))))
}

/// Workers that take steps in turn, read in the same turn.
struct Workers<T> {
    next: usize,
    workers: Vec<Worker<T>>,
}

impl<T> Drop for Workers<T> {
    fn drop(&mut self) {
        // All of them before one is waited for, or each would continue until its turn has come.
        self.workers.iter_mut().for_each(Worker::stop);
    }
}

impl<T> Iterator for Workers<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Self::Item> {
        let turn = self.next;
        self.next = (turn + 1) % self.workers.len();
        self.workers[turn].next()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// The first one ends when the second one has noticed that nobody listens.
    #[test]
    fn all_workers_stop_before_one_is_waited_for() {
        const DEADLINE: Duration = Duration::from_secs(60);
        let (stopped, has_stopped) = mpsc::channel();
        let (done, outcome) = mpsc::channel();
        let first = Worker::start(1, WorkerShutdown::Awaited, move |_| {
            done.send(has_stopped.recv_timeout(DEADLINE)).unwrap();
        });
        let second = Worker::start(1, WorkerShutdown::Awaited, move |sender| {
            while sender.send(Ok(())).is_ok() {}
            stopped.send(()).unwrap();
        });
        let workers = vec![first.unwrap(), second.unwrap()];
        drop(Workers { next: 0, workers });
        assert_eq!(outcome.recv().unwrap(), Ok(()));
    }
}
