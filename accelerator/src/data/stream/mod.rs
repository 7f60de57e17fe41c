//! Streams without a length; see the README of this folder.

mod build;
mod part_batches;
mod rounds;

use core::fmt;
use core::iter::{self, Fuse};
use core::panic::Location;

use accelerator_plan::{EpochPlan, Plan};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::batch::{Batch, BatchInfo};
use super::cursor::EpochPosition;
use super::epoch::{Ahead, LoaderContext, PrefetchedBatches, read_ahead};
use super::exchange_step::{ReadPosition, exchange_step};
use super::order::Spec;
use super::source::{Batching, DeferredBatch};
use crate::core::error::{Error, Kind, Result};

/// A stream that was told how ranks share it. It hides the type of a single item.
pub(super) struct SharedStream<O> {
    /// Returns this rank's batches of one pass.
    pub(super) feed: Box<dyn Fn(StreamPass) -> PrefetchedBatches<O> + Send + Sync>,
    pub(super) sharing: Sharing,
}

/// The way in which ranks share a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Sharing {
    /// Rank 0 reads, and sends each rank its samples.
    Dispatched,
    /// Every rank reads all of it, and keeps its own samples.
    Interleaved,
    /// Each rank reads a part of its own.
    Parts,
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dispatched => "dispatched from rank 0",
            Self::Interleaved => "read by every rank",
            Self::Parts => "read in parts",
        })
    }
}

/// One pass of one rank over a stream.
#[derive(Clone)]
pub(super) struct StreamPass {
    /// The place in the program that asked for it.
    pub(super) caller: &'static Location<'static>,
    pub(super) context: LoaderContext,
    pub(super) epoch: u64,
    /// A plan of full steps; its number of samples means nothing.
    pub(super) plan: Plan,
    /// The number of batches that are left out after the start.
    pub(super) skip: u64,
    pub(super) spec: Spec,
    pub(super) start: EpochPosition,
}

impl StreamPass {
    /// Divides that many samples among the ranks, of which `used` were used before.
    fn divide(&self, samples: usize, used: usize) -> Result<EpochPlan> {
        let plan = self.spec.plan(samples as u64, self.world_size())?;
        Ok(plan.epoch(self.epoch).starting_at(used as u64)?)
    }

    fn position(&self, step: u64) -> ReadPosition {
        ReadPosition {
            epoch: self.epoch,
            loader: self.context.number,
            step,
        }
    }

    /// The seed of what is drawn for the batch of a step.
    fn seed_of_batch(&self, step: u64) -> Option<u64> {
        self.context.batch_seed(self.epoch, step)
    }

    /// The number of its first step.
    fn first_step(&self) -> u64 {
        self.start.step.saturating_add(self.skip)
    }

    fn rank(&self) -> usize {
        self.context.shared.rank()
    }

    fn world_size(&self) -> usize {
        self.context.shared.world_size()
    }

    fn read_ahead<T: Send + 'static>(
        &self,
        items: impl Iterator<Item = Result<T>> + Send + 'static,
    ) -> Ahead<T> {
        read_ahead(&self.spec, self.context.shared.timeline.clone(), items)
    }

    /// Exchanges this rank's word on a step; see [`exchange_step`].
    fn exchange<T: Serialize + DeserializeOwned>(
        &self,
        step: u64,
        mine: Result<T, &Error>,
        action: &str,
    ) -> Result<Vec<T>> {
        let position = self.position(step);
        let group = self.context.shared.group();
        exchange_step(group, position, mine, action, self.caller)
    }
}

/// A stream with what makes batches of its items.
struct Streamed<S: SampleStream, O> {
    batching: Batching<S::Item, O>,
    stream: S,
}

impl<S: SampleStream, O: 'static> Streamed<S, O> {
    /// A batch of the samples that `info` describes.
    fn batch(
        &self,
        pass: &StreamPass,
        items: Vec<S::Item>,
        info: BatchInfo,
    ) -> Batch<DeferredBatch<O>> {
        let device = &pass.context.device;
        let value = self
            .batching
            .batch(pass.epoch, items, &info.indices, device);
        Batch::new(value, info)
    }
}

/// The batches up to the last, which says that it is: no rank asks for another one.
fn until_last<O>(
    mut next: impl FnMut() -> Result<Option<Batch<DeferredBatch<O>>>> + Send + 'static,
) -> PrefetchedBatches<O> {
    let mut has_ended = false;
    Box::new(iter::from_fn(move || {
        if has_ended {
            return None;
        }
        let batch = next();
        has_ended = match &batch {
            Ok(Some(batch)) => batch.is_last(),
            _ => true,
        };
        batch.transpose()
    }))
}

/// An error of a program's own stream.
pub type StreamError = Box<dyn std::error::Error + Send + Sync>;

/// The samples of a stream, in order.
pub type StreamItems<I> = Box<dyn Iterator<Item = Result<I, StreamError>> + Send>;

