//! The settings of a plan.

use std::num::NonZeroUsize;

use crate::error::{Error, Kind, Result};
use crate::plan::{Order, Plan, TailPolicy};

/// The number of samples of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BatchSize {
    /// Samples per rank and step: the global batch grows with the world size.
    PerRank(NonZeroUsize),
    /// Samples per step over all ranks (Accelerate's `split_batches`), at least one per rank.
    ///
    /// If it does not divide over the ranks, the first ranks get one sample more in every step.
    /// [`TailPolicy::Pad`] and [`TailPolicy::Uneven`] want a multiple of the world size, as
    /// Accelerate does.
    Global(NonZeroUsize),
}

impl BatchSize {
    /// A batch of this many samples per rank and step.
    ///
    /// # Errors
    ///
    /// If it is zero ([`Error::is_batch_size`]).
    pub fn per_rank(samples: usize) -> Result<Self> {
        non_zero(samples).map(Self::PerRank)
    }

    /// A batch of this many samples per step over all ranks.
    ///
    /// # Errors
    ///
    /// If it is zero ([`Error::is_batch_size`]).
    pub fn global(samples: usize) -> Result<Self> {
        non_zero(samples).map(Self::Global)
    }
}

/// The settings of a [`Plan`]: one rank, [`TailPolicy::Exact`] and sequential order unless said
/// otherwise.
///
/// ```
/// use accelerator_plan::{BatchSize, Order, PlanConfig, TailPolicy};
///
/// # fn main() -> accelerator_plan::Result<()> {
/// let plan = PlanConfig::new(60_000, BatchSize::global(128)?)
///     .with_world_size(4)
///     .with_tail(TailPolicy::Drop)
///     .with_order(Order::Shuffled { seed: 42 })
///     .init()?;
/// assert_eq!(plan.batch_size(), 32);
/// assert_eq!(plan.epoch(0).steps(0), 468);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct PlanConfig {
    samples: u64,
    batch_size: BatchSize,
    world_size: usize,
    tail: TailPolicy,
    order: Order,
}

impl PlanConfig {
    /// A plan for so many samples in batches of this size.
    #[must_use]
    pub fn new(samples: u64, batch_size: BatchSize) -> Self {
        Self {
            samples,
            batch_size,
            world_size: 1,
            tail: TailPolicy::default(),
            order: Order::default(),
        }
    }

    /// Divides the samples over so many ranks.
    #[must_use]
    pub fn with_world_size(mut self, ranks: usize) -> Self {
        self.world_size = ranks;
        self
    }

    /// Chooses what becomes of the last, incomplete global batch.
    #[must_use]
    pub fn with_tail(mut self, tail: TailPolicy) -> Self {
        self.tail = tail;
        self
    }

    /// Chooses the order of the samples.
    #[must_use]
    pub fn with_order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// The plan, its settings checked.
    ///
    /// # Errors
    ///
    /// If the world size is zero ([`Error::is_world_size`]), a global batch holds fewer samples than
    /// there are ranks or does not divide over them under a policy that wants it to
    /// ([`Error::is_batch_size`]), or a batch or the whole plan is too large to count: a rank's
    /// batch may hold 2³² − 1 samples, and the samples plus one global batch must stay below 2⁶⁴.
    pub fn init(self) -> Result<Plan> {
        let Self {
            samples,
            batch_size,
            world_size,
            tail,
            order,
        } = self;
        let Some(ranks) = NonZeroUsize::new(world_size) else {
            return Err(Error::no_ranks());
        };
        let global = match batch_size {
            BatchSize::PerRank(size) => (size.get() as u64).checked_mul(world_size as u64),
            BatchSize::Global(size) => {
                check_divisible(size.get(), ranks, tail)?;
                Some(size.get() as u64)
            }
        };
        let largest = match batch_size {
            BatchSize::PerRank(size) => size.get(),
            BatchSize::Global(size) => size.get().div_ceil(world_size),
        };
        // Positions run at most one global batch past the samples; below this bound none overflows.
        let global = global.filter(|&global| {
            u32::try_from(largest).is_ok() && samples.checked_add(global).is_some()
        });
        let Some(global) = global else {
            return Err(Error::new(
                Kind::Other,
                format!(
                    "{samples} samples in batches of {largest} on {world_size} ranks cannot be counted: \
                     give a smaller batch size, at most {} a rank, so that the samples and one global \
                     batch stay below 2^64 together",
                    u32::MAX
                ),
            ));
        };
        Ok(Plan::new(samples, global, world_size, tail, order))
    }
}

