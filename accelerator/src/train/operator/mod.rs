//! The training operator, in the manner of Ray SGD.

mod models;
mod trainer;
mod workers;

use core::fmt;
use core::marker::PhantomData;

use burn::module::Module;
use burn::tensor::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use self::models::{
    CriterionOutputs, Meter, RegisteredData, RegisteredModel, RegisteredModels,
};
pub use self::trainer::OperatorTrainer;
use super::state::{Metrics, ModelCell};
use crate::accelerator::{Accelerator, Prepare};
use crate::core::error::Result;
use crate::data::{Batch, Epoch, Loader, PreparedLoader};
use crate::optim::{PreparedOptimizer, Scheduled};

/// Defines what to train, and how: Ray SGD's `TrainingOperator`. An [`OperatorTrainer`] makes one per rank.
///
/// [`setup`](Self::setup) makes and registers models, optimizers, criteria and data; the other methods have defaults. They
/// train a model by its criterion. Where several models are registered, [`train_batch`](Self::train_batch) and
/// [`validate_batch`](Self::validate_batch), or what calls them, are the program's own.
///
/// ```
/// use accelerator::prelude::*;
/// use accelerator::train::{OperatorTrainer, Registered, RegisteredModel, Setup, TrainingOperator};
/// # use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
/// use burn::lr_scheduler::constant::ConstantLr;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::Tensor;
/// # use burn::tensor::{Device, TensorData};
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Clone)]
/// # struct Points;
/// # #[derive(Clone, Debug)]
/// # struct PointBatch { x: Tensor<2>, y: Tensor<2> }
/// # impl Batcher<f32, PointBatch> for Points {
/// #     fn batch(&self, items: Vec<f32>, device: &Device) -> PointBatch {
/// #         let n = items.len();
/// #         let x = Tensor::from_data(TensorData::new(items, [n, 1]), device);
/// #         PointBatch { y: x.clone() * 2.0 + 3.0, x }
/// #     }
/// # }
/// # fn points(n: usize) -> InMemDataset<f32> {
/// #     InMemDataset::new((0..n).map(|i| i as f32 / n as f32).collect())
/// # }
///
/// #[derive(Deserialize, Serialize)]
/// struct Config {
///     lr: f64,
/// }
///
/// struct LineOperator;
///
/// impl TrainingOperator for LineOperator {
///     type Config = Config;
///     type Models = RegisteredModel<Linear, PointBatch>;
///
///     fn setup(setup: &Setup<Self>, config: &Config) -> Result<Registered<Self>> {
///         let optimizer = (SgdConfig::new().init(), ConstantLr::new(config.lr));
///         let model = setup
///             .register(|device| LinearConfig::new(1, 1).init(device), optimizer)?
///             .with_criterion(|model, batch| {
///                 let error = model.forward(batch.x.clone()) - batch.y.clone();
///                 (error.clone() * error).mean()
///             });
///         let loader = |count| LoaderBuilder::new(Points).batch_size(8).build(points(count));
///         let data = setup.register_data(loader(64), loader(20))?;
///         Ok(Registered::new(Self, model, data))
///     }
/// }
///
/// // One worker is this process.
/// let mut trainer = OperatorTrainer::<LineOperator>::new(1, Config { lr: 0.1 })?;
/// for _ in 0..5 {
///     let metrics = trainer.train(None)?;
///     let val_metrics = trainer.validate()?;
///     println!("{metrics} {val_metrics}");
/// #     assert_eq!(metrics.value("num_samples"), Some(64.0));
/// #     assert_eq!(val_metrics.value("num_samples"), Some(20.0));
/// }
/// # assert!(trainer.validate()?.value("val_loss").unwrap() < 0.5);
/// trainer.shutdown()?;
/// # Ok::<(), Error>(())
/// ```
///
/// A step of one's own, with clipping:
///
/// ```
/// # use accelerator::prelude::*;
/// # use accelerator::train::{Registered, RegisteredModel, Setup};
/// # use burn::nn::Linear;
/// # use burn::tensor::Tensor;
/// use accelerator::train::{Metrics, StepInfo, TrainingOperator, OperatorWorker};
/// # struct Clipping;
///
/// impl TrainingOperator for Clipping {
/// #   type Config = ();
/// #   type Models = RegisteredModel<Linear, Tensor<2>>;
/// #   fn setup(_: &Setup<Self>, _: &()) -> Result<Registered<Self>> { Err(Error::other("not shown")) }
///     fn train_batch(
///         &mut self,
///         worker: &mut OperatorWorker<Self>,
///         batch: &Batch<Tensor<2>>,
///         _: &StepInfo,
///     ) -> Result<Metrics> {
///         let OperatorWorker { accelerator, models, .. } = worker;
///         let loss = models.loss(accelerator, batch)?;
///         let train_loss = loss.clone().into_scalar::<f64>();
///         let gradients = accelerator.backward(loss, models.model(), batch)?;
///         models.step(gradients.clip_norm(1.0));
///         Ok(Metrics::from_iter([("train_loss", train_loss)]))
///     }
/// }
/// ```
#[expect(unused_variables, reason = "defaults ignore what they need not know")]
pub trait TrainingOperator: Sized + 'static {
    /// The configuration that [`setup`](Self::setup) gets. It travels to the workers.
    type Config: DeserializeOwned + Serialize + 'static;

    /// A [`RegisteredModel`], or a tuple of them.
    type Models: RegisteredModels;

    /// Makes what is trained, on this rank's device, and registers it.
    ///
    /// # Errors
    ///
    /// The errors of the program, and of [`Setup`].
    fn setup(setup: &Setup<Self>, config: &Self::Config) -> Result<Registered<Self>>;

    /// Trains on those batches, and returns the metrics of all ranks: by default with
    /// [`train_batch`](Self::train_batch) and a [`Meter`].
    ///
    /// # Errors
    ///
    /// The errors of [`train_batch`](Self::train_batch) and of the data.
    fn train_epoch(
        &mut self,
        worker: &mut OperatorWorker<Self>,
        batches: &mut TrainBatches<'_, BatchOf<Self>>,
        info: &EpochInfo,
    ) -> Result<Metrics> {
        let mut meter = Meter::new();
        for batch in batches {
            let batch = batch?;
            let info = StepInfo {
                batch_idx: meter.batches(),
                epoch_idx: batch.epoch(),
                global_step: info.global_step + meter.batches(),
            };
            let metrics = self.train_batch(worker, &batch, &info)?;
            meter.update(&metrics, batch.real());
        }
        meter.summary(&worker.accelerator)
    }

    /// Trains on a batch, and returns the metrics of this rank, which are means over its samples. The metric
    /// `num_samples` gives their number, [`Batch::real`] by default. [`Metrics::with_mean_over`] adds a mean over other
    /// items.
    ///
    /// By default, forward, backward, and a step of the optimizer with its scheduler where the accumulation window ends;
    /// the metric is `train_loss`.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse), before anything is trained, if there are several models or no
    /// criterion; those of [`Accelerator::backward`].
    fn train_batch(
        &mut self,
        worker: &mut OperatorWorker<Self>,
        batch: &Batch<BatchOf<Self>>,
        info: &StepInfo,
    ) -> Result<Metrics> {
        worker.models.train_batch(&worker.accelerator, batch)
    }

    /// Validates on those batches, each sample once, and returns the metrics of all ranks: by default with
    /// [`validate_batch`](Self::validate_batch) and a [`Meter`]. Meanwhile [`RegisteredModel::model`] is the model that
    /// records no gradients.
    ///
    /// # Errors
    ///
    /// The errors of [`train_epoch`](Self::train_epoch).
    fn validate(
        &mut self,
        worker: &mut OperatorWorker<Self>,
        batches: Epoch<BatchOf<Self>>,
        info: &EpochInfo,
    ) -> Result<Metrics> {
        let mut meter = Meter::new();
        for batch in batches {
            let batch = batch?;
            let info = StepInfo {
                batch_idx: meter.batches(),
                epoch_idx: info.epoch_idx,
                global_step: info.global_step,
            };
            let metrics = self.validate_batch(worker, &batch, &info)?;
            meter.update(&metrics, batch.real());
        }
        meter.summary(&worker.accelerator)
    }

    /// Validates on a batch: by default `val_loss`, and `val_accuracy` where the criterion gives logits and targets.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) if there are several models or no criterion.
    fn validate_batch(
        &mut self,
        worker: &mut OperatorWorker<Self>,
        batch: &Batch<BatchOf<Self>>,
        info: &StepInfo,
    ) -> Result<Metrics> {
        worker.models.validate_batch(&worker.accelerator, batch)
    }

    /// Returns the state to save beside models, optimizers and the place in the data: that of rank 0 is saved.
    ///
    /// # Errors
    ///
    /// The errors of the program, the same on every rank.
    fn state_dict(&self) -> Result<serde_json::Value> {
        Ok(serde_json::Value::Null)
    }

    /// Takes back what [`state_dict`](Self::state_dict) gave.
    ///
    /// # Errors
    ///
    /// The errors of the program.
    fn load_state_dict(&mut self, state: serde_json::Value) -> Result<()> {
        Ok(())
    }
}

