use core::fmt;

use accelerator_plan::{BatchSize, Plan, PlanConfig, TailPolicy};

use super::order::SampleOrder;
use crate::core::error::Result;

/// The way in which samples are read, whatever they are.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    /// The global batch size of the checkpoint that training continued from, instead of `size`.
    agreed: Option<u64>,
    pub(super) order: SampleOrder,
    pub(super) prefetch: usize,
    pub(super) size: BatchSizeSpec,
    pub(super) tail: TailPolicy,
    pub(super) workers: usize,
}

/// The batch size as the user set it.
#[derive(Clone, Copy, Debug)]
pub(super) enum BatchSizeSpec {
    Global(usize),
    PerRank(usize),
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            agreed: None,
            order: SampleOrder::default(),
            prefetch: 2,
            size: BatchSizeSpec::PerRank(1),
            tail: TailPolicy::default(),
            workers: 1,
        }
    }
}

impl Spec {
    /// Plans which rank gets which of `samples` samples, or of those that the order draws.
    pub(super) fn plan(&self, samples: u64, world_size: usize) -> Result<Plan> {
        let size = match (self.agreed, self.size) {
            (Some(size), _) => BatchSize::global(usize::try_from(size).unwrap_or(usize::MAX))?,
            (None, BatchSizeSpec::Global(size)) => BatchSize::global(size)?,
            (None, BatchSizeSpec::PerRank(size)) => BatchSize::per_rank(size)?,
        };
        let samples = self.order.draws().unwrap_or(samples);
        Ok(PlanConfig::new(samples, size)
            .with_world_size(world_size)
            .with_order(self.order.by_index())
            .with_tail(self.tail)
            .init()?)
    }

    /// Sets that global batch size, whatever the user set.
    pub(super) fn agreed(self, global_batch: Option<u64>) -> Self {
        Self {
            agreed: global_batch,
            ..self
        }
    }

    /// The batch size that the user gave, in words.
    pub(super) fn size(&self) -> String {
        match self.size {
            _ if matches!(self.order, SampleOrder::Batched(_)) => {
                "batches that are given".to_owned()
            }
            BatchSizeSpec::Global(size) => format!("a global batch size of {size}"),
            BatchSizeSpec::PerRank(size) => format!("a batch size of {size}"),
        }
    }

    pub(super) fn order(&self) -> &SampleOrder {
        &self.order
    }

    pub(super) fn tail(&self) -> TailPolicy {
        self.tail
    }

    pub(super) fn is_uneven(&self) -> bool {
        self.tail == TailPolicy::Uneven
    }
}

/// The settings that must be the same on every rank.
impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, order, tail) = (self.size(), &self.order, self.tail);
        write!(f, "{size}, {order}, tail policy {tail}")
    }
}
