use core::fmt;
use core::mem::discriminant;
use core::num::NonZeroU64;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::Device;

use super::parts::{Unprepared, build_optimizer};
use super::{Callbacks, ComputeLoss, ComputeMetrics, Trainer};
use crate::accelerator::Accelerator;
use crate::core::device::Operations;
use crate::core::error::{Error, Result};
use crate::core::tensors::Tensors;
use crate::precision::Precision;
use crate::reduce::OnNonFiniteLoss;
use crate::tracking::Tracker;
use crate::train::arguments::{EvalData, FsdpStrategy, OptimizerOrigin, TrainingArguments, check};
use crate::train::callback::{EarlyStopping, TrainerCallback};
use crate::train::console::{Console, TableRows};
use crate::train::loss::{Inputs, IntoLossOutput};
use crate::train::state::{Metrics, ModelCell};
use crate::unit::Units;

/// Builds a [`Trainer`]; see [`Trainer::builder`].
///
/// ```
/// use accelerator::train::{CallbackContext, Trainer, TrainerCallback, TrainerControl, TrainingArguments};
/// use burn::optim::AdaGradConfig;
/// use burn::tensor::FloatDType;
/// # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::{Device, Tensor, TensorData};
/// # struct Rows;
/// # impl Batcher<f32, Tensor<2>> for Rows {
/// #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<2> {
/// #         let shape = [items.len(), 1];
/// #         Tensor::from_data(TensorData::new(items, shape), device)
/// #     }
/// # }
/// # let rows = |count| InMemDataset::new((0..count).map(|x| x as f32 / count as f32).collect::<Vec<_>>());
/// # let line = |device: &Device| LinearConfig::new(1, 1).init(device);
/// # let folder = tempfile::tempdir()?;
/// # let arguments = TrainingArguments { output_dir: folder.path().into(), ..TrainingArguments::default() };
///
/// struct Tell;
///
/// impl<M> TrainerCallback<M> for Tell {
///     fn on_epoch_end(&mut self, at: &CallbackContext<'_, M>, _: &mut TrainerControl) -> accelerator::Result<()> {
///         at.accelerator.print(format_args!("{} updates", at.state.global_step));
///         Ok(())
///     }
/// }
///
/// let accelerator = arguments.accelerator().dtype(FloatDType::F32).build()?;
/// let mut trainer = Trainer::builder(arguments, line, Rows, |model: &Linear, inputs| {
///     model.forward((***inputs).clone()).powi_scalar(2).mean()
/// })
/// .accelerator(accelerator)
/// .callback(Tell)
/// .optimizer(AdaGradConfig::new().init())
/// .train_dataset(rows(40))
/// .build()?;
/// assert_eq!(trainer.train()?.global_step, 15);
/// # Ok::<(), accelerator::Error>(())
/// ```
#[must_use]
pub struct TrainerBuilder<F, M, I, O, P> {
    accelerator: Option<Accelerator>,
    arguments: TrainingArguments,
    callbacks: Vec<Box<dyn TrainerCallback<M>>>,
    collator: Arc<dyn Batcher<I, O>>,
    compute_loss: Arc<ComputeLoss<M, O, P>>,
    compute_metrics: Option<Arc<ComputeMetrics<P>>>,
    eval: Option<Arc<dyn Dataset<I>>>,
    model_init: F,
    optimizer: Option<ModuleOptimizer>,
    train: Option<Arc<dyn Dataset<I>>>,
}

impl<M, I, O, P> Trainer<M, I, O, P>
where
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// Returns a builder of a trainer. `model_init` makes the model on the device of its rank, from the arguments'
    /// seed.
    ///
    /// `data_collator` makes batches of items. `compute_loss` returns the mean loss of a batch: alone, as `(loss,
    /// outputs)` if metrics need the outputs, or as a [`LossOutput`](crate::train::LossOutput) if it is a mean over
    /// tokens. It is called for training with the model that records gradients, and for evaluation with the one that
    /// does not.
    pub fn builder<L>(
        arguments: TrainingArguments,
        model_init: impl FnOnce(&Device) -> M,
        data_collator: impl Batcher<I, O> + 'static,
        compute_loss: impl Fn(&M, &Inputs<'_, O>) -> L + 'static,
    ) -> TrainerBuilder<impl FnOnce(&Device) -> M, M, I, O, P>
    where
        L: IntoLossOutput<Outputs = P>,
    {
        TrainerBuilder {
            accelerator: None,
            arguments,
            callbacks: Vec::new(),
            collator: Arc::new(data_collator),
            compute_loss: Arc::new(move |model, inputs| {
                compute_loss(model, inputs).into_loss_output()
            }),
            compute_metrics: None,
            eval: None,
            model_init,
            optimizer: None,
            train: None,
        }
    }
}

