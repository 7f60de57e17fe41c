//! The settings by which samples are read, and the assignment of an epoch's batches to ranks.

use core::fmt;
use core::panic::Location;
use std::sync::Arc;

use accelerator_collective::ProcessGroup;
use accelerator_plan::{
    self as plan, BatchPlan, BatchSize, EpochPlan, Plan, PlanConfig, PlannedBatch, TailPolicy,
    TokenBatches, mix,
};

use super::cursor::EpochPosition;
use super::exchange_step::{ReadPosition, exchange_step};
use crate::core::agreement::sides;
use crate::core::error::{Error, Kind, Result};

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

    /// Plans how `batches` whole batches are divided among ranks, one per rank and step.
    pub(super) fn rounds(&self, batches: u64, world_size: usize) -> Result<Plan> {
        Ok(PlanConfig::new(batches, BatchSize::per_rank(1)?)
            .with_world_size(world_size)
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
            _ if matches!(self.order, SampleOrder::Tokens(_)) => "batches by tokens".to_owned(),
            _ if self.order.is_batched() => "batches that are given".to_owned(),
            BatchSizeSpec::Global(size) => format!("a global batch size of {size}"),
            BatchSizeSpec::PerRank(size) => format!("a batch size of {size}"),
        }
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

/// The order in which an epoch goes through the samples.
#[derive(Clone, Default)]
pub(super) enum SampleOrder {
    #[default]
    Sequential,
    Shuffled {
        seed: u64,
    },
    /// The order that a function of the epoch gives.
    Listed(Listed),
    /// The batches that a function of the epoch gives.
    Batched(Arc<dyn Fn(u64) -> Vec<Vec<u64>> + Send + Sync>),
    /// Batches with a limit on their tokens, or the error that prevented them.
    Tokens(Result<Arc<TokenOrder>>),
}

/// Batches with a limit on their tokens, shuffled if there is a seed.
pub(super) struct TokenOrder {
    pub(super) batches: TokenBatches,
    pub(super) seed: Option<u64>,
    pub(super) name: String,
}

impl TokenOrder {
    fn epoch(&self, epoch: u64) -> Vec<Vec<u64>> {
        match self.seed {
            Some(seed) => self.batches.shuffled(seed, epoch),
            None => self.batches.longest_first(),
        }
    }
}

#[derive(Clone)]
pub(super) struct Listed {
    /// The number of samples that it chooses from, if known.
    pub(super) choices: Option<u64>,
    /// The number of samples per epoch, if known.
    pub(super) draws: Option<u64>,
    pub(super) list: Arc<dyn Fn(u64) -> Vec<u64> + Send + Sync>,
    pub(super) name: String,
}

impl SampleOrder {
    /// The order where positions are computed, and that of positions where they are listed.
    pub(super) fn by_index(&self) -> plan::Order {
        match *self {
            Self::Shuffled { seed } => plan::Order::Shuffled { seed },
            _ => plan::Order::Sequential,
        }
    }

    /// Returns the number of samples per epoch, if it differs from that of the data set.
    pub(super) fn draws(&self) -> Option<u64> {
        match self {
            Self::Listed(listed) => listed.draws,
            _ => None,
        }
    }

    /// Refuses an order that is made for another data set than one of so many samples.
    pub(super) fn check(&self, samples: u64) -> Result<()> {
        match self {
            Self::Listed(Listed {
                choices: Some(choices),
                ..
            }) if *choices != samples => Err(Error::config(format!(
                "the sampler has {choices} weights, and the data set has {samples} samples: give each \
                 sample a weight"
            ))),
            Self::Tokens(order) => order.clone().map(drop),
            _ => Ok(()),
        }
    }

    /// Tells if only the epoch's own list determines its numbers of samples and steps.
    pub(super) fn varies(&self) -> bool {
        match self {
            Self::Sequential | Self::Shuffled { .. } => false,
            Self::Listed(listed) => listed.draws.is_none(),
            Self::Batched(_) | Self::Tokens(_) => true,
        }
    }

    /// Tells if whole batches are given, so that batch sizes do not count.
    pub(super) fn is_batched(&self) -> bool {
        matches!(self, Self::Batched(_) | Self::Tokens(_))
    }

    /// Returns the order of a part of the samples, if it is made for all of them.
    pub(super) fn slice(self, samples: core::ops::Range<usize>) -> Self {
        match self {
            Self::Tokens(order) => Self::Tokens(order.map(|order| {
                Arc::new(TokenOrder {
                    batches: order.batches.slice(samples),
                    seed: order.seed,
                    name: order.name.clone(),
                })
            })),
            order => order,
        }
    }

    /// Returns the number of batches per epoch, if it is fixed.
    pub(super) fn batches(&self) -> Option<u64> {
        match self {
            Self::Tokens(order) => Some(order.as_ref().ok()?.batches.len() as u64),
            _ => None,
        }
    }

    /// Tells if the program's own code gives it, so that ranks may differ.
    pub(super) fn is_given(&self) -> bool {
        matches!(self, Self::Listed(_) | Self::Batched(_) | Self::Tokens(_))
    }
}

impl fmt::Display for SampleOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sequential => f.write_str("in sequence"),
            Self::Shuffled { seed } => write!(f, "shuffled by {seed}"),
            Self::Listed(listed) => f.write_str(&listed.name),
            Self::Batched(_) => f.write_str("that of a batch sampler"),
            Self::Tokens(order) => match order {
                Ok(order) => f.write_str(&order.name),
                Err(_) => f.write_str("batches with a limit on their tokens"),
            },
        }
    }
}