/// The type of batch that the loaders of an operator make of samples.
pub type BatchOf<T> = <<T as TrainingOperator>::Models as RegisteredModels>::Batch;

/// The rank on which an operator trains.
#[derive(Debug)]
#[non_exhaustive]
pub struct OperatorWorker<T: TrainingOperator> {
    /// The ranks.
    pub accelerator: Accelerator,
    /// The configuration that [`setup`](TrainingOperator::setup) got.
    pub config: T::Config,
    /// The registered models.
    pub models: T::Models,
}

impl<T: TrainingOperator> OperatorWorker<T> {
    /// Returns the number of this rank among all, from 0.
    pub fn world_rank(&self) -> usize {
        self.accelerator.rank()
    }
}

/// The position at which [`train_epoch`](TrainingOperator::train_epoch) begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct EpochInfo {
    /// The epoch of the first batch, from 0.
    pub epoch_idx: u64,
    /// The batches that a rank has trained on before.
    pub global_step: u64,
    /// The number of batches to train on; `None` for the rest of the epoch.
    pub num_steps: Option<u64>,
}

/// The position of [`train_batch`](TrainingOperator::train_batch).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct StepInfo {
    /// The number of the batch in this call of [`OperatorTrainer::train`], from 0.
    pub batch_idx: u64,
    /// The epoch, from 0.
    pub epoch_idx: u64,
    /// The batches that a rank has trained on before.
    pub global_step: u64,
}

