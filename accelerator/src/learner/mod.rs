//! A `Learner` of burn-train on several processes, with the feature `burn-train`.
//!
//! [`Accelerator::supervised_training`] stands in the place of `SupervisedTraining::new`, and takes loaders that were
//! prepared. Everything else of burn-train's builder is as it was: metrics, checkpoints, early stopping, `launch`.
//!
//! ```
//! use accelerator::prelude::*;
//! use accelerator::learner;
//! use burn::data::dataset::InMemDataset;
//! use burn::lr_scheduler::constant::ConstantLr;
//! use burn::module::Module;
//! use burn::nn::loss::{MseLoss, Reduction};
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::SgdConfig;
//! use burn::tensor::Tensor;
//! use burn_train::metric::LossMetric;
//! use burn_train::{InferenceStep, Learner, RegressionOutput, TrainOutput, TrainStep};
//!
//! #[derive(Module, Debug)]
//! struct Line {
//!     linear: Linear,
//! }
//!
//! impl Line {
//!     fn loss(&self, x: Tensor<2>) -> RegressionOutput {
//!         let (output, targets) = (self.linear.forward(x.clone()), x * 2.0 + 3.0);
//!         let loss = MseLoss::new().forward(output.clone(), targets.clone(), Reduction::Mean);
//!         RegressionOutput::new(loss, output, targets)
//!     }
//! }
//!
//! impl TrainStep for Line {
//!     type Input = Tensor<2>;
//!     type Output = RegressionOutput;
//!
//!     fn step(&self, x: Tensor<2>) -> TrainOutput<RegressionOutput> {
//!         let item = self.loss(x);
//!         TrainOutput::new(self, item.loss.backward(), item)
//!     }
//! }
//!
//! impl InferenceStep for Line {
//!     type Input = Tensor<2>;
//!     type Output = RegressionOutput;
//!
//!     fn step(&self, x: Tensor<2>) -> RegressionOutput {
//!         self.loss(x)
//!     }
//! }
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let folder = folder.path();
//! let biases = launch(2, |accelerator| {
//!     let points = |count| InMemDataset::new((0..count).map(|i| i as f32 / count as f32).collect());
//!     let build = |dataset| {
//!         LoaderBuilder::from_fn(|x: Vec<f32>, device| Tensor::<1>::from_floats(&*x, device).unsqueeze_dim::<2>(1))
//!             .batch_size(4)
//!             .build(dataset)
//!     };
//!     let (train, valid) = accelerator.prepare((build(points(30)), build(points(7))))?;
//!     let model = accelerator.init(|device| Line { linear: LinearConfig::new(1, 1).init(device) });
//!
//!     let training = accelerator
//!         .supervised_training(folder, train, valid)
//!         .metrics((LossMetric::new(),))
//! #       .with_application_logger(None)
//!         .num_epochs(2);
//!     let result = training.launch(Learner::new(model, SgdConfig::new().init(), ConstantLr::new(0.1)));
//!     let model = learner::into_result(result)?.model;
//!     accelerator.finish()?;
//!     Ok(model.linear.bias.map(|bias| bias.val().into_data()))
//! })?;
//! assert_eq!(biases[0], biases[1]);
//! # Ok::<(), Error>(())
//! ```
//!
//! # What is exact
//!
//! - Each rank trains on its share of the training loader; gradients are the average over the samples of all ranks,
//!   ragged tails included, and parameters those of rank 0 at the start: the same bits as those of a loop with
//!   [`Accelerator::backward`].
//! - Each rank validates its share. The outputs are joined on rank 0 ([`ValidationOutput`]), whose metrics see every
//!   sample once: those that are no mean over batches, such as an F-score or AUROC, are exact too.
//! - Rank 0 alone computes metrics, writes their files and checkpoints, logs ([`RunLogger`](crate::RunLogger)), renders,
//!   and stops early; all ranks stop at the same epoch. An [`Interrupter`](burn_train::Interrupter) of any rank stops all of them, at the same step. With
//!   `.checkpoint(epoch)` every rank reads the files, so that all hosts must see the folder.
//! - Where a rank is lost, or fails, the training of the others ends within seconds, with
//!   [`LearningResult::error`](burn_train::LearningResult::error): see [`into_result`].
//!
//! # Limits
//!
//! - A `TrainStep` runs its backward pass itself, so that gradients are sent when it has ended: nothing overlaps.
//! - Metrics of the training are of rank 0's batches; early stopping and checkpoints by metric should look at
//!   `Split::Valid`. burn-train's `LossMetric` counts each batch once, however many samples it holds.
//! - `.grads_accumulation(n)` is refused, since it adds up gradients whatever their batches hold:
//!   [`accumulation_steps`](crate::AcceleratorBuilder::accumulation_steps) averages over the samples of the window.
//!   `.gradient_checkpointing()` is not passed on by burn-train, and does nothing.
//! - The [`Unit`](crate::nn::Unit)s of a model can be kept or recomputed, but not sharded.
//! - The learner has the optimizer, so it is neither [`Sharded`](crate::optim::Sharded), nor can gradients be clipped
//!   by one norm over all parameters; precision is that of the model.
//! - Training continues from the end of an epoch, as in burn-train, and with the same batch size at another number of
//!   ranks.

