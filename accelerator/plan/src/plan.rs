//! The plan of a run: the same for every epoch.

use std::ops::Range;
use std::sync::Arc;

use crate::config::Order;
use crate::epoch::EpochPlan;
use crate::error::{Error, Kind, Result};
use crate::tail::TailPolicy;

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
        EpochPlan::new(self.clone(), epoch)
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
    /// If the list is too long to count ([`Error::is_too_large`]).
    pub fn listed(&self, epoch: u64, order: impl Into<Arc<[u64]>>) -> Result<EpochPlan> {
        let order = order.into();
        let samples = order.len() as u64;
        if samples.checked_add(self.global).is_none() {
            return Err(Error::new(
                Kind::TooLarge,
                format!(
                    "{samples} samples and a global batch of {} cannot be counted together: give a smaller \
                     batch size",
                    self.global
                ),
            ));
        }
        let plan = Self {
            samples,
            ..self.clone()
        };
        Ok(EpochPlan::listed(plan, epoch, order))
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
