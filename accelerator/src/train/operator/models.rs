//! The models of an operator, each with its optimizer, and their data; the meter of its metrics.

use core::fmt;

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use serde::{Deserialize, Serialize};

use crate::accelerator::Accelerator;
use crate::checkpoint::{PartKind, Restorer, Resume, Save};
use crate::core::error::{Error, Result};
use crate::core::module;
use crate::data::{Batch, PreparedLoader};
use crate::metric::{Accuracy, Mean};
use crate::optim::{PreparedOptimizer, Scheduled};
use crate::reduce::AveragedGradients;
use crate::train::loss::{Inputs, IntoLossOutput, LossOutput};
use crate::train::state::{Metrics, ModelCell};

/// The models that an operator trains: a [`RegisteredModel`], or a tuple of up to four.
pub trait RegisteredModels: Resume<<Self as RegisteredModels>::Kinds> + 'static {
    /// The batch that its loaders make of samples.
    type Batch: Send + 'static;

    #[doc(hidden)]
    type Kinds;

    #[doc(hidden)]
    fn train_batch(&mut self, _: &Accelerator, _: &Batch<Self::Batch>) -> Result<Metrics> {
        Err(several("train"))
    }

    #[doc(hidden)]
    fn validate_batch(&self, _: &Accelerator, _: &Batch<Self::Batch>) -> Result<Metrics> {
        Err(several("validate"))
    }

    #[doc(hidden)]
    fn eval(&mut self, accelerator: &Accelerator) -> Result<()>;

    #[doc(hidden)]
    fn train(&mut self);

    /// Returns the parts that `Resume` takes back.
    #[doc(hidden)]
    fn parts(&self) -> impl Save<Self::Kinds>;
}

fn several(what: &str) -> Error {
    let whole = if what == "train" { "train_epoch" } else { what };
    Error::misuse(format!(
        "several models are registered, and there is no default for how to {what} them: implement `{what}_batch` or \
         `{whole}` of the `TrainingOperator`"
    ))
}

impl<M: Module + fmt::Display + 'static, O: Send + 'static> RegisteredModels
    for RegisteredModel<M, O>
{
    type Batch = O;
    type Kinds = (module::Model, module::Part);

    fn train_batch(&mut self, accelerator: &Accelerator, batch: &Batch<O>) -> Result<Metrics> {
        let output = self.output(accelerator, batch)?;
        let weight = output.weight(batch);
        let metrics = metrics("train", &output, batch);
        let gradients = accelerator.backward(output.loss, self.model.get(), weight)?;
        self.step(gradients);
        Ok(metrics)
    }

    fn validate_batch(&self, accelerator: &Accelerator, batch: &Batch<O>) -> Result<Metrics> {
        let output = self.output(accelerator, batch)?;
        let mut metrics = metrics("val", &output, batch);
        if let Some((logits, targets)) = output.outputs {
            let mut accuracy = Accuracy::new();
            accuracy.update(logits, targets, batch.real());
            metrics.push("val_accuracy", accuracy.value());
        }
        Ok(metrics)
    }

    fn eval(&mut self, accelerator: &Accelerator) -> Result<()> {
        self.valid = Some(accelerator.valid(self.model.get())?);
        Ok(())
    }

    fn train(&mut self) {
        self.valid = None;
    }

    fn parts(&self) -> impl Save<Self::Kinds> {
        (self.model.get(), &self.optimizer)
    }
}

impl<M: Module + fmt::Display + 'static, O> Resume<(module::Model, module::Part)>
    for RegisteredModel<M, O>
{
    fn kinds(kinds: &mut Vec<PartKind>) {
        <(M, PreparedOptimizer<Scheduled>)>::kinds(kinds);
    }

    fn restore(self, restorer: &mut Restorer<'_>) -> Result<Self> {
        let parts = (self.model.get().clone(), self.optimizer);
        let (model, optimizer) = parts.restore(restorer)?;
        Ok(Self {
            model: ModelCell::new(model),
            optimizer,
            ..self
        })
    }
}

/// Returns the loss of a batch, over its samples or items, and the number of its samples.
fn metrics<O, P>(kind: &str, output: &LossOutput<P>, batch: &Batch<O>) -> Metrics {
    let loss = output.loss.clone().into_scalar::<f64>();
    let name = format!("{kind}_loss");
    let mut metrics = Metrics::default().with_mean_over(name, loss, output.count(batch));
    metrics.push("num_samples", batch.real() as f64);
    metrics
}

