//! The plan of a run, of its epochs, and of the batches in them.

use std::fmt;
use std::iter::FusedIterator;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::permutation::Permutation;

/// The assignment of samples to ranks, in every epoch of a run.
///
/// Made by [`PlanConfig::init`](crate::PlanConfig::init). A global batch holds
/// [`global_batch`](Self::global_batch) samples; of the sequence of an epoch, global batch `k`
/// covers the positions from `k · global_batch` on, and rank `r` gets the `r`-th
/// [`share`](Self::share) of them. So the ranks together see the samples in the order in which one
/// rank with the global batch would.
#[derive(Clone, Debug)]
pub struct Plan {
    samples: u64,
    global: u64,
    world_size: usize,
    tail: TailPolicy,
    order: Order,
}

impl Plan {
    /// The caller has checked that the sizes are not zero, that every rank gets a share, and that
    /// all can be counted.
    pub(crate) fn new(
        samples: u64,
        global: u64,
        world_size: usize,
        tail: TailPolicy,
        order: Order,
    ) -> Self {
        Self {
            samples,
            global,
            world_size,
            tail,
            order,
        }
    }

    /// The plan of one epoch, from its beginning.
    #[must_use]
    pub fn epoch(&self, epoch: u64) -> EpochPlan {
        let sequence = match self.order {
            Order::Sequential => Sequence::Sequential,
            Order::Shuffled { seed } => {
                Sequence::Permuted(Permutation::new(self.samples, seed, epoch))
            }
        };
        EpochPlan {
            plan: self.clone(),
            epoch,
            sequence,
            start: 0,
        }
    }

    /// The plan of one epoch whose samples are given, in their order: the choice of a sampler, instead
    /// of this plan's own [`samples`](Self::samples) and [`order`](Self::order). Samples may be left out
    /// or come more than once.
    ///
    /// ```
    /// use accelerator_plan::{BatchSize, PlanConfig};
    ///
    /// # fn main() -> accelerator_plan::Result<()> {
    /// let plan = PlanConfig::new(9, BatchSize::per_rank(2)?).with_world_size(2).init()?;
    /// let epoch = plan.listed(0, [8, 8, 3, 5, 0])?;
    /// assert_eq!(epoch.batch(1, 0).expect("there are two steps").indices, [3, 5]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If the list is too long to count.
    pub fn listed(&self, epoch: u64, order: impl Into<Arc<[u64]>>) -> Result<EpochPlan> {
        let order = order.into();
        let samples = order.len() as u64;
        if samples.checked_add(self.global).is_none() {
            return Err(Error::new(
                Kind::Other,
                format!(
                    "{samples} samples and a global batch of {} cannot be counted together: give a smaller \
                     batch size",
                    self.global
                ),
            ));
        }
        Ok(EpochPlan {
            plan: Self {
                samples,
                ..self.clone()
            },
            epoch,
            sequence: Sequence::Listed(order),
            start: 0,
        })
    }

    /// The samples of an epoch.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The samples of a rank's full batch: the most that any rank gets in a step. Where the global
    /// batch does not divide over the ranks, the last ones get one sample fewer.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        // Fits: a rank's batch has at most `u32::MAX` samples.
        self.global.div_ceil(self.world_size as u64) as usize
    }

    /// The samples that all ranks use in a full step.
    #[must_use]
    pub fn global_batch(&self) -> u64 {
        self.global
    }

    /// The part of a full global batch that this rank gets, by position within it; empty where the
    /// rank is not below the world size.
    #[must_use]
    pub fn share(&self, rank: usize) -> Range<u64> {
        if rank >= self.world_size {
            return self.global..self.global;
        }
        divide(self.global, self.world_size, rank)
    }

    /// The number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The policy for the last, incomplete global batch.
    #[must_use]
    pub fn tail(&self) -> TailPolicy {
        self.tail
    }

    /// The order of the samples.
    #[must_use]
    pub fn order(&self) -> Order {
        self.order
    }
}

/// The part of `count` things that a rank gets when they are divided as evenly as possible, in
/// rank order: the first ranks get one more.
pub(crate) fn divide(count: u64, ranks: usize, rank: usize) -> Range<u64> {
    let (rank, ranks) = (rank as u64, ranks as u64);
    let (share, extra) = (count / ranks, count % ranks);
    let begin = rank * share + rank.min(extra);
    begin..begin + share + u64::from(rank < extra)
}

