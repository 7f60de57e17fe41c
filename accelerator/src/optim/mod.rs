//! Optimizers with their schedules.
//!
//! A loop with a schedule, accumulation and clipping:
//!
//! ```
//! use accelerator::prelude::*;
//! use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
//! # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! # use burn::tensor::{Device, Tensor, TensorData};
//! # struct Rows;
//! # impl Batcher<f32, Tensor<2>> for Rows {
//! #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
//! #         let shape = [items.len(), 1];
//! #         Tensor::from_data(TensorData::new(items, shape), device)
//! #     }
//! # }
//!
//! # fn main() -> Result<()> {
//! let accelerator = Accelerator::builder().accumulation_steps(2).build()?;
//! let device = accelerator.device();
//! let model: Linear = LinearConfig::new(1, 1).init(&device);
//! let optimizer = AdamWConfig::new().init();
//! let scheduler = CosineAnnealingLrSchedulerConfig::new(1e-2, 100).init().unwrap();
//! # let dataset = InMemDataset::new(vec![0.5_f32; 40]);
//! let train = LoaderBuilder::new(Rows).batch_size(4).build(dataset);
//!
//! let (mut model, mut optimizer, train) =
//!     accelerator.prepare((model, (optimizer, scheduler), train))?;
//! for batch in train.epoch(0) {
//!     let batch = batch?;
//!     let loss = model.forward((*batch).clone()).powi_scalar(2).mean();
//!     // Nothing is communicated, and nothing steps, until the window of two is full.
//!     let gradients = accelerator.backward(loss, &model, &batch)?.clip_norm(1.0);
//!     model = optimizer.step(model, gradients);
//!     if let StepOutcome::Stepped { rate, norm } = optimizer.outcome() {
//!         accelerator.print(format_args!("rate {rate}, norm {norm:?}"));
//!     }
//! }
//! assert_eq!(optimizer.steps(), 5);
//! # accelerator.finish()
//! # }
//! ```
//!
//! # Warm-up
//!
//! Burn joins schedules to one. Over optimizer steps, 100 of warm-up, then a cosine over 900:
//!
//! ```
//! use accelerator::prelude::*;
//! use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
//! use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
//! use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;
//! use burn::lr_scheduler::LrSchedulerConfig;
//! use burn::optim::AdamWConfig;
//!
//! let parts = vec![
//!     LrSchedulerConfig::Linear(LinearLrSchedulerConfig::new(1e-6, 1e-3, 100)),
//!     LrSchedulerConfig::Cosine(CosineAnnealingLrSchedulerConfig::new(1e-3, 900)),
//! ];
//! let schedule = SequentialLrSchedulerConfig::new(parts, vec![100]).init().unwrap();
//!
//! let accelerator = Accelerator::new()?;
//! let optimizer = accelerator.prepare((AdamWConfig::new().init(), schedule))?;
//! # assert_eq!(optimizer.steps(), 0);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Frozen parameters, and groups
//!
//! Parameters are frozen by path with Burn's own `freeze_group`, before `prepare`: they get no gradient, are not
//! sent, and stay what they are. Groups with learning rates of their own are given to the scheduler, and those
//! with another optimizer to the optimizer:
//!
//! ```
//! use accelerator::prelude::*;
//! use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
//! use burn::module::{Module, ParamGroup};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::SgdConfig;
//! # use burn::tensor::Tensor;
//!
//! let accelerator = Accelerator::new()?;
//! let device = accelerator.device();
//! let model: Vec<Linear> = (0..3).map(|_| LinearConfig::new(2, 2).init(&device)).collect();
//! # #[derive(Debug, Module)]
//! # struct Net { layers: Vec<Linear> }
//! # let model = Net { layers: model };
//! let model = model.freeze_group(ParamGroup::from_predicate("layers.0."));
//! let scheduler = ModuleLrScheduler::new(1e-3)
//!     .with_group(ParamGroup::from_predicate("layers.2."), 1e-2);
//! let (mut model, mut optimizer) =
//!     accelerator.prepare((model, (SgdConfig::new().init(), scheduler)))?;
//! # let input = Tensor::<2>::ones([1, 2], &device);
//! # let before: Vec<_> = model.layers.iter().map(|layer| layer.weight.val().into_data()).collect();
//! # let loss = model.layers.iter().fold(input, |x, layer| layer.forward(x) + 0.1).powi_scalar(2).mean();
//! # let gradients = accelerator.backward(loss, &model, 1)?;
//! # model = optimizer.step(model, gradients);
//! # assert_eq!(model.layers[0].weight.val().into_data(), before[0]);
//! # assert_ne!(model.layers[1].weight.val().into_data(), before[1]);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Freezing and unfreezing on the way
//!
//! Fine-tuning often trains a new head first, and all of the model later. Freeze or unfreeze with Burn's methods
//! between two steps, and prepare the model again, on every rank:
//!
//! ```
//! use accelerator::prelude::*;
//! use burn::module::{Module, ParamGroup};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::AdamWConfig;
//! # use burn::tensor::Tensor;
//!
//! #[derive(Debug, Module)]
//! struct Net {
//!     base: Linear,
//!     head: Linear,
//! }
//!
//! let accelerator = Accelerator::new()?;
//! let device = accelerator.device();
//! let model = Net {
//!     base: LinearConfig::new(2, 2).init(&device),
//!     head: LinearConfig::new(2, 1).init(&device),
//! };
//! let base = || ParamGroup::from_predicate("base.");
//! let parts = (model.freeze_group(base()), AdamWConfig::new().init());
//! let (mut model, mut optimizer) = accelerator.prepare(parts)?;
//! # let pretrained = model.base.weight.val().into_data();
//! for step in 0..6 {
//!     if step == 3 {
//! #         assert_eq!(model.base.weight.val().into_data(), pretrained);
//!         model = accelerator.prepare(model.unfreeze_group(base()))?;
//!     }
//!     let input = Tensor::<2>::ones([4, 2], &device);
//!     let loss = model.head.forward(model.base.forward(input)).powi_scalar(2).mean();
//!     let gradients = accelerator.backward(loss, &model, 4)?;
//!     model = optimizer.step(1e-2, model, gradients);
//! }
//! # assert_ne!(model.base.weight.val().into_data(), pretrained);
//! assert_eq!(optimizer.steps(), 6);
//! # Ok::<(), Error>(())
//! ```
//!
//! What is kept, and what is reset, when a model is prepared again:
//!
//! | kept | reset |
//! |---|---|
//! | the optimizer, with the state of every parameter. That of a frozen one waits until it is trained again; where it is [`Sharded`], it stays on its rank | the buckets, which hold the gradients of what is trained |
//! | the schedule; the count of steps | [overlap](crate::Overlap), which records the order of gradients again in two windows |
//! | the [scale of losses](crate::precision) | what a [communication hook](crate::hook) keeps |
//! | [`Ema`](crate::Ema), [`DiLoCo`](crate::local::DiLoCo), running statistics, which are brought together over the ranks | |
//!
//! Let the optimizer use the gradients of the last `backward` before. In the middle of an accumulation window, or
//! of [local training](crate::local), `prepare` returns [`Error::is_misuse`](crate::Error::is_misuse) on every
//! rank, and the model is unchanged.
//!
//! A checkpoint keeps the state of all parameters, and not which of them are frozen. After
//! [`resume`](crate::Accelerator::resume), freeze what is frozen at [`Position::step`] or
//! [`Position::epoch`], and prepare the model again; or freeze it before the first `prepare`.
//!
//! Freezing alone, without `prepare`, trains the same values: what is frozen has no gradient on any rank. But its
//! place in the buckets is still sent. Unfreezing alone is an error of the next `backward`, and so is freezing some
//! places of a [tied parameter](crate::model::retie_parameters) and not the others.
//!
//! [`Position::step`]: crate::checkpoint::Position::step
//! [`Position::epoch`]: crate::checkpoint::Position::epoch

pub mod fused;
mod optimizer_state;
mod prepared;
mod record_io;
mod schedule;
mod sharded;
mod training_plan;
mod unsharded;

pub use self::fused::InitFused;
pub(crate) use self::optimizer_state::{OptimizerSnapshot, OptimizerState, ScheduleKind};
pub(crate) use self::prepared::OptimizerCount;
pub use self::prepared::{PreparedOptimizer, StepOutcome};
pub(crate) use self::record_io::{check_known, check_types, other_state};
pub use self::schedule::{IntoLearningRate, Manual, PerEpoch, PerProcess, Scheduled};
pub(crate) use self::schedule::{ScheduleUnit, Scheduler};
pub use self::sharded::Sharded;
pub(crate) use self::sharded::{RankRecord, Shards, WholeState};
pub use self::training_plan::{RateScaling, TrainingPlan};