macro_rules! several_models {
    ($($model:ident $part:ident),+) => {
        impl<O: Send + 'static, $($model: Module + fmt::Display + 'static),+> RegisteredModels
            for ($(RegisteredModel<$model, O>,)+)
        {
            type Batch = O;
            type Kinds = ($(<RegisteredModel<$model, O> as RegisteredModels>::Kinds,)+);

            fn eval(&mut self, accelerator: &Accelerator) -> Result<()> {
                let ($($part,)+) = self;
                $($part.eval(accelerator)?;)+
                Ok(())
            }

            fn train(&mut self) {
                let ($($part,)+) = self;
                $($part.train();)+
            }

            fn parts(&self) -> impl Save<Self::Kinds> {
                let ($($part,)+) = self;
                ($($part.parts(),)+)
            }
        }
    };
}

several_models!(A a, B b);
several_models!(A a, B b, C c);
several_models!(A a, B b, C c, D d);

/// The data to train and validate on; made by [`Setup::register_data`](super::Setup::register_data).
pub struct RegisteredData<O> {
    pub(super) train: PreparedLoader<O>,
    pub(super) validation: Option<PreparedLoader<O>>,
}

impl<O> fmt::Debug for RegisteredData<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredData").finish_non_exhaustive()
    }
}

/// A model with its optimizer and scheduler; made by [`Setup::register`](super::Setup::register).
pub struct RegisteredModel<M, O> {
    pub(super) criterion: Option<Box<Criterion<M, O>>>,
    pub(super) model: ModelCell<M>,
    pub(super) optimizer: PreparedOptimizer<Scheduled>,
    /// The model that is validated, meanwhile.
    pub(super) valid: Option<M>,
}

pub(super) type Criterion<M, O> = dyn Fn(&M, &Inputs<'_, O>) -> LossOutput<Option<Classes>>;
pub(super) type Classes = (Tensor<2>, Tensor<1, Int>);

/// The outputs of a criterion besides its loss: nothing, or logits `[samples, classes]` with targets `[samples]`, for
/// `val_accuracy`.
pub trait CriterionOutputs {
    #[doc(hidden)]
    fn into_classes(self) -> Option<(Tensor<2>, Tensor<1, Int>)>;
}

impl CriterionOutputs for () {
    fn into_classes(self) -> Option<Classes> {
        None
    }
}

impl CriterionOutputs for Classes {
    fn into_classes(self) -> Option<Classes> {
        Some(self)
    }
}

impl<M: Module + fmt::Display + 'static, O> RegisteredModel<M, O> {
    /// Sets the function that runs the forward pass and returns the mean loss of the batch. It may return the loss
    /// alone, `(loss, (logits, targets))`, which also gives a `val_accuracy`, or a [`LossOutput`]. It is called for
    /// training and for validation.
    #[must_use]
    pub fn with_criterion<L>(self, criterion: impl Fn(&M, &Inputs<'_, O>) -> L + 'static) -> Self
    where
        L: IntoLossOutput<Outputs: CriterionOutputs>,
    {
        let criterion: Box<Criterion<M, O>> = Box::new(move |model, inputs| {
            let LossOutput {
                loss,
                outputs,
                num_items,
            } = criterion(model, inputs).into_loss_output();
            LossOutput {
                loss,
                outputs: outputs.into_classes(),
                num_items,
            }
        });
        Self {
            criterion: Some(criterion),
            ..self
        }
    }

    /// Returns the model. During validation, it is a copy that records no gradients.
    pub fn model(&self) -> &M {
        self.valid.as_ref().unwrap_or_else(|| self.model.get())
    }

    /// Returns the optimizer with its scheduler.
    pub fn optimizer(&self) -> &PreparedOptimizer<Scheduled> {
        &self.optimizer
    }

    /// Computes the loss of a batch with the criterion.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] without a criterion.
    pub fn loss(&self, accelerator: &Accelerator, batch: &Batch<O>) -> Result<Tensor<1>> {
        Ok(self.output(accelerator, batch)?.loss)
    }

    /// Steps the optimizer with the gradients of [`backward`](Accelerator::backward), if the accumulation window has
    /// ended.
    #[track_caller]
    pub fn step(&mut self, gradients: AveragedGradients) {
        let optimizer = &mut self.optimizer;
        self.model.replace(|model| optimizer.step(model, gradients));
    }

    pub(super) fn output(
        &self,
        accelerator: &Accelerator,
        batch: &Batch<O>,
    ) -> Result<LossOutput<Option<Classes>>> {
        let Some(criterion) = &self.criterion else {
            return Err(Error::misuse(
                "a model was registered without a criterion: add `.with_criterion(…)` to `register` in `setup`, or \
                 implement `train_batch` and `validate_batch`",
            ));
        };
        let inputs = Inputs { accelerator, batch };
        Ok(accelerator.forward(self.model(), |model| criterion(model, &inputs)))
    }
}

impl<M, O> fmt::Debug for RegisteredModel<M, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredModel")
            .field("optimizer", &self.optimizer)
            .finish_non_exhaustive()
    }
}

