//! The plan of an epoch whose batches are given, of whatever sizes.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::plan::{EpochPlan, Order, Plan, PlannedBatch, TailPolicy};

/// A plan of which rank gets which batch of an epoch, given the samples of each batch: batches of
/// sentences of about the same length, for example, with as many as fit.
///
/// Whole batches go round the ranks: rank `r` of `W` gets the batches `r`, `r + W`, `r + 2 W`, as
/// Accelerate's `BatchSamplerShard` does. The tail policy decides about the last round
/// where there is no batch for every rank: under [`Exact`](TailPolicy::Exact) the others idle, under
/// [`Pad`](TailPolicy::Pad) they get the first batches again.
///
/// ```
/// use accelerator_plan::{BatchPlan, TailPolicy};
///
/// # fn main() -> accelerator_plan::Result<()> {
/// let batches = vec![vec![0, 1, 2], vec![3, 4], vec![5, 6, 7, 8]];
/// let plan = BatchPlan::new(batches, 2, TailPolicy::Exact)?;
/// assert_eq!(plan.steps(1), 2);
/// assert_eq!(plan.batch(0, 1).expect("rank 0 has two").indices, [5, 6, 7, 8]);
/// assert!(plan.batch(1, 1).expect("every rank has two steps").is_idle());
/// assert_eq!(plan.consumed_after(0), 5);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct BatchPlan {
    batches: Arc<[Vec<u64>]>,
    /// Samples before each batch, and all of them at the end.
    before: Arc<[u64]>,
    /// The plan of which rank gets which batch: an epoch of batches, one per rank and step.
    rounds: EpochPlan,
}

impl BatchPlan {
    /// Deals these batches to so many ranks.
    ///
    /// # Errors
    ///
    /// If a batch is empty ([`Error::is_batch_size`]), or the world size is zero
    /// ([`Error::is_world_size`]).
    pub fn new(
        batches: impl Into<Arc<[Vec<u64>]>>,
        world_size: usize,
        tail: TailPolicy,
    ) -> Result<Self> {
        let batches = batches.into();
        if world_size == 0 {
            return Err(Error::no_ranks());
        }
        if let Some(empty) = batches.iter().position(Vec::is_empty) {
            return Err(Error::new(
                Kind::BatchSize,
                format!(
                    "batch {empty} of the {} that were given is empty: give each at least one sample, or \
                     leave it out",
                    batches.len()
                ),
            ));
        }
        let sums = batches.iter().scan(0, |sum, batch| {
            *sum += batch.len() as u64;
            Some(*sum)
        });
        let before: Arc<[u64]> = std::iter::once(0).chain(sums).collect();
        let count = batches.len() as u64;
        let plan = Plan::new(
            count,
            world_size as u64,
            world_size,
            tail,
            Order::Sequential,
        );
        Ok(Self {
            batches,
            before,
            rounds: plan.epoch(0),
        })
    }

    /// The rest of the epoch when `consumed` of its samples have been used: whole batches, by however
    /// many ranks. Steps are counted from 0 there.
    ///
    /// # Errors
    ///
    /// If no batch ends there ([`Error::is_start`]).
    pub fn starting_at(self, consumed: u64) -> Result<Self> {
        match self.before.binary_search(&consumed) {
            Ok(done) => Ok(Self {
                rounds: self.rounds.starting_at(done as u64)?,
                ..self
            }),
            Err(_) => Err(Error::new(
                Kind::Start,
                format!(
                    "the epoch cannot start after {consumed} samples, where no batch ends: the batches hold {} \
                     samples; check that they are those of the run that the offset was saved in",
                    self.before.last().copied().unwrap_or(0)
                ),
            )),
        }
    }

    /// The steps of this rank, from where the plan starts: as [`EpochPlan::steps`].
    #[must_use]
    pub fn steps(&self, rank: usize) -> u64 {
        self.rounds.steps(rank)
    }

    /// The batch of this rank in this step; `None` behind the last step.
    #[must_use]
    pub fn batch(&self, rank: usize, step: u64) -> Option<PlannedBatch> {
        let round = self.rounds.batch(rank, step)?;
        // One a rank and step, and in memory.
        let indices = self.batches.get(*round.indices.first()? as usize)?.clone();
        Some(PlannedBatch {
            real: if round.real == 0 { 0 } else { indices.len() },
            indices,
            ..round
        })
    }

    /// The number of samples of the epoch that all ranks together have consumed once this step is done: the
    /// offset to resume from.
    #[must_use]
    pub fn consumed_after(&self, step: u64) -> u64 {
        // Never more batches than there are.
        self.before[self.rounds.consumed_after(step) as usize]
    }
}
