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
//! What differs from Hugging Face's, on purpose, is in `docs/trainer.md`: evaluations and losses on several processes are
//! exact, and arguments that contradict are an error before the first step.
mod arguments;
mod callback;
mod console;
mod flow;
mod loss;
mod model_cell;
mod operator;
mod rates;
mod state;
mod trainer;
mod words;

pub use self::arguments::{
    IntervalStrategy, OptimizerName, ReportTo, ResumeFrom, SaveStrategy, TrainSamplingStrategy,
    TrainingArguments,
};
pub use self::callback::{CallbackContext, TrainerCallback, TrainerControl};
pub use self::loss::{Inputs, IntoLossOutput, LossOutput};
pub use self::operator::{
    BatchOf, CriterionOutputs, EpochInfo, Meter, OperatorTrainer, OperatorWorker, Registered,
    RegisteredData, RegisteredModel, RegisteredModels, Setup, StepInfo, TrainBatches,
    TrainingOperator,
};
pub use self::rates::{LrSchedulerKwargs, LrSchedulerType};
pub use self::state::{LogEntry, Metrics, TrainerState};
pub use self::trainer::{PredictionOutput, TrainOutput, Trainer, TrainerBuilder};
