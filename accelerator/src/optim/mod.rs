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
//! let train = DataLoaderBuilder::new(Rows).batch_size(4).build(dataset);
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
//! What goes on, and what begins anew, when a model is prepared again:
//!
//! | goes on | begins anew |
//! |---|---|
//! | the optimizer, with the state of every parameter. That of a frozen one waits until it is trained again; where it is [`Sharded`], it stays on its rank | the buckets, which hold the gradients of what is trained |
//! | the schedule; the count of steps | [overlap](crate::Overlap), which learns again in two windows when gradients are ready |
//! | the [scale of losses](crate::precision) | what a [communication hook](crate::hook) keeps |
//! | [`Ema`](crate::Ema), [`DiLoCo`](crate::local::DiLoCo), running statistics, which are brought together over the ranks | |
//!
//! Let the optimizer use the gradients of the last `backward` before. In the middle of an accumulation window, or
//! of [local training](crate::local), `prepare` returns [`Error::is_misuse`](crate::Error::is_misuse) on every
//! rank, and the model goes on as it was.
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

mod census;
mod factor;
pub mod fused;
mod plan;
mod rate;
mod schedule;
mod sharded;
mod state;
mod whole;

use core::fmt;
use std::collections::HashSet;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::Device;

pub(crate) use self::census::{Census, Counted, StateOf};
pub use self::fused::InitFused;
pub use self::plan::{RateScaling, TrainingPlan};
pub use self::rate::IntoLearningRate;
use self::rate::ManualRates;
pub(crate) use self::schedule::Scheduler;
pub use self::schedule::{Manual, PerEpoch, PerProcess, Scheduled};
pub use self::sharded::Sharded;
pub(crate) use self::sharded::Shards;
pub(crate) use self::state::{
    OptimizerSnapshot, OptimizerState, Schedule, check_known, check_types, other_state,
};
use self::whole::Kinds;
use crate::accelerator::Accelerator;
use crate::error::Result;
use crate::gradient::{Averaged, Gradients, Scalar};
use crate::model::{Layout, Trainable};
use crate::notice;
use crate::timeline::{Part, Phase, Timeline};

/// What the last [`PreparedOptimizer::step`] did.
///
/// ```
/// use accelerator::prelude::*;
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::optim::SgdConfig;
/// # use burn::tensor::Tensor;
///
/// let accelerator = Accelerator::builder().accumulation_steps(2).build()?;
/// # let device = accelerator.device();
/// # let model: Linear = LinearConfig::new(2, 1).init(&device);
/// # let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
/// # let mut outcomes = Vec::new();
/// for _ in 0..4 {
///     let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
///     let gradients = accelerator.backward(loss, &model, 4)?;
///     model = optimizer.step(0.1, model, gradients);
///     match optimizer.outcome() {
///         StepOutcome::Stepped { rate, .. } => accelerator.print(format_args!("rate {rate}")),
///         StepOutcome::Skipped { scale } => accelerator.print(format_args!("skipped at {scale}")),
///         _ => {}
///     }
/// #     outcomes.push(matches!(optimizer.outcome(), StepOutcome::Stepped { .. }));
/// }
/// # assert_eq!(outcomes, [false, true, false, true]);
/// assert_eq!(optimizer.steps(), 2);
/// # Ok::<(), Error>(())
/// ```
///
/// Whether it was worth a line in a log:
///
/// ```
/// use accelerator::prelude::*;
///
/// fn told(outcome: StepOutcome) -> Option<String> {
///     match outcome {
///         StepOutcome::Accumulated => None,
///         StepOutcome::Idle => Some("no samples on this rank".to_owned()),
///         StepOutcome::Lost => Some("another rank is lost".to_owned()),
///         other => Some(format!("{other:?}")),
///     }
/// }
/// assert_eq!(told(StepOutcome::Accumulated), None);
/// assert_eq!(told(StepOutcome::Skipped { scale: 8.0 }).unwrap(), "Skipped { scale: 8.0 }");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum StepOutcome {
    /// The accumulation window is not full: the model is as it was, and so is the schedule.
    Accumulated,
    /// This rank had no sample in a [local step](crate::local): the model is as it was. The step and the
    /// schedule count on, as on ranks that had some.
    Idle,
    /// Another rank was lost while a [`Sharded`] optimizer stepped, or while what it had left on the ranks
    /// was gathered for another one: the model is as it was, and so are the
    /// schedule and the scale of losses; the batches of the step count as not used, and come again after an
    /// emergency checkpoint. The next call that communicates returns the error, which names the rank. It is the
    /// same where such an optimizer got gradients of [local training](crate::local), whose next call says what
    /// to do: [`Error::is_misuse`](crate::Error::is_misuse).
    ///
    /// Ranks may differ by one step: one that had every new value before the other rank was lost has
    /// `Stepped`. On each rank the model is consistent, and the group has ended.
    Lost,
    /// Gradients were not finite in [`Precision::F16`](crate::precision::Precision::F16), on all ranks alike: the
    /// model is as it was, and so is the schedule. The next losses are scaled by less. In a
    /// [local step](crate::local) it is this rank alone, whose schedule keeps pace with the others'.
    Skipped {
        /// By what the loss was multiplied.
        scale: f64,
    },
    /// The model was updated.
    Stepped {
        /// The base learning rate of this step; those of groups with rates of their own are told by
        /// [`PreparedOptimizer::learning_rates`].
        rate: f64,
        /// The norm of the averaged gradient before clipping, where it was computed.
        norm: Option<f64>,
    },
}