fn non_zero(samples: usize) -> Result<NonZeroUsize> {
    NonZeroUsize::new(samples).ok_or_else(|| {
        Error::new(
            Kind::BatchSize,
            "the batch size is 0: give the number of samples in a batch, at least 1".to_owned(),
        )
    })
}

/// Checks that every rank gets a share of a global batch that the tail policy can work with.
fn check_divisible(size: usize, ranks: NonZeroUsize, tail: TailPolicy) -> Result<()> {
    let ranks = ranks.get();
    let is_multiple = size.is_multiple_of(ranks);
    match tail {
        _ if is_multiple => Ok(()),
        TailPolicy::Exact | TailPolicy::Drop if size >= ranks => Ok(()),
        TailPolicy::Exact | TailPolicy::Drop => Err(Error::new(
            Kind::BatchSize,
            format!(
                "a global batch of {size} samples cannot be divided over {ranks} ranks, some would have none in every \
                 step: give at least {ranks}, or start at most {size} ranks"
            ),
        )),
        TailPolicy::Pad | TailPolicy::Uneven => Err(indivisible(size, ranks, tail)),
    }
}

fn indivisible(size: usize, world_size: usize, tail: TailPolicy) -> Error {
    let below = size - size % world_size;
    let above = below.saturating_add(world_size);
    let advice = if below == 0 {
        format!("{above}")
    } else {
        format!("{below} or {above}")
    };
    Error::new(
        Kind::BatchSize,
        format!(
            "a global batch of {size} samples does not divide over {world_size} ranks, which the tail policy {tail} \
             wants: give a multiple of the world size, for example {advice}, or a batch size per rank, or choose exact"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_zero() {
        for refused in [BatchSize::per_rank(0), BatchSize::global(0)] {
            let error = refused.unwrap_err();
            assert!(error.is_batch_size());
            assert!(error.to_string().contains("at least 1"), "{error}");
        }
        let error = PlanConfig::new(1, BatchSize::per_rank(1).unwrap())
            .with_world_size(0)
            .init()
            .unwrap_err();
        assert!(error.is_world_size() && !error.is_batch_size());
        assert!(error.to_string().contains("at least 1"), "{error}");
    }

    #[test]
    fn refuses_a_global_batch_that_a_policy_cannot_divide() {
        let advice = |size, ranks, tail| {
            let error = PlanConfig::new(9, BatchSize::global(size).unwrap())
                .with_world_size(ranks)
                .with_tail(tail)
                .init()
                .unwrap_err();
            assert!(error.is_batch_size());
            error.to_string()
        };
        for tail in [TailPolicy::Pad, TailPolicy::Uneven] {
            let text = advice(10, 4, tail);
            assert!(text.contains("for example 8 or 12"), "{text}");
            let text = advice(3, 4, tail);
            assert!(text.contains("for example 4, or"), "{text}");
            assert!(advice(usize::MAX, 2, tail).contains("multiple of the world size"));
        }
        for tail in [TailPolicy::Exact, TailPolicy::Drop] {
            let text = advice(3, 4, tail);
            assert!(
                text.contains("at least 4") && text.contains("at most 3 ranks"),
                "{text}"
            );
        }
    }

    #[test]
    fn refuses_what_cannot_be_counted() {
        let init = |samples, size, ranks| {
            PlanConfig::new(samples, BatchSize::per_rank(size).unwrap())
                .with_world_size(ranks)
                .init()
        };
        for (samples, size, ranks) in [
            (u64::MAX, 1, 1),
            (u64::MAX - 8, 2, 5),
            (10, usize::MAX, 1),
            (10, 2, usize::MAX),
        ] {
            let error = init(samples, size, ranks).unwrap_err();
            assert!(error.to_string().contains("cannot be counted"), "{error}");
        }
        let plan = init(u64::MAX - 10, 2, 5).unwrap();
        assert_eq!(plan.epoch(0).steps(0), u64::MAX / 10 - 1 + 1);
    }
}
