//! The plan of one epoch.

use std::ops::Range;
use std::sync::Arc;

use crate::batch::{BatchKind, PlannedBatch, RankBatches};
use crate::config::Order;
use crate::error::{Error, Kind, Result};
use crate::permutation::Permutation;
use crate::plan::{Plan, divide};
use crate::tail::TailPolicy;

/// The assignment of samples to ranks in one epoch; made by [`Plan::epoch`].
///
/// It holds a few numbers, however many samples there are, and computes any batch of any rank.
/// A rank that is not below the world size has no batches.
#[derive(Clone, Debug)]
pub struct EpochPlan {
    plan: Plan,
    epoch: u64,
    sequence: Sequence,
    start: u64,
}

impl EpochPlan {
    pub(crate) fn new(plan: Plan, epoch: u64) -> Self {
        let sequence = match plan.order() {
            Order::Sequential => Sequence::Sequential,
            Order::Shuffled { seed } => {
                Sequence::Permuted(Permutation::new(plan.samples(), seed, epoch))
            }
        };
        Self {
            plan,
            epoch,
            sequence,
            start: 0,
        }
    }

    /// The caller has checked the number of samples.
    pub(crate) fn listed(plan: Plan, epoch: u64, order: Arc<[u64]>) -> Self {
        Self {
            plan,
            epoch,
            sequence: Sequence::Listed(order),
            start: 0,
        }
    }

    /// The rest of the epoch when `consumed` of its samples, counted from its beginning, have been
    /// used, by however many ranks in batches of whatever size.
    ///
    /// Steps are counted from 0 there. The number to give is what
    /// [`consumed_after`](Self::consumed_after) said of the last step that was done. Padding still
    /// comes from the start of the whole epoch.
    ///
    /// ```
    /// use accelerator_plan::{BatchSize, PlanConfig};
    ///
    /// # fn main() -> accelerator_plan::Result<()> {
    /// let plan = PlanConfig::new(100, BatchSize::per_rank(4)?).with_world_size(4).init()?;
    /// let epoch = plan.epoch(3);
    /// assert_eq!((epoch.start(), epoch.steps(0)), (0, 7));
    /// // Two steps are done, and three ranks go on.
    /// let consumed = epoch.consumed_after(1);
    /// let plan = PlanConfig::new(100, BatchSize::per_rank(4)?).with_world_size(3).init()?;
    /// let rest = plan.epoch(3).starting_at(consumed)?;
    /// assert_eq!((rest.epoch(), rest.start(), rest.steps(0)), (3, 32, 6));
    /// assert_eq!(rest.plan().world_size(), 3);
    /// assert!(rest.starting_at(101).unwrap_err().is_start());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the epoch has fewer samples ([`Error::is_start`]).
    pub fn starting_at(self, consumed: u64) -> Result<Self> {
        let samples = self.plan.samples();
        if consumed > samples {
            return Err(Error::new(
                Kind::Start,
                format!(
                    "the epoch cannot start after {consumed} samples, it has only {samples}: give at most {samples}, \
                     and check that the data set is the one the offset was saved for"
                ),
            ));
        }
        Ok(Self {
            start: consumed,
            ..self
        })
    }

    /// The plan of the run that this epoch belongs to.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The number of the epoch.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The number of samples of the epoch that were consumed before the plan starts.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The steps of this rank, from where the plan starts.
    ///
    /// They are the same on every rank, except under [`TailPolicy::Uneven`], where rank 0 has the
    /// most and the last rank may have one fewer.
    #[must_use]
    pub fn steps(&self, rank: usize) -> u64 {
        if rank >= self.plan.world_size() {
            return 0;
        }
        let left = self.plan.samples() - self.start;
        let (full, rest) = (
            left / self.plan.global_batch(),
            left % self.plan.global_batch(),
        );
        let takes_part = match self.plan.tail() {
            TailPolicy::Exact | TailPolicy::Pad => rest > 0,
            TailPolicy::Drop => false,
            TailPolicy::Uneven => rest > self.plan.share(rank).start,
        };
        full + u64::from(takes_part)
    }

    /// The batch of this rank in this step; `None` behind the last step.
    ///
    /// Takes time in proportion to the batch size, at any position.
    #[must_use]
    pub fn batch(&self, rank: usize, step: u64) -> Option<PlannedBatch> {
        let steps = self.steps(rank);
        if step >= steps {
            return None;
        }
        let positions = self.positions(rank, step);
        let samples = self.plan.samples();
        let (loaded, real, kind) = if positions.is_empty() {
            let earlier = match step.checked_sub(1) {
                Some(before) => self.positions(rank, before),
                None => self.positions(0, step),
            };
            (earlier, 0, BatchKind::Idle)
        } else {
            let real = positions.end.min(samples) - positions.start.min(samples);
            // Fits: a batch has at most `u32::MAX` positions.
            (positions, real as usize, BatchKind::Real)
        };
        let indices = loaded.map(|position| self.sample(position)).collect();
        Some(PlannedBatch {
            indices,
            real,
            kind,
            step,
            is_last: step + 1 == steps,
        })
    }

    /// All batches of this rank, from where the plan starts.
    #[must_use]
    pub fn rank(&self, rank: usize) -> RankBatches {
        RankBatches::new(self.clone(), rank)
    }

    /// The number of samples of the epoch that all ranks together have consumed once this step is done: the
    /// offset to resume from.
    ///
    /// At most the samples of the epoch; for a step behind the last one, the same as for the last one.
    #[must_use]
    pub fn consumed_after(&self, step: u64) -> u64 {
        // Rank 0 takes part in every step.
        let done = step.saturating_add(1).min(self.steps(0));
        (self.start + done * self.plan.global_batch()).min(self.plan.samples())
    }

    /// The positions of a rank's share of one of its steps. They run past the samples under `Pad`
    /// and are empty for an idle rank.
    fn positions(&self, rank: usize, step: u64) -> Range<u64> {
        let first = self.start + step * self.plan.global_batch();
        let left = self.plan.samples() - first;
        let is_tail = left < self.plan.global_batch();
        let share = match self.plan.tail() {
            TailPolicy::Exact if is_tail => divide(left, self.plan.world_size(), rank),
            TailPolicy::Uneven if is_tail => {
                let share = self.plan.share(rank);
                share.start..share.end.min(left)
            }
            _ => self.plan.share(rank),
        };
        first + share.start..first + share.end
    }

    /// The sample at a position of the epoch; past its end it begins again.
    ///
    /// Accelerate fills up from the samples of the first global batch, over and over again. That is
    /// the same: the padding is shorter than a global batch, so it goes around only where the epoch
    /// is, too.
    fn sample(&self, position: u64) -> u64 {
        let samples = self.plan.samples();
        let position = if position < samples {
            position
        } else {
            (position - samples) % samples
        };
        match &self.sequence {
            Sequence::Sequential => position,
            Sequence::Permuted(permutation) => permutation.index(position),
            Sequence::Listed(order) => order[position as usize],
        }
    }
}

/// The samples of an epoch, by position.
#[derive(Clone, Debug)]
enum Sequence {
    Sequential,
    Permuted(Permutation),
    Listed(Arc<[u64]>),
}