/// The registry that [`TrainingOperator::setup`] gets.
#[derive(Debug)]
pub struct Setup<T> {
    accelerator: Accelerator,
    operator: PhantomData<fn() -> T>,
}

impl<T: TrainingOperator> Setup<T> {
    fn new(accelerator: Accelerator) -> Self {
        Self {
            accelerator,
            operator: PhantomData,
        }
    }

    /// The ranks.
    pub fn accelerator(&self) -> &Accelerator {
        &self.accelerator
    }

    /// Registers a model with its optimizer and scheduler. `model_init` makes the model on the device of this rank,
    /// from the seed. As in [`prepare`](Accelerator::prepare), `(optimizer, scheduler)` advances with each step, and
    /// `(optimizer, PerEpoch(scheduler))` with each epoch. Register several models one after the other.
    ///
    /// # Errors
    ///
    /// The errors of [`prepare`](Accelerator::prepare).
    #[track_caller]
    pub fn register<M, K, P>(
        &self,
        model_init: impl FnOnce(&Device) -> M,
        optimizer: P,
    ) -> Result<RegisteredModel<M, BatchOf<T>>>
    where
        M: Module + fmt::Display + 'static,
        P: Prepare<K, Prepared = PreparedOptimizer<Scheduled>>,
    {
        let accelerator = &self.accelerator;
        let model = accelerator.prepare(accelerator.init(model_init))?;
        Ok(RegisteredModel {
            criterion: None,
            model: ModelCell::new(model),
            optimizer: accelerator.prepare(optimizer)?,
            valid: None,
        })
    }

