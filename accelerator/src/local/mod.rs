//! Local training: each rank steps on its own, and every few steps the parameters are averaged.
//!
//! Where communication is slow beside computing, gradients need not be averaged in every step. Under
//! [`LocalSgd`] each rank steps its optimizer with its own gradients, and every so many steps the
//! parameters of all ranks are averaged. [`DiLoCo`] takes hundreds of steps, and passes their mean change to an outer
//! optimizer. Nothing is sent in between, so ranks that take batches of different epochs, or the same samples from a
//! loader that was not prepared, are not detected in training.
//!
//! ```
//! use accelerator::prelude::*;
//! # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::SgdConfig;
//! # use burn::tensor::{Device, Tensor, TensorData};
//! # struct Rows;
//! # impl Batcher<f32, Tensor<2>> for Rows {
//! #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
//! #         let shape = [items.len(), 1];
//! #         Tensor::from_data(TensorData::new(items, shape), device)
//! #     }
//! # }
//!
//! let weights = accelerator::launch(2, |accelerator| {
//!     let model: Linear = accelerator.init(|device| LinearConfig::new(1, 1).init(device));
//! #   let dataset = InMemDataset::new((0..52).map(|i| i as f32 / 52.0).collect());
//!     let train = LoaderBuilder::new(Rows).batch_size(4).shuffle(1).build(dataset);
//!     let (mut model, mut optimizer, train) =
//!         accelerator.prepare((model, SgdConfig::new().init(), train))?;
//!
//!     let mut local = LocalSgdConfig::new(4).init(&accelerator, &model)?;
//!     for batch in train.epoch(0) {
//!         let batch = batch?;
//!         let loss = (model.forward((*batch).clone()) - 1.0).powi_scalar(2).mean();
//!         // Of this rank's samples alone.
//!         let gradients = local.backward(loss, &model, &batch)?;
//!         model = optimizer.step(0.1, model, gradients);
//!         // Averages after every fourth step.
//!         local.step(&mut model)?;
//!     }
//!     local.finish(&mut model)?;
//!     Ok(model.weight.val().into_data())
//! })?;
//! assert_eq!(weights[0], weights[1], "bit for bit");
//! # Ok::<(), Error>(())
//! ```
//!
//! Accumulation, clipping, loss scales and schedules work as with [`Accelerator::backward`], on each rank by
//! itself: a norm is that of this rank's gradient, and so are [`AveragedGradients::loss`] and
//! [`AveragedGradients::samples`]. A rank without samples in a step does not step
//! ([`StepOutcome::Idle`](crate::optim::StepOutcome::Idle)) and counts it all the same, so that all ranks
//! average at the same moment. While replicas differ, `accelerator.backward`, `valid`, `save_state` and
//! `save_model` refuse the model, on all ranks, with a typed error. Burn's `model.valid()` evaluates this rank's
//! replica.
//!
//! If a parameter of a rank is not finite, the average fails on all ranks before any model is changed, and
//! [`Error::is_not_finite`](crate::Error::is_not_finite) names rank and parameter.
//!
//! Layers that normalise over all ranks ([`SyncBatchNorm`](crate::nn::SyncBatchNorm)) are refused: Burn's
//! `BatchNorm` sees this rank's batches, and its statistics are averaged with the parameters. It is enough that
//! there is one, in whichever model of the accelerator.
//!
//! # Optimizer state
//!
//! Moments are each rank's own and never averaged, as in the papers; a
//! [`Sharded`](crate::optim::Sharded) optimizer is refused: before the first step where the accelerator has
//! prepared no other one, and otherwise behind the step that it was to take. Checkpoints hold those of rank 0, which every
//! rank gets: training that is resumed has the same bits as one that was not interrupted where the
//! optimizer keeps no state (SGD without momentum), and otherwise continues with rank 0's moments on all ranks.
//!
//! [`Accelerator::backward`]: crate::Accelerator::backward
//! [`AveragedGradients::loss`]: crate::AveragedGradients::loss
//! [`AveragedGradients::samples`]: crate::AveragedGradients::samples

mod sgd;
mod sync_rounds;

use burn::module::Module;
use burn::tensor::Tensor;