/// An optimizer that steps once a window, and advances its schedule exactly then.
///
/// Made by [`Accelerator::prepare`](crate::Accelerator::prepare). With a scheduler `S` is
/// [`Scheduled`], without one it is [`Manual`] and `step` takes the rate, as Burn's own does.
///
/// ```
/// use accelerator::optim::{PreparedOptimizer, Scheduled};
/// # use accelerator::prelude::*;
/// # use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
/// # use burn::optim::AdamConfig;
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::Tensor;
/// # let accelerator = Accelerator::new()?;
/// # let device = accelerator.device();
/// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
///
/// struct Trainer {
///     model: Linear,
///     optimizer: PreparedOptimizer<Scheduled>,
/// }
///
/// let schedule = LinearLrSchedulerConfig::new(0.5, 0.25, 2).init().unwrap();
/// let optimizer = accelerator.prepare((AdamConfig::new().init(), schedule))?;
/// let mut trainer = Trainer { model, optimizer };
/// for rate in [0.5, 0.375, 0.25] {
///     let loss = trainer.model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
///     let gradients = accelerator.backward(loss, &trainer.model, 4)?;
///     trainer.model = trainer.optimizer.step(trainer.model, gradients);
///     assert_eq!(trainer.optimizer.learning_rate(), Some(rate));
/// }
/// assert_eq!(trainer.optimizer.steps(), 3);
/// # Ok::<(), Error>(())
/// ```
pub struct PreparedOptimizer<S> {
    _counted: Counted,
    /// What the rates of the schedule are multiplied by, since training went on at another size.
    factor: f64,
    kinds: Kinds,
    /// Of the last step; it may still be on the device.
    norm: Option<Scalar>,
    optimizer: ModuleOptimizer,
    /// Without the norm.
    outcome: StepOutcome,
    /// The parameters that a checkpoint had state for, until the first step after it.
    resumed: HashSet<u64>,
    schedule: S,
    /// Of an optimizer whose state is shared out over several ranks.
    shards: Option<Shards>,
    steps: u64,
    timeline: Timeline,
    /// Where to step samples, until it is known that state which came with the optimizer fits the model.
    unchecked: Option<Device>,
}

impl<S> PreparedOptimizer<S> {
    fn new(
        (optimizer, shards): (ModuleOptimizer, Option<Shards>),
        schedule: S,
        accelerator: &Accelerator,
    ) -> Self {
        let state = match shards {
            Some(_) => StateOf::Shards,
            None => StateOf::Whole,
        };
        Self {
            _counted: accelerator.shared.optimizers.count(state),
            factor: 1.0,
            kinds: Kinds::default(),
            norm: None,
            optimizer,
            outcome: StepOutcome::Accumulated,
            resumed: HashSet::new(),
            schedule,
            shards,
            steps: 0,
            timeline: accelerator.shared.timeline.clone(),
            unchecked: Some(accelerator.shared.device.clone()),
        }
    }