    /// Registers the loaders for training and validation; either may be `None`.
    ///
    /// # Errors
    ///
    /// The errors of [`prepare`](Accelerator::prepare).
    #[track_caller]
    pub fn register_data(
        &self,
        train: Loader<BatchOf<T>>,
        validation: impl Into<Option<Loader<BatchOf<T>>>>,
    ) -> Result<RegisteredData<BatchOf<T>>> {
        let accelerator = &self.accelerator;
        let train = accelerator.prepare(train)?;
        let validation = validation.into();
        Ok(RegisteredData {
            train,
            validation: validation.map(|it| accelerator.prepare(it)).transpose()?,
        })
    }
}

/// The result of [`TrainingOperator::setup`]: everything that it registered.
#[derive(Debug)]
pub struct Registered<T: TrainingOperator> {
    operator: T,
    models: T::Models,
    data: RegisteredData<BatchOf<T>>,
}

impl<T: TrainingOperator> Registered<T> {
    /// Makes the result of the operator, its models and its data.
    pub fn new(operator: T, models: T::Models, data: RegisteredData<BatchOf<T>>) -> Self {
        Self {
            operator,
            models,
            data,
        }
    }
}

/// The batches of one call of [`OperatorTrainer::train`]: the rest of the epoch, or the requested number of batches,
/// from as many epochs as needed.
pub struct TrainBatches<'a, O> {
    has_ended: bool,
    last_epoch: u64,
    loader: &'a PreparedLoader<O>,
    cursor: &'a mut EpochCursor<O>,
    remaining: Option<u64>,
}

/// The position of the training in its data.
struct EpochCursor<O> {
    epoch: u64,
    global_step: u64,
    open: Option<Epoch<O>>,
    /// Set once its last batch was taken.
    is_at_end: bool,
}

impl<O> EpochCursor<O> {
    fn at(epoch: u64, global_step: u64) -> Self {
        Self {
            epoch,
            global_step,
            open: None,
            is_at_end: false,
        }
    }

    /// Ends an epoch whose last batch was taken, so that the next call begins another.
    fn close_at_end(&mut self) {
        if !core::mem::take(&mut self.is_at_end) {
            return;
        }
        if let Some(mut epoch) = self.open.take() {
            // The loader counts an epoch as read once it has returned `None`.
            let _ = epoch.next();
            self.epoch += 1;
        }
    }
}

impl<O: Send + 'static> Iterator for TrainBatches<'_, O> {
    type Item = Result<Batch<O>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended || self.remaining == Some(0) {
            return None;
        }
        let cursor = &mut *self.cursor;
        let mut begins = false;
        loop {
            let open = cursor.open.get_or_insert_with(|| {
                begins = true;
                self.loader.epoch(cursor.epoch)
            });
            match open.next() {
                Some(Ok(batch)) => {
                    cursor.global_step += 1;
                    cursor.is_at_end = batch.is_last();
                    self.last_epoch = batch.epoch();
                    self.remaining = self.remaining.map(|remaining| remaining - 1);
                    return Some(Ok(batch));
                }
                Some(Err(error)) => {
                    self.has_ended = true;
                    return Some(Err(error));
                }
                None => {
                    cursor.open = None;
                    cursor.is_at_end = false;
                    cursor.epoch += 1;
                    // An epoch without batches would be begun for ever.
                    if self.remaining.is_none() || begins {
                        self.has_ended = true;
                        return None;
                    }
                }
            }
        }
    }
}

impl<O> fmt::Debug for TrainBatches<'_, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainBatches")
            .field("epoch", &self.cursor.epoch)
            .field("remaining", &self.remaining)
            .finish_non_exhaustive()
    }
}
