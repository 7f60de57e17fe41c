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
use crate::core::device::drawing;
use crate::core::error::{self, Error, Kind, Result, caught};
use crate::timeline::Timeline;

/// This rank's batches of one epoch; see [`PreparedLoader::epoch`](super::PreparedLoader::epoch).
///
/// An error is the last thing that it yields. Leaving it before its end is fine: its workers stop.
/// Reading begins with the first batch that is asked for.
#[must_use = "an epoch is an iterator"]
pub struct Epoch<O> {
    feed: EpochState<O>,
    pass: Arc<EpochPass>,
    reseed: Reseed,
    remaining: Option<u64>,
    timeline: Timeline,
    uncounted: UncountedPadding,
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
        open: OpenEpoch<O>,
        pass: Arc<EpochPass>,
        reseed: Reseed,
        steps: Option<u64>,
        timeline: Timeline,
        uncounted: UncountedPadding,
    ) -> Self {
        Self {
            feed: EpochState::Closed(open, 0),
            pass,
            reseed,
            remaining: steps,
            timeline,
            uncounted,
        }
    }

    /// Leaves out the next so many batches: of this rank, and so, where every rank says the same, so
    /// many steps. What a data set would have loaded for them is not loaded; a stream is asked to skip
    /// it, and one of Burn's own loaders reads it for nothing. Batches keep their numbers, weights and
    /// ends. An epoch that continues after [`resume`](crate::Accelerator::resume) leaves out by itself what was used;
    /// a call that leaves out more than that logs a warning.
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
                self.reseed.warn_left_out(self.pass.yielded(), batches);
            }
            EpochState::Ended | EpochState::Failed(_) => {}
            EpochState::Open(feed) => {
                for _ in 0..batches {
                    match feed.next() {
                        Some(Ok(_)) => {}
                        Some(Err(error)) => {
                            self.feed = EpochState::Failed(error);
                            break;
                        }
                        None => break,
                    }
                }
            }
        }
        self
    }

    /// The batches with their numbers in the epoch, which are those of [`Batch::step`]: what a program does by
    /// the number continues where it was after [`resume`](crate::Accelerator::resume) in mid-epoch, where
    /// [`Iterator::enumerate`], whose place this takes, would begin at 0 again. Adapters in between
    /// count from 0: behind `take` or `zip`, use [`Batch::step`].
    pub fn enumerate(self) -> NumberedBatches<O> {
        let next = self.pass.yielded().step as usize;
        NumberedBatches { epoch: self, next }
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
            let seed = self.reseed.batch_seed(batch.step());
            batch.resolve(seed)
        });
        let end = Instant::now();
        match &batch {
            Some(Ok(_)) => {
                self.feed = EpochState::Open(feed);
                self.timeline.batch_came(start, end);
            }
            Some(Err(_)) => {}
            None => {
                let LoaderContext { rank, .. } = self.reseed.place;
                if is_whole && rank == 0 {
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
                consumed: batch.info().consumed,
                digest: self.pass.yielded().digest,
                finished: false,
                step: batch.step() + 1,
            };
            self.pass.advance(end);
            let ticket = ConsumeTicket {
                loader: self.reseed.place.number,
                pass: self.pass.clone(),
                end,
            };
            batch.set_mark(ticket, &self.uncounted);
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

/// Batches with their numbers in the epoch; see [`Epoch::enumerate`].
#[must_use = "an epoch is an iterator"]
#[derive(Debug)]
pub struct NumberedBatches<O> {
    epoch: Epoch<O>,
    next: usize,
}

impl<O> Iterator for NumberedBatches<O> {
    type Item = (usize, Result<Batch<O>>);

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.epoch.next()?;
        let step = batch
            .as_ref()
            .map_or(self.next, |batch| batch.step() as usize);
        self.next = step + 1;
        Some((step, batch))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.epoch.size_hint()
    }
}

impl<O> FusedIterator for NumberedBatches<O> {}

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

/// Sets the device's generator anew for each step, so that what a step draws depends on its
/// place alone.
pub(super) struct Reseed {
    device: Device,
    epoch: u64,
    place: LoaderContext,
}

impl Reseed {
    pub(super) fn new(device: Device, place: LoaderContext, epoch: u64) -> Self {
        Self {
            device,
            epoch,
            place,
        }
    }

    /// An epoch that continues from there is to leave out so many more.
    fn warn_left_out(&self, start: EpochPosition, batches: u64) {
        if start.step > 0 && batches > 0 && self.place.rank == 0 {
            error::warn(&format!(
                "after `resume` a loader goes on behind step {} of epoch {}, and `skip_first_batches` leaves out {batches} \
                 more, which are never trained on in this epoch: leave it out where it is to find the place of the \
                 checkpoint, which `resume` does",
                start.step, start.epoch
            ));
        }
    }

    fn at(&self, step: u64) {
        let [seed, rank, number, epoch] = self.words();
        // Another rank of this process may be building a model.
        let _turn = drawing();
        self.device.seed(mix(&[seed, rank, number, epoch, step]));
    }

    /// The seed of what is drawn for the batch of that step; `None` if other ranks draw from the same
    /// generator, so that it would mean nothing.
    pub(super) fn batch_seed(&self, step: u64) -> Option<u64> {
        const BATCH: u64 = 1;
        let [seed, rank, number, epoch] = self.words();
        let seed = mix(&[seed, rank, number, epoch, step, BATCH]);
        (self.place.generator == Generator::Own).then_some(seed)
    }

    fn words(&self) -> [u64; 4] {
        let LoaderContext {
            number, rank, seed, ..
        } = self.place;
        [seed, rank as u64, number, self.epoch]
    }
}

/// The rank, the world and the loader of a share.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoaderContext {
    pub(super) generator: Generator,
    pub(super) number: u64,
    pub(super) rank: usize,
    pub(super) seed: u64,
    pub(super) world_size: usize,
}