    #[track_caller]
    fn apply<M: Module>(
        &mut self,
        model: M,
        mut gradients: Gradients,
        rate: impl FnOnce(&mut S, &M) -> ModuleLearningRate,
    ) -> M
    where
        S: Clone,
    {
        if let Some(path) = gradients.stranger_to(&model) {
            panic!(
                "these gradients are of another model, whose first trainable parameter is `{path}`: the model \
                 that `step` was given has none of its parameters, or is a clone from before `prepare`, which is \
                 another model; pass the one that `backward` was given"
            );
        }
        let missed = match gradients.overflow() {
            Some(scale) => Some(StepOutcome::Skipped { scale }),
            None => gradients.is_idle().then_some(StepOutcome::Idle),
        };
        if let Some(outcome) = missed {
            if gradients.is_missed() {
                // Other ranks step, and schedules keep pace.
                rate(&mut self.schedule, &model);
                self.steps += 1;
            }
            self.outcome = outcome;
            self.timeline.step_ends();
            return model;
        }
        let norm = gradients.known_norm();
        if gradients.is_accumulating() {
            self.outcome = StepOutcome::Accumulated;
            return model;
        }
        // Its model may have been prepared after it.
        if let Some(device) = self.unchecked.take() {
            let parameters = Layout::of(&model).trainable();
            let known = |id| parameters.iter().find(|known| known.id == id).cloned();
            if let Err(error) = check_types(&self.optimizer, known, &device) {
                panic!("{error}");
            }
        }
        if !self.resumed.is_empty() {
            warn_of_other_state(&core::mem::take(&mut self.resumed), &Layout::of(&model));
        }
        // Only steps that communicate can fail.
        let may_fail = self.shards.is_some() || gradients.is_spread() || gradients.is_lost();
        let before = may_fail.then(|| self.schedule.clone());
        let commit = gradients.take_commit();
        let of_all_ranks = !gradients.is_own();
        let rate = rate(&mut self.schedule, &model);
        let tied = gradients.tied_parameters();
        let base_rate = rate.base();
        let stepped = StepOutcome::Stepped {
            rate: base_rate,
            norm: None,
        };
        // Optimizers step the first place of a tied parameter.
        let retie = |model| match &tied {
            Some(tied) => tied.retie(model),
            None => model,
        };
        let outcome = self.step_closed(rate, model, gradients);
        match outcome.map(retie).map_err(retie) {
            Ok(model) => {
                (self.outcome, self.norm) = (stepped, norm);
                self.steps += 1;
                if let Some(commit) = commit {
                    if of_all_ranks {
                        commit.note_update(Some(base_rate));
                    }
                    commit.commit();
                }
                self.timeline.step_ends();
                model
            }
            Err(model) => {
                self.outcome = StepOutcome::Lost;
                if let Some(schedule) = before {
                    self.schedule = schedule;
                }
                self.timeline.step_failed();
                model
            }
        }
    }

    /// The model, updated; as it was where other ranks are lost.
    #[track_caller]
    fn step_closed<M: Module>(
        &mut self,
        rate: ModuleLearningRate,
        model: M,
        gradients: Gradients,
    ) -> core::result::Result<M, M> {
        // Pieces would get gradients of different ranks.
        if self.shards.is_some() && gradients.is_own() {
            gradients.refuse_shards();
            return Err(model);
        }
        if gradients.is_lost() {
            return Err(model);
        }
        let copy = self.timeline.span(Phase::Copy(Part::Whole));
        let Some(averaged) = gradients.into_averaged() else {
            return Ok(model);
        };
        let optimizer = &mut self.optimizer;
        match (averaged, &mut self.shards) {
            (Averaged::Sums(mut averages), None) => {
                // They may have been cut for another optimizer.
                if averages.make_whole().is_err() {
                    return Err(model);
                }
                let ready = self.kinds.ready(optimizer, averages);
                drop(copy);
                let _optimizer = self.timeline.span(Phase::Optimizer);
                Ok(ready.step(optimizer, rate, model))
            }
            (Averaged::Untouched(gradients), None) => {
                drop(copy);
                let _optimizer = self.timeline.span(Phase::Optimizer);
                Ok(optimizer.step(rate, model, gradients))
            }
            (Averaged::Sums(averages), Some(shards)) => {
                drop(copy);
                let _optimizer = self.timeline.span(Phase::Optimizer);
                shards.step(optimizer, rate, model, averages)
            }
            // They are of an accelerator that is one rank alone.
            (Averaged::Untouched(_), Some(shards)) => {
                shards.refuse_foreign();
                Err(model)
            }
        }
    }