impl<F, M, I, O, P> TrainerBuilder<F, M, I, O, P>
where
    F: FnOnce(&Device) -> M,
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// Sets the data to train on.
    pub fn train_dataset(mut self, dataset: impl Dataset<I> + 'static) -> Self {
        self.train = Some(Arc::new(dataset));
        self
    }

    /// Sets the data to evaluate on.
    pub fn eval_dataset(mut self, dataset: impl Dataset<I> + 'static) -> Self {
        self.eval = Some(Arc::new(dataset));
        self
    }

    /// Sets the function that computes metrics by name. It is called on rank 0, with the outputs of all samples of
    /// all ranks, in the order of the data set, each sample once.
    pub fn compute_metrics<N: Into<String>, R: IntoIterator<Item = (N, f64)>>(
        mut self,
        metrics: impl Fn(P) -> R + 'static,
    ) -> Self {
        self.compute_metrics = Some(Arc::new(move |outputs| {
            Ok(Metrics::from_iter(metrics(outputs)))
        }));
        self
    }

    /// Adds hooks into the loop. Each rank must add the same ones in the same order.
    pub fn callback(mut self, callback: impl TrainerCallback<M> + 'static) -> Self {
        self.callbacks.push(Box::new(callback));
        self
    }

    /// Replaces the optimizer of the arguments, which then set only its rates.
    pub fn optimizer(mut self, optimizer: impl Into<ModuleOptimizer>) -> Self {
        self.optimizer = Some(optimizer.into());
        self
    }

    /// Uses an accelerator that the program has built, usually by [`TrainingArguments::accelerator`], instead of one
    /// that the trainer makes. Its accumulation is set to that of the arguments, unless that is 1.
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = Some(accelerator);
        self
    }

    /// Checks the arguments, makes the model and prepares everything. Continues from a checkpoint if the arguments
    /// say so or the job was restarted. Every rank must call it.
    ///
    /// # Errors
    ///
    /// The same on every rank: [`Error::is_config`] for arguments that contradict, all at once, a checkpoint to
    /// continue from that is not there, or an `output_dir` with checkpoints of another training; [`Error::is_io`] if it
    /// cannot be written; [`Error::is_misuse`] if ranks have other arguments; those of
    /// [`AcceleratorBuilder::build`](crate::AcceleratorBuilder::build), [`Accelerator::prepare`] and
    /// [`Accelerator::resume`].
    pub fn build(self) -> Result<Trainer<M, I, O, P>> {
        let Self {
            mut arguments,
            compute_loss,
            collator,
            compute_metrics,
            ..
        } = self;
        let eval = match self.eval {
            Some(_) => EvalData::Present,
            None => EvalData::Absent,
        };
        let optimizer = match self.optimizer {
            Some(_) => OptimizerOrigin::Program,
            None => OptimizerOrigin::Arguments,
        };
        check(&arguments, eval, optimizer)?;
        for (name, dataset) in [("train_dataset", &self.train), ("eval_dataset", &self.eval)] {
            if dataset.as_ref().is_some_and(|dataset| dataset.is_empty()) {
                return Err(Error::config(format!(
                    "{name}: the data set has no samples"
                )));
            }
        }
        let accelerator = match self.accelerator {
            Some(accelerator) => {
                check_accelerator(&arguments, &accelerator)?;
                accelerator
            }
            None => arguments.accelerator().build()?,
        };
        if arguments.gradient_accumulation_steps == 1 {
            arguments.gradient_accumulation_steps = accelerator.accumulation_steps();
        }
        let stopping = arguments
            .best_metric()
            .zip(arguments.early_stopping_patience);
        let threshold = arguments.early_stopping_threshold;
        let callbacks = Callbacks {
            early_stopping: stopping
                .map(|(metric, patience)| EarlyStopping::new(metric, patience, threshold)),
            of_program: self.callbacks,
        };

        let optimizer = self
            .optimizer
            .unwrap_or_else(|| build_optimizer(&arguments));
        let unprepared = Unprepared {
            optimizer,
            train: self.train,
            eval: self.eval,
        };
        let resume_from = unprepared.check(&accelerator, &arguments)?;
        let model = accelerator.init(self.model_init);
        let parts = unprepared.prepare(&accelerator, &arguments, &collator, model, resume_from)?;
        let rows = parts
            .train
            .as_ref()
            .map_or(TableRows::Evaluations, |train| train.flow.rows());
        let mut trainer = Trainer {
            accelerator,
            arguments,
            interrupted_epoch: None,
            callbacks,
            collator,
            compute_loss,
            compute_metrics,
            console: Console::new(rows),
            ema: parts.ema,
            eval: parts.eval,
            local: None,
            model: ModelCell::new(parts.model),
            optimizer: parts.optimizer,
            state: parts.state,
            train: parts.train,
            unprepared,
            was_preempted: false,
            watches: false,
        };
        trainer.begin_group(parts.resumed.as_ref())?;
        Ok(trainer)
    }
}