impl fmt::Debug for SampleOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The assignment of an epoch's samples to ranks.
pub(super) struct EpochAssignment {
    pub(super) share: EpochBatches,
    /// The digest of the samples in their order, if the program gave it.
    pub(super) digest: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) enum EpochBatches {
    Batches(BatchPlan),
    Samples(EpochPlan),
}

impl EpochAssignment {
    pub(super) fn new(spec: &Spec, plan: &Plan, samples: u64, epoch: u64) -> Result<Self> {
        Ok(match &spec.order {
            SampleOrder::Sequential | SampleOrder::Shuffled { .. } => Self {
                share: EpochBatches::Samples(plan.epoch(epoch)),
                digest: None,
            },
            SampleOrder::Listed(listed) => {
                let list = (listed.list)(epoch);
                check_range(&list, samples, epoch)?;
                Self {
                    digest: Some(mix(&list)),
                    share: EpochBatches::Samples(plan.listed(epoch, list)?),
                }
            }
            SampleOrder::Batched(batches) => {
                Self::batched(batches(epoch), spec, plan.world_size(), samples, epoch)?
            }
            SampleOrder::Tokens(order) => {
                let batches = order.clone()?.epoch(epoch);
                Self::batched(batches, spec, plan.world_size(), samples, epoch)?
            }
        })
    }

    fn batched(
        batches: Vec<Vec<u64>>,
        spec: &Spec,
        ranks: usize,
        samples: u64,
        epoch: u64,
    ) -> Result<Self> {
        for batch in &batches {
            check_range(batch, samples, epoch)?;
        }
        let digests: Vec<_> = batches.iter().map(|batch| mix(batch)).collect();
        let batches = BatchPlan::new(batches, ranks, spec.tail)?;
        Ok(Self {
            share: EpochBatches::Batches(batches),
            digest: Some(mix(&digests)),
        })
    }

    /// Compares what was given on each rank, and fails on all alike where ranks differ.
    pub(super) fn agreed(
        mine: Result<Self>,
        group: &ProcessGroup,
        position: ReadPosition,
        caller: &'static Location<'static>,
    ) -> Result<Self> {
        if group.world_size() == 1 {
            return mine;
        }
        let digest = mine.as_ref().map(|assignment| assignment.digest);
        let digests = exchange_step(group, position, digest, "sample an epoch", caller)?;
        let mine = mine?;
        if digests.iter().all(|digest| *digest == mine.digest) {
            return Ok(mine);
        }
        Err(Error::new(
            Kind::Data,
            format!(
                "the sampler gives ranks different orders of epoch {} (digests: {}), so samples would be \
                 used twice or never; make it depend on the epoch alone: no random numbers but those that a \
                 seed which all ranks share gives, and no order of a hash map",
                position.epoch,
                sides(digests.into_iter().map(shown))
            ),
        ))
    }

    /// Checks that an epoch of which a part was used continues in the order in which it began.
    pub(super) fn continues_from(&self, start: EpochPosition) -> Result<()> {
        match (start.digest, self.digest) {
            (Some(saved), Some(mine)) if saved != mine && start.step > 0 => Err(Error::new(
                Kind::Checkpoint,
                format!(
                    "the checkpoint does not fit the loader: epoch {} continues after {} samples of the order \
                     that was given when it was saved (digest {}), and another order is given here (digest \
                     {}), so samples would be used twice or never; give the order, the batches or the weights \
                     as they were, make them depend on the epoch alone, or start afresh in another folder",
                    start.epoch,
                    start.consumed,
                    shown(Some(saved)),
                    shown(Some(mine))
                ),
            )),
            _ => Ok(()),
        }
    }
}

fn shown(digest: Option<u64>) -> String {
    format!("{:016x}", digest.unwrap_or(0))
}

impl EpochBatches {
    pub(super) fn steps(&self, rank: usize) -> u64 {
        match self {
            Self::Batches(plan) => plan.steps(rank),
            Self::Samples(plan) => plan.steps(rank),
        }
    }

    pub(super) fn batch(&self, rank: usize, step: u64) -> Option<PlannedBatch> {
        match self {
            Self::Batches(plan) => plan.batch(rank, step),
            Self::Samples(plan) => plan.batch(rank, step),
        }
    }

    /// Returns the number of samples that this rank sees for the first time.
    pub(super) fn real(&self, rank: usize) -> usize {
        let real = |step| self.batch(rank, step).map_or(0, |batch| batch.real);
        match (self, self.steps(rank)) {
            (_, 0) => 0,
            (Self::Batches(_), steps) => (0..steps).map(real).sum(),
            // All steps but the last are alike.
            (Self::Samples(_), steps) => (steps as usize - 1) * real(0) + real(steps - 1),
        }
    }

    pub(super) fn consumed_after(&self, step: u64) -> u64 {
        match self {
            Self::Batches(plan) => plan.consumed_after(step),
            Self::Samples(plan) => plan.consumed_after(step),
        }
    }

    pub(super) fn starting_at(self, consumed: u64) -> Result<Self> {
        Ok(match self {
            Self::Batches(plan) => Self::Batches(plan.starting_at(consumed)?),
            Self::Samples(plan) => Self::Samples(plan.starting_at(consumed)?),
        })
    }
}

fn check_range(list: &[u64], samples: u64, epoch: u64) -> Result<()> {
    match list.iter().find(|&&index| index >= samples) {
        None => Ok(()),
        Some(index) => Err(Error::new(
            Kind::Data,
            format!(
                "the sampler gave sample {index} in epoch {epoch}, and the data set has {samples}, counted \
                 from 0"
            ),
        )),
    }
}