    /// What the last `step` did; `Accumulated` before the first.
    ///
    /// On one GPU, a norm that a clip was made by may not have been read: this waits until the device has computed
    /// it. A loop that looks at it every few steps keeps the device busy.
    pub fn outcome(&self) -> StepOutcome {
        match self.outcome {
            StepOutcome::Stepped { rate, .. } => StepOutcome::Stepped {
                rate,
                norm: self.norm.as_ref().map(Scalar::read),
            },
            other => other,
        }
    }

    /// How many times the model was updated; in [local training](crate::local), on any rank.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The bytes of state that this rank keeps, such as Adam's moments: 0 before the first step. A
    /// [`Sharded`] optimizer keeps its part alone; what it resumed and has not stepped since is whole,
    /// and counted too.
    ///
    /// Burn does not tell, so the state is copied to be counted: ask now and then.
    ///
    /// ```
    /// # use accelerator::prelude::*;
    /// use burn::optim::AdamConfig;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::Tensor;
    /// # let accelerator = Accelerator::new()?;
    /// # let device = accelerator.device();
    /// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
    ///
    /// let mut optimizer = accelerator.prepare(AdamConfig::new().init())?;
    /// assert_eq!(optimizer.state_memory()?, 0);
    /// let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    /// let gradients = accelerator.backward(loss, &model, 4)?;
    /// let model = optimizer.step(1e-3, model, gradients);
    /// // Two moments in f32 of each of three parameters, and a little more.
    /// assert!(optimizer.state_memory()? >= 2 * 4 * 3);
    /// # let _: Linear = model;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_checkpoint`](crate::Error::is_checkpoint) where Burn cannot write the state.
    pub fn state_memory(&self) -> Result<usize> {
        let waiting = self.shards.as_ref().map_or(0, Shards::waiting);
        Ok(state::size_of(&self.optimizer)? + waiting)
    }

    /// State of the size that this rank has to keep for a model after its first step. `None` where the optimizer has
    /// stepped, and keeps it already.
    pub(crate) fn reserve<M: Module>(
        &self,
        model: &M,
        parameters: &[Trainable],
        device: &Device,
    ) -> Option<ModuleOptimizer> {
        let shards = self.shards.as_ref();
        (self.steps == 0).then(|| {
            let blank = self.optimizer.clone();
            let blank = blank.load_record(OptimizerRecord::default());
            sharded::state_for_trial(blank, shards, model, parameters, device)
        })
    }

    /// Burn's optimizer inside, for its records: of a [`Sharded`] one, this rank's part of the state.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::grad_clipping::GradientClippingConfig;
    /// use burn::optim::SgdConfig;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let config = SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Value(1.0)));
    /// let optimizer = accelerator.prepare(config.init())?;
    /// assert!(optimizer.inner().has_gradient_clipping());
    /// # Ok::<(), Error>(())
    /// ```
    pub fn inner(&self) -> &ModuleOptimizer {
        &self.optimizer
    }
}

impl PreparedOptimizer<Manual> {
    pub(crate) fn manual(
        optimizer: (ModuleOptimizer, Option<Shards>),
        accelerator: &Accelerator,
    ) -> Self {
        let rates = ManualRates::new(accelerator.is_main_process());
        Self::new(optimizer, Manual(rates), accelerator)
    }