/// Collects the metrics of batches: Ray SGD's `AverageMeterCollection`, with means that are exact over all ranks.
///
/// ```
/// use accelerator::train::{Metrics, Meter};
///
/// let metrics = accelerator::launch(2, |accelerator| {
///     let mut meter = Meter::new();
///     // A loss of 0 over one sample on rank 0, and of 1 over three on rank 1.
///     let rank = accelerator.rank();
///     meter.update(&Metrics::from_iter([("train_loss", rank as f64)]), 1 + 2 * rank);
///     meter.summary(&accelerator)
/// })?;
/// assert_eq!(
///     metrics[0].to_string(),
///     "{'batch_count': 1, 'num_samples': 4, 'train_loss': 0.75, 'last_train_loss': 0.75}"
/// );
/// # Ok::<(), accelerator::Error>(())
/// ```
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Meter {
    batches: u64,
    entries: Vec<MeterEntry>,
    samples: f64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct MeterEntry {
    name: String,
    all: Mean,
    last: Mean,
}

impl Meter {
    /// Makes an empty meter.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the metrics of a batch of this rank. They are means over `num_samples` if that is one of the metrics,
    /// else over `samples`, or over [other items](Metrics::with_mean_over). Without samples, as on an idle rank, they
    /// have no weight.
    pub fn update(&mut self, metrics: &Metrics, samples: usize) {
        let samples = metrics.value("num_samples").unwrap_or(samples as f64);
        self.batches += 1;
        self.samples += samples;
        for (name, value) in metrics.iter().filter(|(name, _)| *name != "num_samples") {
            let count = metrics.count(name).map(|items| items as f64);
            let last = Mean::weighted(value, count.unwrap_or(samples));
            let entry = self.entry(name);
            entry.all.merge(last);
            entry.last = last;
        }
    }

    /// Returns the number of batches added.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Returns the metrics of all ranks, the same on each: `batch_count`, the most of any rank; `num_samples` of all;
    /// for each metric its mean over them; and the mean of the last batches as `last_…`. Every rank must call it.
    ///
    /// # Errors
    ///
    /// [`Error::is_collective`](crate::Error::is_collective) when another rank is lost.
    pub fn summary(&self, accelerator: &Accelerator) -> Result<Metrics> {
        let mut all = Self::new();
        for theirs in accelerator.gather_object(self)? {
            all.batches = all.batches.max(theirs.batches);
            all.samples += theirs.samples;
            for MeterEntry {
                name,
                all: sum,
                last,
            } in theirs.entries
            {
                let entry = all.entry(&name);
                entry.all.merge(sum);
                entry.last.merge(last);
            }
        }
        let mut metrics = Metrics::default();
        metrics.push("batch_count", all.batches as f64);
        metrics.push("num_samples", all.samples);
        for MeterEntry { name, all, last } in all.entries {
            metrics.push(name.clone(), all.value());
            metrics.push(format!("last_{name}"), last.value());
        }
        Ok(metrics)
    }

    fn entry(&mut self, name: &str) -> &mut MeterEntry {
        let known = self.entries.iter().position(|entry| entry.name == name);
        let at = known.unwrap_or_else(|| {
            self.entries.push(MeterEntry {
                name: name.to_owned(),
                all: Mean::new(),
                last: Mean::new(),
            });
            self.entries.len() - 1
        });
        &mut self.entries[at]
    }
}