mod strategy;

use std::path::Path;
use std::sync::Arc;

use burn_train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn_train::metric::MetricDefinition;
use burn_train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};
use burn_train::{
    InferenceStep, LearnerModel, LearnerSummary, LearningResult, SupervisedTraining, TrainStep,
    TrainingError, TrainingStrategy,
};

use self::strategy::ProcessStrategy;
use crate::Accelerator;
use crate::core::error::{Error, Result};
use crate::data::PreparedLoader;

pub use self::strategy::ValidationOutput;

impl Accelerator {
    /// Returns a builder of a burn-train training over the ranks of this job, instead of `SupervisedTraining::new`;
    /// see [`learner`](crate::learner). Every rank must make the same calls of the builder, and launch it.
    ///
    /// `directory` is that of burn-train's files, which rank 0 writes.
    pub fn supervised_training<M>(
        &self,
        directory: impl AsRef<Path>,
        train: PreparedLoader<<M as TrainStep>::Input>,
        valid: PreparedLoader<<M as InferenceStep>::Input>,
    ) -> SupervisedTraining<M>
    where
        M: LearnerModel,
        <M as InferenceStep>::Output: ValidationOutput,
    {
        let (train, valid) = (Arc::new(train), Arc::new(valid));
        let strategy = ProcessStrategy::new(self, train.clone(), valid.clone());
        let training = SupervisedTraining::new(directory, train, valid)
            .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)));
        match self.is_main_process() {
            true => training,
            false => training
                .renderer(Box::new(SilentRenderer))
                .with_application_logger(None),
        }
    }
}

/// Returns the result of a training, or its error if it failed.
///
/// # Errors
///
/// The error in [`LearningResult::error`]: an error of this crate as it was, with its predicates
/// ([`Error::is_peer_lost`] if a rank was lost), and any other one as [`Error::other`] makes it.
pub fn into_result<M>(result: LearningResult<M>) -> Result<LearningResult<M>> {
    match &result.error {
        None => Ok(result),
        Some(error) => Err(own_error(error)),
    }
}

/// burn-train's error type has no place for those of others but that of a data set.
fn own_error(error: &TrainingError) -> Error {
    let mut source: Option<&(dyn core::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(own) = error.downcast_ref::<Error>() {
            return own.clone();
        }
        source = error.source();
    }
    Error::other(error.to_string())
}

struct SilentRenderer;

impl MetricsRenderer for SilentRenderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _: MetricDefinition) {}
}

impl MetricsRendererTraining for SilentRenderer {
    fn update_train(&mut self, _: MetricState) {}

    fn update_valid(&mut self, _: MetricState) {}

    fn on_train_end(
        &mut self,
        _: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn core::error::Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for SilentRenderer {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn on_test_end(
        &mut self,
        _: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn core::error::Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for SilentRenderer {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}

    fn update_epoch(&mut self, _: usize) {}

    fn start_split(&mut self, _: &str, _: usize) {}

    fn update_split(&mut self, _: usize) {}

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for SilentRenderer {
    fn start_global_progress(&mut self, _: usize) {}

    fn start_test(&mut self, _: &str, _: usize) {}

    fn update_test_progress(&mut self, _: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}
