//! The training of each model of an operator by itself.

use core::fmt;

use burn::module::Module;

use super::register::RegisteredModel;
use crate::accelerator::Accelerator;
use crate::checkpoint::{PartKind, Restorer, Resume, Save, kind};
use crate::core::error::{Error, Result};
use crate::data::Batch;
use crate::metric::Accuracy;
use crate::optim::{PreparedOptimizer, Scheduled};
use crate::train::loss::LossOutput;
use crate::train::model_cell::ModelCell;
use crate::train::state::Metrics;

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

    /// Prepares for validation.
    #[doc(hidden)]
    fn eval(&mut self, accelerator: &Accelerator) -> Result<()>;

    /// Returns to training after validation.
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
    type Kinds = (kind::Model, kind::Optimizer);

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

impl<M: Module + fmt::Display, O> Resume<(kind::Model, kind::Optimizer)> for RegisteredModel<M, O> {
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