    /// Updates the model with that learning rate, if the accumulation window is full; gives it
    /// back as it was otherwise.
    ///
    /// # Panics
    ///
    /// With gradients of another model: where none of the parameters that `backward` was given is in this one. In the
    /// first step, with a clone of the model from before `prepare`, and where the optimizer was prepared before this
    /// model, with state that was loaded in another float type than that of a parameter.
    #[must_use]
    #[track_caller]
    pub fn step<M: Module>(
        &mut self,
        rate: impl IntoLearningRate,
        model: M,
        gradients: Gradients,
    ) -> M {
        let rate = rate.into_learning_rate();
        if gradients.is_accumulating() {
            self.schedule.0.note_dropped(rate.base());
        } else if gradients.overflow().is_some() {
            self.schedule.0.skip_window();
        }
        self.apply(model, gradients, |manual, _| {
            manual.0.note_step(rate.base());
            rate
        })
    }
}

impl PreparedOptimizer<Scheduled> {
    pub(crate) fn scheduled(
        optimizer: (ModuleOptimizer, Option<Shards>),
        scheduler: Scheduler,
        accelerator: &Accelerator,
    ) -> Self {
        Self::new(optimizer, Scheduled(scheduler), accelerator)
    }

    /// Updates the model with the schedule's next learning rate, if the accumulation window is
    /// full; gives it back as it was, and leaves the schedule where it is, otherwise.
    ///
    /// # Panics
    ///
    /// With gradients of another model: where none of the parameters that `backward` was given is in this one. In the
    /// first step, with a clone of the model from before `prepare`, and where the optimizer was prepared before this
    /// model, with state that was loaded in another float type than that of a parameter.
    #[must_use]
    #[track_caller]
    pub fn step<M: Module>(&mut self, model: M, gradients: Gradients) -> M {
        let (epoch, factor) = (gradients.epoch(), self.factor);
        self.apply(model, gradients, |schedule, model| {
            factor::scaled(schedule.0.next(epoch), factor, model)
        })
    }

    /// How many times the schedule advances in so many optimizer steps and epochs.
    pub(crate) fn advances(&self, steps: Option<u64>, epochs: u64) -> Option<u64> {
        self.schedule.0.advances(steps, epochs)
    }

    /// The learning rate of the last step for each trainable parameter of the model, by path; empty before the
    /// first.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
    /// use burn::module::ParamGroup;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::SgdConfig;
    /// use burn::tensor::Tensor;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let device = accelerator.device();
    /// let model: Linear = LinearConfig::new(2, 1).init(&device);
    /// let scheduler = ModuleLrScheduler::new(0.5).with_group(ParamGroup::from_predicate("bias"), 2.0);
    /// let (mut model, mut optimizer) =
    ///     accelerator.prepare((model, (SgdConfig::new().init(), scheduler)))?;
    /// let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    /// let gradients = accelerator.backward(loss, &model, 4)?;
    /// model = optimizer.step(model, gradients);
    /// let rates = optimizer.learning_rates(&model);
    /// assert_eq!(rates, [("weight".to_owned(), 0.5), ("bias".to_owned(), 2.0)]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn learning_rates<M: Module>(&self, model: &M) -> Vec<(String, f64)> {
        let current = self.schedule.0.current.as_ref();
        current.map_or_else(Vec::new, |rate| factor::by_path(rate, self.factor, model))
    }

    /// The base learning rate of the last step; `None` before the first.
    pub fn learning_rate(&self) -> Option<f64> {
        self.schedule.0.last().map(|rate| rate * self.factor)
    }
}

impl<S> fmt::Debug for PreparedOptimizer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedOptimizer")
            .field("outcome", &self.outcome)
            .field("norm", &self.norm)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

/// Warns where an optimizer was resumed with state for none of the parameters that it steps first.
fn warn_of_other_state(resumed: &HashSet<u64>, layout: &Layout) {
    let mut parameters = layout.trainable().into_iter();
    if !parameters.any(|parameter| resumed.contains(&parameter.id.val())) {
        notice::warn(&format!(
            "an optimizer was resumed with state for {} parameters, and the model of its first step has none of \
             them: it begins anew there; where there are several optimizers, pass them to `save_state`, `resume` \
             and `step` in the same order",
            resumed.len()
        ));
    }
}
