//! The trainer, in Hugging Face's manner.

mod build;
mod checkpoints;
mod evaluation;
mod fit;
mod parts;

use core::fmt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::module::Module;
use serde::Serialize;

pub use self::build::TrainerBuilder;
use self::parts::{TrainData, Unprepared};
use super::arguments::{ReportTo, TrainingArguments};
use super::callback::{EarlyStopping, TrainerCallback};
use super::console::{Banner, Console};
use super::loss::{Inputs, LossOutput};
use super::state::{Metrics, ModelCell, TrainerState};
use crate::accelerator::Accelerator;
use crate::core::dyn_module::DynModule;
use crate::core::error::{Error, Result};
use crate::core::tensors::Tensors;
use crate::data::{Epoch, PreparedLoader};
use crate::ema::Ema;
use crate::local::{LocalSgd, LocalSgdConfig};
use crate::metric::Mean;
use crate::optim::{Manual, PreparedOptimizer};
use crate::reduce::AveragedGradients;

/// Trains a model by [arguments](TrainingArguments) instead of a loop, as Hugging Face's `Trainer` does, on as many
/// processes as the program is started on.
///
/// See the [module](super) for a first program. A trainer also predicts, averages weights and exports:
///
/// ```
/// use accelerator::train::{Inputs, Trainer, TrainingArguments};
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
/// # let folder = folder.path();
/// # let arguments = TrainingArguments { output_dir: folder.join("out"), ..TrainingArguments::default() };
///
/// fn compute_loss(model: &Linear, inputs: &Inputs<'_, Tensor<2>>) -> (Tensor<1>, Tensor<2>) {
///     let outputs = model.forward((***inputs).clone());
///     (outputs.clone().powi_scalar(2).mean(), outputs)
/// }
///
/// let arguments = TrainingArguments { ema_decay: Some(0.99), ..arguments };
/// let mut trainer = Trainer::builder(arguments, line, Rows, compute_loss)
///     .train_dataset(rows(40))
///     .build()?;
/// let output = trainer.train()?;
/// assert_eq!(output.metrics.value("train_loss"), Some(output.training_loss));
/// assert_eq!(trainer.state().global_step, output.global_step);
///
/// let raw = trainer.model().weight.val().into_data();
/// let averaged = trainer.averaged_model().map(|model| model.weight.val().into_data());
/// assert_ne!(Some(raw), averaged);
///
/// let predicted = trainer.predict(rows(10))?;
/// assert_eq!(predicted.predictions.map(|outputs| outputs.dims()), Some([10, 1]));
/// assert!(predicted.metrics.value("test_loss").is_some());
///
/// trainer.save_model(folder.join("model.safetensors"))?;
/// trainer.push(folder.join("for others"))?;
/// let again = TrainingArguments::from_file(folder.join("for others/training_arguments.json"))?;
/// assert_eq!(&again, trainer.arguments());
/// trainer.accelerator().print("done");
/// trainer.finish()?;
/// # Ok::<(), accelerator::Error>(())
/// ```
pub struct Trainer<M, I, O, P> {
    accelerator: Accelerator,
    arguments: TrainingArguments,
    interrupted_epoch: Option<Epoch<O>>,
    callbacks: Callbacks<M>,
    collator: Arc<dyn Batcher<I, O>>,
    compute_loss: Arc<ComputeLoss<M, O, P>>,
    compute_metrics: Option<Arc<ComputeMetrics<P>>>,
    console: Console,
    ema: Option<Ema<M>>,
    eval: Option<PreparedLoader<O>>,
    local: Option<LocalRounds>,
    model: ModelCell<M>,
    optimizer: PreparedOptimizer<Manual>,
    state: TrainerState,
    train: Option<TrainData<O>>,
    unprepared: Unprepared<I>,
    was_preempted: bool,
    watches: bool,
}

type ComputeLoss<M, O, P> = dyn Fn(&M, &Inputs<'_, O>) -> LossOutput<P>;
type ComputeMetrics<P> = dyn Fn(P) -> Result<Metrics>;

struct Callbacks<M> {
    early_stopping: Option<EarlyStopping>,
    of_program: Vec<Box<dyn TrainerCallback<M>>>,
}

/// The training of a rank by itself between two averages of the weights.
struct LocalRounds {
    sgd: LocalSgd,
    /// The losses of this rank that were not shared yet, and how many updates they are of.
    losses: Mean,
    updates: u64,
}

impl LocalRounds {
    fn begin(accelerator: &Accelerator, model: &dyn DynModule, every: u64) -> Result<Self> {
        Ok(Self {
            sgd: LocalSgdConfig::new(every).begin(accelerator, model)?,
            losses: Mean::new(),
            updates: 0,
        })
    }

    /// Notes the loss of an update, over the samples of this rank.
    fn note(&mut self, gradients: &AveragedGradients) {
        self.updates += 1;
        if let (Some(loss), Some(samples)) = (gradients.loss(), gradients.samples()) {
            self.losses.update(loss, samples as usize);
        }
    }
}

/// The result of a training; see [`Trainer`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TrainOutput {
    /// The number of updates.
    pub global_step: u64,
    /// The mean loss of the updates.
    pub training_loss: f64,
    /// `train_runtime` in seconds, `train_samples_per_second`, `train_steps_per_second`, `train_loss`, `epoch`.
    pub metrics: Metrics,
}