/// The order in which an epoch goes through the samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// Index order, the same in every epoch.
    #[default]
    Sequential,
    /// Shuffled over all samples, anew in every epoch: see [`Permutation`](crate::Permutation).
    Shuffled {
        /// The seed of the run, the same on every rank.
        seed: u64,
    },
}

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
    /// // Two steps are done, and three ranks continue.
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
        RankBatches {
            epoch: self.clone(),
            rank,
            next: 0,
        }
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

/// The policy for the last samples of an epoch if they do not fill a global batch.
///
/// It is written `exact`, `pad`, `drop` or `uneven`, by [`Display`](fmt::Display) and [`FromStr`].
///
/// | policy | last, incomplete global batch | every sample seen | same steps on every rank |
/// |---|---|---|---|
/// | `Exact` | divided as evenly as possible | exactly once | yes |
/// | `Pad` | filled up with samples from the start of the epoch | at least once | yes |
/// | `Drop` | left out | all but the last | yes |
/// | `Uneven` | the first ranks get theirs, the last ranks none | exactly once | no |
///
/// ```
/// use accelerator_plan::{BatchSize, PlanConfig, TailPolicy};
///
/// # fn main() -> accelerator_plan::Result<()> {
/// // Nine samples, two ranks, two each in a step: in the last one, a single sample is left.
/// let sizes = |tail| -> accelerator_plan::Result<[Vec<usize>; 2]> {
///     let config = PlanConfig::new(9, BatchSize::per_rank(2)?).with_world_size(2);
///     let epoch = config.with_tail(tail).init()?.epoch(0);
///     Ok([0, 1].map(|rank| epoch.rank(rank).map(|batch| batch.real).collect()))
/// };
/// assert_eq!(sizes(TailPolicy::Exact)?, [[2, 2, 1], [2, 2, 0]]);
/// assert_eq!(sizes(TailPolicy::Pad)?, [[2, 2, 1], [2, 2, 0]], "and three that come again");
/// assert_eq!(sizes(TailPolicy::Drop)?, [[2, 2], [2, 2]]);
/// assert_eq!(sizes(TailPolicy::Uneven)?, [vec![2, 2, 1], vec![2, 2]]);
/// assert_eq!("pad".parse::<TailPolicy>()?, TailPolicy::Pad);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TailPolicy {
    /// No duplicates: the samples that are left are divided over the ranks as evenly as possible,
    /// the first ranks get one more. Where fewer samples than ranks are left, the others idle:
    /// see [`BatchKind::Idle`](crate::BatchKind::Idle).
    #[default]
    Exact,
    /// Accelerate's `even_batches=True`, on its map-style and iterable shards alike: every batch
    /// is full; the missing samples are taken from the start of the epoch, over and over again
    /// where there are fewer samples than a global batch holds.
    Pad,
    /// Accelerate's `drop_last=True`: the whole incomplete global batch is left out.
    Drop,
    /// Accelerate's `even_batches=False`: every rank gets what is left of its share, a short batch
    /// or none. Ranks may differ in their number of steps, so it is for evaluation, not training.
    Uneven,
}

impl fmt::Display for TailPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Exact => "exact",
            Self::Pad => "pad",
            Self::Drop => "drop",
            Self::Uneven => "uneven",
        })
    }
}

impl FromStr for TailPolicy {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "exact" => Ok(Self::Exact),
            "pad" => Ok(Self::Pad),
            "drop" => Ok(Self::Drop),
            "uneven" => Ok(Self::Uneven),
            _ => Err(Error::new(
                Kind::Other,
                format!("{word:?} is no tail policy: write exact, pad, drop or uneven"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_policies_match() {
        for policy in [
            TailPolicy::Exact,
            TailPolicy::Pad,
            TailPolicy::Drop,
            TailPolicy::Uneven,
        ] {
            assert_eq!(policy.to_string().parse::<TailPolicy>().unwrap(), policy);
        }
        let error = "Pad".parse::<TailPolicy>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"Pad\" is no tail policy: write exact, pad, drop or uneven"
        );
    }
}