pub use self::sgd::{DiLoCo, DiLoCoConfig, LocalSgd, LocalSgdConfig};
use crate::core::error::Result;
use crate::data::batch::Weight;
use crate::reduce::AveragedGradients;

/// A loop of local training: [`LocalSgd`] or [`DiLoCo`].
///
/// In each step `backward`, the optimizer, `step`, in this order; in the end `finish`. Every rank makes the
/// same calls.
#[expect(private_bounds, reason = "no other crate implements it")]
pub trait LocalTraining<M: Module + 'static>: sync_rounds::InRounds + Sized {
    /// Runs the backward pass of `loss`, and at the end of an accumulation window averages the gradients of
    /// `model` over the samples of this rank alone. Nothing is communicated.
    ///
    /// # Errors
    ///
    /// The errors of [`Accelerator::backward`](crate::Accelerator::backward), but for those of communication, and of a
    /// step without samples; [`Error::is_misuse`](crate::Error::is_misuse) if an average is due that was not made,
    /// if there is a [`SyncBatchNorm`](crate::nn::SyncBatchNorm), and if all optimizers that the
    /// accelerator has prepared are [`Sharded`](crate::optim::Sharded), or one of them was to step.
    /// The model is untouched in each case.
    #[track_caller]
    fn backward(
        &mut self,
        loss: Tensor<1>,
        model: &M,
        weight: impl Into<Weight>,
    ) -> Result<AveragedGradients> {
        self.rounds().backward(loss, model, weight.into())
    }

    /// [Averages](Self::average) if the round is full. Call it after the optimizer, in every step.
    ///
    /// # Errors
    ///
    /// The errors of [`average`](Self::average); [`Error::is_misuse`](crate::Error::is_misuse) if a
    /// [`Sharded`](crate::optim::Sharded) optimizer was to step.
    #[track_caller]
    fn step(&mut self, model: &mut M) -> Result<LocalOutcome> {
        if !self.rounds().is_due(model)? {
            return Ok(LocalOutcome::Local);
        }
        self.average(model)?;
        Ok(LocalOutcome::Averaged)
    }

    /// Ends the round though it may not be full, to save or evaluate the model: averages the parameters of all
    /// ranks, with [`DiLoCo`] by an outer step. The next round begins here. Where no step was taken since the
    /// last one, nothing changes.
    ///
    /// Every rank calls it after the same step, and ends with the same bits, running statistics included. Sums
    /// are in the type of the parameters, those of half-precision ones in f32.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost;
    /// [`Error::is_misuse`](crate::Error::is_misuse) on every rank if they took different numbers of steps,
    /// within an accumulation window, while gradients of a backward pass are not used, where a
    /// [`Sharded`](crate::optim::Sharded) optimizer was to step, and for a model that [`DiLoCo`] was not made
    /// for; [`Error::is_not_finite`](crate::Error::is_not_finite) on every rank if a parameter of one that
    /// counts is NaN or an infinity, which it names, or a sum over the ranks is. Model and outer optimizer are
    /// as they were in each case.
    #[track_caller]
    fn average(&mut self, model: &mut M) -> Result<()>;

    /// Averages what is left of a round, at the end of local training.
    ///
    /// # Errors
    ///
    /// The errors of [`average`](Self::average).
    #[track_caller]
    fn finish(mut self, model: &mut M) -> Result<()> {
        self.average(model)
    }
}

/// The weight of each rank in an average of parameters.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Weighting {
    /// The samples (or tokens) with which it stepped since the last average, as in federated averaging
    /// ([McMahan et al. 2017](https://arxiv.org/abs/1602.05629)). The default, since it is exact: with one
    /// plain SGD step a round it is the average of gradients over all samples, whatever each rank had, and a
    /// rank without samples does not dilute what the others have learnt.
    #[default]
    Samples,
    /// The same as any other rank, as in Accelerate's `LocalSGD`.
    Equal,
}

/// The outcome of [`LocalTraining::step`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LocalOutcome {
    /// Replicas are the same on every rank: it is the moment to evaluate or to save.
    Averaged,
    /// The round continues, and each rank has a model of its own.
    Local,
}
