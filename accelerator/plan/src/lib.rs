//! A pure, resumable sharding plan: which rank gets which sample.
//!
//! A [`Plan`] divides the samples of an epoch over the ranks of a job. It is a pure function of
//! the number of samples, the batch size, the world size, the rank, the seed, the epoch, the
//! [`TailPolicy`] and the offset to start from: every rank computes its own share, without
//! communication, without a list of indices in memory, and from any position.
//!
//! ```
//! use accelerator_plan::{BatchSize, Order, PlanConfig};
//!
//! # fn main() -> accelerator_plan::Result<()> {
//! // Ten samples, two ranks, batches of three: the first global batch holds six samples, the
//! // other four are divided evenly.
//! let plan = PlanConfig::new(10, BatchSize::per_rank(3)?).with_world_size(2).init()?;
//! let epoch = plan.epoch(0);
//! let share = |rank| epoch.rank(rank).map(|batch| batch.indices).collect::<Vec<_>>();
//! assert_eq!(share(0), [vec![0, 1, 2], vec![6, 7]]);
//! assert_eq!(share(1), [vec![3, 4, 5], vec![8, 9]]);
//!
//! // The same, shuffled; six samples are done, and the job continues with three ranks.
//! let plan = PlanConfig::new(10, BatchSize::per_rank(3)?)
//!     .with_world_size(3)
//!     .with_order(Order::Shuffled { seed: 42 })
//!     .init()?;
//! let rest = plan.epoch(0).starting_at(6)?;
//! let sizes = [0, 1, 2].map(|rank| rest.rank(rank).map(|batch| batch.real).sum::<usize>());
//! assert_eq!(sizes, [2, 1, 1]);
//! # Ok(())
//! # }
//! ```
//!
//! The order can also be given: that of an epoch's samples ([`Plan::listed`]),
//! by weights for example ([`WeightedSampler`]), or whole batches of any size ([`BatchPlan`]), such as
//! those with a limit on their tokens ([`TokenBatches`]).
//!
//! The order of a shuffled epoch is a [`Permutation`], computed by index; randomness that belongs
//! to one sample, such as augmentation, is seeded by [`sample_rng_seed`].

pub use batch_plan::BatchPlan;
pub use config::{BatchSize, PlanConfig};
pub use error::{Error, Result};
pub use permutation::{Permutation, mix, sample_rng_seed};
pub use plan::{BatchKind, EpochPlan, Order, Plan, PlannedBatch, RankBatches, TailPolicy};
pub use token_batches::TokenBatches;
pub use weighted::WeightedSampler;

mod batch_plan;
mod config;
mod error;
mod permutation;
mod plan;
mod token_batches;
mod weighted;