/// Fails if the arguments need a setting that the accelerator of the program was built without.
fn check_accelerator(arguments: &TrainingArguments, accelerator: &Accelerator) -> Result<()> {
    let settings = &accelerator.shared.reduction.settings;
    let default = TrainingArguments::default();
    let every = arguments.check_replicas_steps;
    let compression = arguments.gradient_compression;
    let trackers = &accelerator.shared.tracker_settings.trackers;
    let is_tracked = |wanted: Tracker| {
        let mut kinds = trackers.iter().map(discriminant);
        kinds.any(|kind| kind == discriminant(&wanted))
    };
    let wanted = arguments.report_to.iter().filter_map(|word| word.tracker());
    let lacking = [
        (
            "bf16",
            arguments.bf16 && settings.precision != Precision::Bf16,
        ),
        (
            "fp16",
            arguments.fp16 && settings.precision != Precision::F16,
        ),
        (
            "gradient_checkpointing",
            arguments.gradient_checkpointing
                && !matches!(settings.units, Units::Recompute | Units::Shard),
        ),
        (
            "fsdp",
            arguments.fsdp == FsdpStrategy::FullShard && settings.units != Units::Shard,
        ),
        (
            "offload_folder",
            arguments.offload_folder.is_some() && accelerator.shared.context.offload.is_none(),
        ),
        (
            "recompute_operations",
            arguments.recompute_operations
                && accelerator.shared.context.operations != Operations::Recompute,
        ),
        (
            "gradient_compression",
            compression != default.gradient_compression && settings.compression != compression,
        ),
        (
            "check_replicas_steps",
            every.is_some() && settings.check_replicas.map(NonZeroU64::get) != every,
        ),
        (
            "stop_at_non_finite_loss",
            arguments.stop_at_non_finite_loss
                && settings.on_non_finite_loss != OnNonFiniteLoss::Fail,
        ),
        (
            "report_to",
            wanted.map(is_tracked).any(|is_tracked| !is_tracked),
        ),
        (
            "seed",
            arguments.seed != default.seed && accelerator.shared.context.seed != arguments.seed,
        ),
    ];
    match lacking.iter().find(|(_, is_lacking)| *is_lacking) {
        None => Ok(()),
        Some((name, _)) => Err(Error::config(format!(
            "{name} is set, and the accelerator that the program has built is without it: begin with \
             `arguments.accelerator()`"
        ))),
    }
}

impl<F, M, I, O, P> fmt::Debug for TrainerBuilder<F, M, I, O, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainerBuilder")
            .field("arguments", &self.arguments)
            .finish_non_exhaustive()
    }
}
