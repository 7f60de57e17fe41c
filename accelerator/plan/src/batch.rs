//! One batch of one rank, and the sequence of them.

use std::iter::FusedIterator;

use crate::epoch::EpochPlan;

/// The batch that one rank gets in one step.
///
/// ```
/// use accelerator_plan::{BatchKind, BatchSize, PlanConfig, TailPolicy};
///
/// # fn main() -> accelerator_plan::Result<()> {
/// let plan = PlanConfig::new(5, BatchSize::per_rank(2)?)
///     .with_world_size(2)
///     .with_tail(TailPolicy::Pad)
///     .init()?;
/// // Of four samples of the last step, one is left; the others come again.
/// let batch = plan.epoch(0).batch(0, 1).expect("there are two steps");
/// assert_eq!(batch.indices, [4, 0]);
/// assert_eq!((batch.real_indices(), batch.padding()), (&[4][..], &[0][..]));
/// assert_eq!((batch.real, batch.step, batch.is_last), (1, 1, true));
/// assert!(batch.kind == BatchKind::Real && !batch.is_idle());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedBatch {
    /// The samples to load, never empty. The first [`real`](Self::real) are seen for the first
    /// time in this epoch; the others repeat samples and always trail.
    pub indices: Vec<u64>,
    /// The number of indices that are seen for the first time in this epoch.
    pub real: usize,
    /// The kind of the batch: it counts, or only keeps an idle rank busy.
    pub kind: BatchKind,
    /// The step, counted from 0 at the offset from which the epoch plan starts.
    pub step: u64,
    /// `true` for the last batch of this rank in this epoch.
    pub is_last: bool,
}

impl PlannedBatch {
    /// The samples that are seen for the first time in this epoch.
    #[must_use]
    pub fn real_indices(&self) -> &[u64] {
        &self.indices[..self.real]
    }

    /// The samples that are repeated to fill the batch.
    #[must_use]
    pub fn padding(&self) -> &[u64] {
        &self.indices[self.real..]
    }

    /// Returns `true` if the rank idles in this step.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.kind == BatchKind::Idle
    }
}

/// The kind of a batch: one that counts, or one that only keeps its rank in step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchKind {
    /// A batch that counts, with the duplicates that [`TailPolicy::Pad`](crate::TailPolicy::Pad) adds.
    Real,
    /// [`TailPolicy::Exact`](crate::TailPolicy::Exact) has no sample left for this rank, which must
    /// still take part in the step. The indices are those of its batch before, or of rank 0's batch
    /// in the same step where there is none before; none of them is real, and neither gradient nor
    /// loss nor metric of such a batch may count.
    Idle,
}

/// The batches of one rank in one epoch, in order; made by
/// [`EpochPlan::rank`](crate::EpochPlan::rank).
///
/// It holds no list: skipping with [`nth`](Iterator::nth) takes constant time.
#[derive(Clone, Debug)]
pub struct RankBatches {
    epoch: EpochPlan,
    rank: usize,
    next: u64,
}

impl RankBatches {
    pub(crate) fn new(epoch: EpochPlan, rank: usize) -> Self {
        Self {
            epoch,
            rank,
            next: 0,
        }
    }
}

impl Iterator for RankBatches {
    type Item = PlannedBatch;

    fn next(&mut self) -> Option<PlannedBatch> {
        let batch = self.epoch.batch(self.rank, self.next)?;
        self.next += 1;
        Some(batch)
    }

    fn nth(&mut self, skipped: usize) -> Option<PlannedBatch> {
        self.next = self
            .next
            .saturating_add(skipped as u64)
            .min(self.epoch.steps(self.rank));
        self.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        match usize::try_from(self.epoch.steps(self.rank) - self.next) {
            Ok(left) => (left, Some(left)),
            Err(_) => (usize::MAX, None),
        }
    }
}

impl FusedIterator for RankBatches {}