/// Samples that come one after the other until they end: lines of files, records of a queue, the output of a
/// simulator. The stream is read from its start in every epoch.
///
/// A function of the [`StreamPart`] that returns an iterator of results is a stream; see
/// [`build_stream`](crate::data::LoaderBuilder::build_stream) for an example.
///
/// One that can be entered in the middle says so by [`read_from`](Self::read_from), which resuming and
/// [`skip_first_batches`](crate::data::Epoch::skip_first_batches) use; otherwise what was used before is read
/// and dropped.
///
/// ```
/// use accelerator::data::{SampleStream, StreamError, StreamItems, StreamPart};
///
/// struct Squares;
///
/// impl SampleStream for Squares {
///     type Item = u64;
///
///     fn read(&self, part: StreamPart) -> Result<StreamItems<u64>, StreamError> {
///         self.read_from(part, 0)
///     }
///
///     fn read_from(&self, part: StreamPart, skipped: u64) -> Result<StreamItems<u64>, StreamError> {
///         let mine = (part.index() as u64..100).step_by(part.count()).skip(skipped as usize);
///         Ok(Box::new(mine.map(|n| Ok(n * n))))
///     }
/// }
/// # let part = StreamPart::whole(0);
/// # let third = Squares.read_from(part, 2).unwrap().next().unwrap();
/// # assert_eq!(third.unwrap(), 4);
/// ```
pub trait SampleStream: Send + Sync + 'static {
    /// A sample.
    type Item: Clone + Send + 'static;

    /// Begins to read that part for that epoch.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from being read.
    fn read(&self, part: StreamPart) -> Result<StreamItems<Self::Item>, StreamError>;

    /// Begins behind the first `skipped` samples of the part; with nothing left, where it has fewer.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from being read.
    fn read_from(
        &self,
        part: StreamPart,
        skipped: u64,
    ) -> Result<StreamItems<Self::Item>, StreamError> {
        let mut items = self.read(part)?;
        for _ in 0..skipped {
            match items.next() {
                Some(item) => drop(item?),
                None => break,
            }
        }
        Ok(items)
    }
}

/// Functions that give an iterator are streams.
impl<F, It, I, E> SampleStream for F
where
    F: Fn(StreamPart) -> It + Send + Sync + 'static,
    It: IntoIterator<Item = Result<I, E>>,
    It::IntoIter: Send + 'static,
    I: Clone + Send + 'static,
    E: Into<StreamError>,
{
    type Item = I;

    fn read(&self, part: StreamPart) -> Result<StreamItems<I>, StreamError> {
        let items = self(part).into_iter();
        Ok(Box::new(items.map(|item| item.map_err(Into::into))))
    }
}

/// The part of a stream to read, and the epoch for which it is read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct StreamPart {
    count: usize,
    epoch: u64,
    index: usize,
}

impl StreamPart {
    /// Makes the part that is the whole stream.
    pub fn whole(epoch: u64) -> Self {
        Self {
            count: 1,
            epoch,
            index: 0,
        }
    }

    fn of(epoch: u64, index: usize, count: usize) -> Self {
        Self {
            count,
            epoch,
            index,
        }
    }

    /// Returns the number of the part, from 0. If each rank reads its own part, this is the rank.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the number of parts: as many as ranks if each rank reads its own, otherwise 1.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the epoch for which it is read.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

/// A part that is being read.
struct PartReader<I> {
    /// The items that were read, and are not taken yet.
    ahead: Vec<I>,
    /// The error after them.
    failed: Option<Error>,
    items: Fuse<StreamItems<I>>,
}

impl<I> PartReader<I> {
    fn open<S: SampleStream<Item = I>>(stream: &S, part: StreamPart, skipped: u64) -> Result<Self> {
        let items = match skipped {
            0 => stream.read(part),
            _ => stream.read_from(part, skipped),
        };
        let items = items.map_err(|error| {
            let from = match skipped {
                0 => String::new(),
                _ => format!(" from sample {skipped} on"),
            };
            failed(&format!("be read{from}"), error)
        })?;
        Ok(Self {
            ahead: Vec::new(),
            failed: None,
            items: items.fuse(),
        })
    }

    /// Takes up to `count` items.
    fn take(&mut self, count: usize) -> Result<Vec<I>> {
        self.read(count);
        if self.ahead.len() < count
            && let Some(error) = self.failed.take()
        {
            return Err(error);
        }
        Ok(match self.ahead.len() <= count {
            true => core::mem::take(&mut self.ahead),
            false => self.ahead.drain(..count).collect(),
        })
    }

    /// Returns how many samples come next, up to `count`; `None` if they cannot be read: [`take`](Self::take)
    /// returns the error.
    fn peek(&mut self, count: usize) -> Option<usize> {
        self.read(count);
        let found = self.ahead.len().min(count);
        (found == count || self.failed.is_none()).then_some(found)
    }

    /// Reads until so many are there.
    fn read(&mut self, count: usize) {
        while self.ahead.len() < count && self.failed.is_none() {
            match self.items.next() {
                Some(Ok(item)) => self.ahead.push(item),
                Some(Err(error)) => self.failed = Some(failed("deliver a sample", error)),
                None => return,
            }
        }
    }
}

fn failed(what: &str, error: StreamError) -> Error {
    Error::new(Kind::Data, format!("the stream failed to {what}")).with_source(error)
}
