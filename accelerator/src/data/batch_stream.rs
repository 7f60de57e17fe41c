use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use accelerator_plan::{BatchKind, PlannedBatch};
use burn::tensor::Device;

use super::batch::{Batch, BatchInfo, StepShare};
use super::order::{EpochShare, Spec};
use super::source::{DeferredBatch, ItemSource};
use crate::core::error::{Error, Kind, Result};
use crate::core::panic_text::caught;
use crate::timeline::Timeline;

/// The batches of an epoch, in order. Some are left to be made by the thread that asks for them.
pub(super) type PrefetchedBatches<O> = Ahead<Batch<DeferredBatch<O>>>;

/// This rank's share of an epoch, by its plan.
pub(super) struct RankBatches<O> {
    pub(super) device: Device,
    pub(super) epoch: u64,
    /// The first step of the plan that is wanted.
    pub(super) first: u64,
    pub(super) plan: EpochShare,
    pub(super) rank: usize,
    pub(super) source: Arc<dyn ItemSource<O>>,
    pub(super) spec: Spec,
    /// The number of steps of the epoch done where the plan starts.
    pub(super) steps_before: u64,
    pub(super) timeline: Timeline,
}

impl<O: Send + 'static> RankBatches<O> {
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