/// The generator from which a rank draws: one of its own, or one that ranks share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Generator {
    Own,
    /// Ranks are threads of one process.
    Shared,
}

impl LoaderContext {
    pub(super) fn of(context: &Context) -> Self {
        let are_threads = context.group().transport() == TransportKind::Threads;
        Self {
            generator: match are_threads && context.world_size() > 1 {
                true => Generator::Shared,
                false => Generator::Own,
            },
            number: context.next_loader(),
            rank: context.rank(),
            seed: context.seed,
            world_size: context.world_size(),
        }
    }
}

/// The batches of an epoch, in order. Some are left to be made by the thread that asks for them.
pub(super) type PrefetchedBatches<O> = Ahead<Batch<DeferredBatch<O>>>;

/// This rank's share of an epoch, by its plan.
pub(super) struct BatchLoader<O> {
    pub(super) device: Device,
    pub(super) epoch: u64,
    /// The first step of the plan that is wanted.
    pub(super) first: u64,
    pub(super) plan: EpochBatches,
    pub(super) rank: usize,
    pub(super) source: Arc<dyn ItemSource<O>>,
    pub(super) spec: Spec,
    /// The number of steps of the epoch done where the plan starts.
    pub(super) steps_before: u64,
    pub(super) timeline: Timeline,
}

impl<O: Send + 'static> BatchLoader<O> {
    pub(super) fn feed(self) -> PrefetchedBatches<O> {
        let (first, steps) = (self.first, self.plan.steps(self.rank));
        let workers = (self.spec.workers as u64).min(steps.saturating_sub(first));
        let share = Arc::new(self);
        if workers == 0 {
            return Box::new((first..steps).map_while(move |step| share.load(step)));
        }
        let started: std::io::Result<Vec<_>> = (0..workers)
            .map(|worker| {
                let share = share.clone();
                Worker::start(
                    share.spec.prefetch,
                    WorkerShutdown::Awaited,
                    move |sender| {
                        for step in (first + worker..steps).step_by(workers as usize) {
                            let loading = share.timeline.load(worker as usize);
                            let Some(batch) = share.load(step) else {
                                return;
                            };
                            drop(loading);
                            let failed = batch.is_err();
                            if sender.send(batch).is_err() || failed {
                                return;
                            }
                        }
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
        let planned = self.plan.batch(self.rank, step)?;
        let value = self.source.load(self.epoch, &planned.indices, &self.device);
        Some(value.map(|value| Batch::new(value, self.info(planned))))
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
        loop {
            let loading = timeline.load(0);
            let Some(item) = items.next() else {
                return;
            };
            drop(loading);
            let failed = item.is_err();
            if sender.send(item).is_err() || failed {
                return;
            }
        }
    });
    match worker {
        Ok(worker) => Box::new(worker),
        Err(error) => failed(error),
    }
}

/// A feed that has nothing but the error of a thread that could not be started.
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
