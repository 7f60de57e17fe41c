//! The plan of a run: the same for every epoch.

use crate::config::Order;
use crate::epoch::EpochPlan;
use crate::tail::TailPolicy;

/// Who gets which sample, in every epoch of a run.
///
/// Made by [`PlanConfig::init`](crate::PlanConfig::init). A global batch holds
/// [`global_batch`](Self::global_batch) samples; of the sequence of an epoch, global batch `k`
/// covers the positions from `k · global_batch` on, and rank `r` gets the `r`-th chunk of
/// [`batch_size`](Self::batch_size) positions of it. So the ranks together see the samples in the
/// order in which one rank with the global batch would.
#[derive(Clone, Debug)]
pub struct Plan {
    samples: u64,
    batch_size: usize,
    world_size: usize,
    tail: TailPolicy,
    order: Order,
}

impl Plan {
    /// The caller has checked that the sizes are not zero and can be counted.
    pub(crate) fn new(
        samples: u64,
        batch_size: usize,
        world_size: usize,
        tail: TailPolicy,
        order: Order,
    ) -> Self {
        Self {
            samples,
            batch_size,
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

    /// The samples of an epoch.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The samples of a rank's full batch.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// The samples that all ranks use in a full step.
    #[must_use]
    pub fn global_batch(&self) -> u64 {
        self.batch_size as u64 * self.world_size as u64
    }

    /// The number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// What becomes of the last, incomplete global batch.
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
