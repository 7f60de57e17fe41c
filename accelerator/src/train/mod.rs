//! Training by arguments instead of a loop.
//!
//! A [`Trainer`] is what Hugging Face's users know: [`TrainingArguments`] by the same names, a model, a batcher, a loss,
//! and the loop is done: accumulation, clipping, schedules with warm-up, half precision, evaluations, checkpoints with
//! the best one kept, resume, early stopping, preemption, a table on the console, tracking. It runs on as many processes
//! as the program is started on, by the same [`prepare`](crate::Accelerator::prepare), `backward` and `save_state` that a
//! loop by hand calls, and comes to the same bits.
//!
//! ```
//! use accelerator::train::{Inputs, IntervalStrategy, Trainer, TrainingArguments};
//! use burn::nn::{Linear, LinearConfig};
//! # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
//! # use burn::tensor::{Device, Tensor, TensorData};
//! # #[derive(Clone, Debug)]
//! # struct Pairs { x: Tensor<2>, y: Tensor<2> }
//! # struct PairBatcher;
//! # impl Batcher<(f32, f32), Pairs> for PairBatcher {
//! #     fn batch(&self, items: Vec<(f32, f32)>, device: &Device) -> Pairs {
//! #         let column = |of: fn(&(f32, f32)) -> f32| {
//! #             let values: Vec<_> = items.iter().map(of).collect();
//! #             Tensor::from_data(TensorData::new(values, [items.len(), 1]), device)
//! #         };
//! #         Pairs { x: column(|item| item.0), y: column(|item| item.1) }
//! #     }
//! # }
//! # let pairs = |count| InMemDataset::new((0..count).map(|x| (x as f32, 2.0 * x as f32)).collect());
//!
//! /// The mean loss of a batch, and what metrics are made of.
//! fn compute_loss(model: &Linear, inputs: &Inputs<'_, Pairs>) -> (Tensor<1>, (Tensor<2>, Tensor<2>)) {
//!     let outputs = model.forward(inputs.x.clone());
//!     let loss = (outputs.clone() - inputs.y.clone()).powi_scalar(2).mean();
//!     (loss, (outputs, inputs.y.clone()))
//! }
//!
//! let arguments = TrainingArguments {
//!     eval_strategy: IntervalStrategy::Epoch,
//!     learning_rate: 1e-2,
//!     # output_dir: tempfile::tempdir()?.path().join("out"),
//!     ..TrainingArguments::default()
//! };
//! let mut trainer = Trainer::builder(arguments, |device| LinearConfig::new(1, 1).init(device), PairBatcher, compute_loss)
//!     .train_dataset(pairs(64))
//!     .eval_dataset(pairs(10))
//!     .compute_metrics(|(outputs, targets)| {
//!         [("mae", (outputs - targets).abs().mean().into_scalar::<f64>())]
//!     })
//!     .build()?;
//! let output = trainer.train()?;
//! assert_eq!(output.global_step, 24);
//! let metrics = trainer.evaluate()?;
//! assert!(metrics.value("eval_mae").is_some());
//! trainer.finish()?;
//! # Ok::<(), accelerator::Error>(())
//! ```
//!
//! It prints, on rank 0:
//!
//! ```text
//! ***** Running training *****
//!   Num examples = 64
//!   Num Epochs = 3
//!   …
//!   Total optimization steps = 24
//! Epoch    | Training Loss | Validation Loss | Mae
//! 1        | No log        | 103.291534      | 8.613415
//! ```
//!
//! The intended differences from Hugging Face's are in `docs/trainer.md`: evaluations and losses on several processes
//! are exact, and arguments that contradict are an error before the first step.
//!
//! # Operators
//!
//! A [`TrainingOperator`] is what Ray SGD's users know: a type that sets up models, optimizers and data, and whose steps
//! may be the program's own. An [`OperatorTrainer`] starts the processes.
//!
//! ```
//! use accelerator::prelude::*;
//! use accelerator::train::{
//!     BatchOf, EpochInfo, Meter, Metrics, OperatorTrainer, OperatorWorker, Registered, RegisteredData,
//!     RegisteredModel, Setup, StepInfo, TrainBatches, TrainingOperator,
//! };
//! use burn::lr_scheduler::constant::ConstantLr;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::SgdConfig;
//! use burn::tensor::Tensor;
//! # use burn::data::dataset::InMemDataset;
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//!
//! /// Counts its epochs, and skips batches whose loss is small.
//! struct Line {
//!     epochs: u64,
//! }
//!
//! impl TrainingOperator for Line {
//!     type Config = f64;
//!     type Models = RegisteredModel<Linear, Tensor<2>>;
//!
//!     fn setup(setup: &Setup<Self>, rate: &f64) -> Result<Registered<Self>> {
//!         setup.accelerator().print(format_args!("rate {rate}"));
//!         let optimizer = (SgdConfig::new().init(), ConstantLr::new(*rate));
//!         let model = setup.register(|device| LinearConfig::new(1, 1).init(device), optimizer)?;
//!         let model = model.with_criterion(|model, x| model.forward((***x).clone()).powi_scalar(2).mean());
//!         let rows = |count: usize| {
//!             LoaderBuilder::from_fn(|rows: Vec<f32>, device| Tensor::<1>::from_floats(&*rows, device).unsqueeze_dim(1))
//!                 .batch_size(4)
//!                 .build(InMemDataset::new(vec![1.0; count]))
//!         };
//!         let data: RegisteredData<BatchOf<Self>> = setup.register_data(rows(20), rows(6))?;
//!         Ok(Registered::new(Self { epochs: 0 }, model, data))
//!     }
//!
//!     fn train_epoch(
//!         &mut self,
//!         worker: &mut OperatorWorker<Self>,
//!         batches: &mut TrainBatches<'_, BatchOf<Self>>,
//!         info: &EpochInfo,
//!     ) -> Result<Metrics> {
//!         assert_eq!((info.epoch_idx, info.num_steps), (self.epochs, None));
//!         self.epochs += 1;
//!         let mut meter = Meter::new();
//!         for batch in batches {
//!             let batch = batch?;
//!             let (batch_idx, epoch_idx) = (meter.batches(), info.epoch_idx);
//!             let OperatorWorker { accelerator, models, .. } = worker;
//!             let loss = models.loss(accelerator, &batch)?;
//!             let gradients = accelerator.backward(loss, models.model(), &batch)?;
//!             let figures = gradients.loss().map(|loss| ("train_loss", loss));
//!             meter.update(&figures.into_iter().collect(), batch.real());
//!             models.step(gradients);
//!             assert_eq!(models.optimizer().steps(), info.global_step + batch_idx + 1, "{epoch_idx}");
//!         }
//!         meter.summary(&worker.accelerator)
//!     }
//!
//!     fn validate_batch(
//!         &mut self,
//!         worker: &mut OperatorWorker<Self>,
//!         batch: &Batch<Tensor<2>>,
//!         info: &StepInfo,
//!     ) -> Result<Metrics> {
//!         assert!(info.batch_idx < 2 && info.epoch_idx <= self.epochs && worker.config < 1.0);
//!         let loss = worker.models.loss(&worker.accelerator, batch)?;
//!         Ok(Metrics::from_iter([("val_loss", loss.into_scalar::<f64>())]))
//!     }
//!
//!     fn state_dict(&self) -> Result<serde_json::Value> {
//!         Ok(self.epochs.into())
//!     }
//!
//!     fn load_state_dict(&mut self, state: serde_json::Value) -> Result<()> {
//!         self.epochs = serde_json::from_value(state).map_err(Error::other)?;
//!         Ok(())
//!     }
//! }
//!
//! let mut trainer = OperatorTrainer::<Line>::with_accelerator(Accelerator::builder().seed(1), 1, 0.1)?;
//! let metrics = trainer.train(None)?;
//! assert_eq!(metrics.value("batch_count"), Some(5.0));
//! let saved = trainer.save(folder)?;
//! trainer.load(saved)?;
//! assert_eq!(trainer.validate()?.value("num_samples"), Some(6.0));
//! assert_eq!(trainer.worker().map(|worker| worker.world_rank()), Some(0));
//! trainer.shutdown()?;
//! # Ok::<(), Error>(())
//! ```
mod arguments;
mod callback;
mod console;
mod flow;
mod loss;
mod operator;
mod rates;
mod state;
mod trainer;
#[cfg(feature = "tune")]
mod tune;
mod words;

pub use self::arguments::{
    FsdpStrategy, IntervalStrategy, OptimizerName, ReportTo, ResumeFrom, SaveStrategy,
    TrainSamplingStrategy, TrainingArguments,
};
pub use self::callback::{CallbackContext, TrainerCallback};
pub use self::loss::{Inputs, IntoLossOutput, LossOutput};
pub use self::operator::{
    BatchOf, CriterionOutputs, EpochInfo, Meter, OperatorTrainer, OperatorWorker, Registered,
    RegisteredData, RegisteredModel, RegisteredModels, Setup, StepInfo, TrainBatches,
    TrainingOperator,
};
pub use self::rates::{LrSchedulerKwargs, LrSchedulerType};
pub use self::state::{LogEntry, Metrics, TrainerControl, TrainerState};
pub use self::trainer::{PredictionOutput, TrainOutput, Trainer, TrainerBuilder};
#[cfg(feature = "tune")]
pub use self::tune::{OperatorTrainable, TuneCallback};