/// The outputs of a model for a data set; see [`Trainer::predict`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PredictionOutput<P> {
    /// The outputs for all samples of all ranks, in the order of the data set, each once; the same on every rank.
    /// `None` for a data set without samples.
    pub predictions: Option<P>,
    /// `test_loss` and the program's own metrics, with `test_` before their names.
    pub metrics: Metrics,
}

impl<M, I, O, P> Trainer<M, I, O, P>
where
    M: Module + fmt::Display + 'static,
    I: fmt::Debug + Send + Sync + 'static,
    O: Send + 'static,
    P: Tensors + Clone + 'static,
{
    /// The ranks.
    pub fn accelerator(&self) -> &Accelerator {
        &self.accelerator
    }

    /// The arguments.
    pub fn arguments(&self) -> &TrainingArguments {
        &self.arguments
    }

    /// Returns the model in training. With `ema_decay`, evaluations and [`save_model`](Self::save_model) use the
    /// [averaged](Self::averaged_model) model instead.
    pub fn model(&self) -> &M {
        self.model.get()
    }

    /// Returns the model with weights averaged over the last steps, if `ema_decay` is set.
    pub fn averaged_model(&self) -> Option<&M> {
        self.ema.as_ref().map(Ema::model)
    }

    /// Returns the state of the training.
    pub fn state(&self) -> &TrainerState {
        &self.state
    }

    /// Saves the model's weights, as [`Accelerator::save_model`] does; with `ema_decay`, the averaged weights.
    ///
    /// # Errors
    ///
    /// The errors of [`Accelerator::save_model`].
    pub fn save_model(&self, path: impl AsRef<Path>) -> Result<()> {
        let model = self.averaged_model().unwrap_or(self.model());
        self.accelerator.save_model(model, path)
    }

    /// Writes the results of the training to a folder for others: `model.safetensors`, `training_arguments.json`,
    /// which [`TrainingArguments::from_file`] reads, and `trainer_state.json` with the log.
    ///
    /// # Errors
    ///
    /// The errors of [`save_model`](Self::save_model); [`Error::is_io`] if rank 0 cannot write.
    pub fn push(&self, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        let context = &self.accelerator.shared.context;
        context.on_main("make the folder", || {
            std::fs::create_dir_all(folder).map_err(|error| Error::io("make", folder, error))
        })?;
        self.save_model(folder.join("model.safetensors"))?;
        context.on_main("write what the training came to", || {
            write_json(&folder.join("training_arguments.json"), &self.arguments)?;
            let state = TrainerState {
                saved: None,
                ..self.state.clone()
            };
            write_json(&folder.join("trainer_state.json"), &state)
        })?;
        Ok(())
    }

    /// Ends the job, as [`Accelerator::finish`] does, and returns the exit code for `main`: success, or 75 if the job
    /// was told to leave and should be started again.
    ///
    /// # Errors
    ///
    /// The errors of [`Accelerator::finish`].
    pub fn finish(self) -> Result<ExitCode> {
        match self.was_preempted {
            true => self.accelerator.finish_preempted(),
            false => self.accelerator.finish().map(|()| ExitCode::SUCCESS),
        }
    }

    fn print_banner(&mut self, data: &TrainData<O>) {
        let arguments = &self.arguments;
        let ranks = self.accelerator.world_size() as u64;
        let banner = Banner {
            samples: data.loader.samples(),
            epochs: data.flow.epochs,
            batch: data.loader.global_batch().unwrap_or(0).div_ceil(ranks),
            total_batch: self.batch_of_update(data),
            accumulation: arguments.gradient_accumulation_steps,
            updates: data.flow.updates,
            parameters: self.model.get().num_params(),
        };
        self.console
            .on_train_begin(&self.accelerator, arguments, banner, &self.state);
    }

    fn batch_of_update(&self, data: &TrainData<O>) -> u64 {
        let batch = data.loader.global_batch().unwrap_or(0);
        batch * self.arguments.gradient_accumulation_steps as u64
    }

    fn begin_run(&self) -> Result<()> {
        let arguments = &self.arguments;
        if arguments
            .report_to
            .iter()
            .all(|word| *word == ReportTo::None)
        {
            return Ok(());
        }
        let of_folder = || {
            arguments
                .output_dir
                .file_name()
                .map(|name| name.to_string_lossy())
        };
        let name = arguments
            .run_name
            .as_deref()
            .map(Into::into)
            .or_else(of_folder);
        self.accelerator
            .init_trackers(name.as_deref().unwrap_or("trainer"), arguments)
    }
}

impl<M, I, O, P> fmt::Debug for Trainer<M, I, O, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("arguments", &self.arguments)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// Infinities and NaN become `null`.
fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(Error::other)?;
    std::fs::write(path, text + "\n").map_err(|error| Error::io("write", path, error))
}
