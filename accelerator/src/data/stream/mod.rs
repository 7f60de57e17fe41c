//! Streams without a length; see the README of this folder.

mod build;
mod dispatched;
mod part_batches;
mod rounds;
mod sample_stream;

use core::fmt;
use core::panic::Location;
use std::sync::Arc;

use accelerator_collective::ProcessGroup;
use accelerator_plan::{EpochPlan, Plan};
use burn::tensor::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::sample_stream::{SampleStream, StreamError, StreamItems, StreamPart};
use super::batch_stream::{PrefetchedBatches, read_ahead};
use super::cursor::EpochPosition;
use super::epoch::LoaderContext;
use super::epoch::Reseed;
use super::exchange_step::ReadPosition;
use super::order::Spec;
use super::source::Batching;
use crate::core::error::Result;
use crate::timeline::Timeline;

/// A stream that was told how ranks share it. It hides the type of a single item.
pub(super) trait SharedStream<O>: Send + Sync {
    fn sharing(&self) -> Sharing;

    /// Returns this rank's batches of one pass.
    fn feed(&self, pass: StreamPass) -> PrefetchedBatches<O>;
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
    pub(super) device: Device,
    pub(super) epoch: u64,
    pub(super) group: ProcessGroup,
    pub(super) place: LoaderContext,
    /// A plan of full steps; its number of samples means nothing.
    pub(super) plan: Plan,
    /// The number of batches that are left out after the start.
    pub(super) skip: u64,
    pub(super) spec: Spec,
    pub(super) start: EpochPosition,
    pub(super) timeline: Timeline,
}

impl StreamPass {
    /// Divides that many samples among the ranks, of which `used` were used before.
    fn divide(&self, samples: usize, used: usize) -> Result<EpochPlan> {
        let plan = self.spec.plan(samples as u64, self.place.world_size)?;
        Ok(plan.epoch(self.epoch).starting_at(used as u64)?)
    }

    /// The step of the pass with that number.
    fn position(&self, step: u64) -> ReadPosition {
        ReadPosition {
            epoch: self.epoch,
            loader: self.place.number,
            step,
        }
    }

    /// The seed of what is drawn for the batch of a step.
    fn seed_of_batch(&self, step: u64) -> Option<u64> {
        Reseed::new(self.device.clone(), self.place, self.epoch).batch_seed(step)
    }

    /// The number of its first step.
    fn first_step(&self) -> u64 {
        self.start.step.saturating_add(self.skip)
    }

    fn rank(&self) -> usize {
        self.place.rank
    }

    fn world_size(&self) -> usize {
        self.place.world_size
    }
}

/// A stream with what makes batches of its items.
struct Streamed<S: SampleStream, O> {
    batching: Batching<S::Item, O>,
    stream: Arc<S>,
}

impl<S: SampleStream, O> Clone for Streamed<S, O> {
    fn clone(&self) -> Self {
        Self {
            batching: self.batching.clone(),
            stream: self.stream.clone(),
        }
    }
}

struct Interleaved<S: SampleStream, O>(Streamed<S, O>);

impl<S: SampleStream, O: Send + 'static> SharedStream<O> for Interleaved<S, O> {
    fn sharing(&self) -> Sharing {
        Sharing::Interleaved
    }

    fn feed(&self, pass: StreamPass) -> PrefetchedBatches<O> {
        let (spec, timeline) = (pass.spec.clone(), pass.timeline.clone());
        read_ahead(
            &spec,
            timeline,
            rounds::InterleavedBatches::new(self.0.clone(), pass),
        )
    }
}

struct Parts<S: SampleStream, O>(Streamed<S, O>);

impl<S: SampleStream, O: Send + 'static> SharedStream<O> for Parts<S, O> {
    fn sharing(&self) -> Sharing {
        Sharing::Parts
    }

    fn feed(&self, pass: StreamPass) -> PrefetchedBatches<O> {
        Box::new(part_batches::PartBatches::new(self.0.clone(), pass))
    }
}

struct Dispatched<S: SampleStream, O>(Streamed<S, O>);

impl<S, O> SharedStream<O> for Dispatched<S, O>
where
    S: SampleStream<Item: Serialize + DeserializeOwned>,
    O: Send + 'static,
{
    fn sharing(&self) -> Sharing {
        Sharing::Dispatched
    }

    fn feed(&self, pass: StreamPass) -> PrefetchedBatches<O> {
        Box::new(dispatched::DispatchedBatches::new(self.0.clone(), pass))
    }
}
