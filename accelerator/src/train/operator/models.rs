//! What each model of an operator can do by itself.

use core::fmt;
use std::path::Path;

use burn::module::Module;

use super::register::RegisteredModel;
use super::runner::OperatorProgress;
use crate::accelerator::Accelerator;
use crate::checkpoint::{Object, Position, Saved};
use crate::core::error::{Error, Result};
use crate::data::{Batch, PreparedLoader};
use crate::metric::Accuracy;
use crate::train::loss::LossOutput;
use crate::train::state::Figures;
use crate::train::trainer::Held;

/// What an operator trains: a [`RegisteredModel`], or a tuple of up to four.
pub trait RegisteredModels: Sized + 'static {
    /// What its loaders make of samples.
    type Batch: Send + 'static;

    #[doc(hidden)]
    fn train_batch(&mut self, _: &Accelerator, _: &Batch<Self::Batch>) -> Result<Figures> {
        Err(several("train"))
    }

    #[doc(hidden)]
    fn validate_batch(&self, _: &Accelerator, _: &Batch<Self::Batch>) -> Result<Figures> {
        Err(several("validate"))
    }

    /// Before validation.
    #[doc(hidden)]
    fn eval(&mut self, accelerator: &Accelerator) -> Result<()>;

    /// Behind it.
    #[doc(hidden)]
    fn train(&mut self);

    #[doc(hidden)]
    fn save(
        &self,
        accelerator: &Accelerator,
        path: &Path,
        loader: &PreparedLoader<Self::Batch>,
        progress: &OperatorProgress,
    ) -> Result<Saved>;

    #[doc(hidden)]
    fn load(
        self,
        accelerator: &Accelerator,
        path: &Path,
        loader: PreparedLoader<Self::Batch>,
    ) -> Result<(
        Self,
        PreparedLoader<Self::Batch>,
        OperatorProgress,
        Position,
    )>;
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

    fn train_batch(&mut self, accelerator: &Accelerator, batch: &Batch<O>) -> Result<Figures> {
        let output = self.output(accelerator, batch)?;
        let weight = output.weight(batch);
        let figures = figures("train", &output, batch);
        let gradients = accelerator.backward(output.loss, self.model.get(), weight)?;
        self.step(gradients);
        Ok(figures)
    }

    fn validate_batch(&self, accelerator: &Accelerator, batch: &Batch<O>) -> Result<Figures> {
        let output = self.output(accelerator, batch)?;
        let mut figures = figures("val", &output, batch);
        if let Some((logits, targets)) = output.outputs {
            let mut accuracy = Accuracy::new();
            accuracy.update(logits, targets, batch.real());
            figures.push("val_accuracy", accuracy.value());
        }
        Ok(figures)
    }

    fn eval(&mut self, accelerator: &Accelerator) -> Result<()> {
        self.valid = Some(accelerator.valid(self.model.get())?);
        Ok(())
    }

    fn train(&mut self) {
        self.valid = None;
    }

    fn save(
        &self,
        accelerator: &Accelerator,
        path: &Path,
        loader: &PreparedLoader<O>,
        progress: &OperatorProgress,
    ) -> Result<Saved> {
        let parts = (self.model.get(), &self.optimizer, loader, Object(progress));
        accelerator.save_state(path, parts)
    }

    fn load(
        self,
        accelerator: &Accelerator,
        path: &Path,
        loader: PreparedLoader<O>,
    ) -> Result<(Self, PreparedLoader<O>, OperatorProgress, Position)> {
        let model = self.model.get().clone();
        let parts = (
            model,
            self.optimizer,
            loader,
            Object(OperatorProgress::default()),
        );
        let ((model, optimizer, loader, Object(progress)), position) =
            accelerator.resume(path, parts)?;
        let loaded = Self {
            model: Held::new(model),
            optimizer,
            ..self
        };
        Ok((loaded, loader, progress, position))
    }
}

/// The loss of a batch, and over how many of its samples or items.
fn figures<O, P>(kind: &str, output: &LossOutput<P>, batch: &Batch<O>) -> Figures {
    let loss = output.loss.clone().into_scalar::<f64>();
    let mut figures = Figures::default();
    figures.push(format!("{kind}_loss"), loss);
    figures.push("num_samples", output.count(batch) as f64);
    figures
}

macro_rules! several_models {
    ($($model:ident $optimizer:ident $part:ident),+) => {
        impl<O: Send + 'static, $($model: Module + fmt::Display + 'static),+> RegisteredModels
            for ($(RegisteredModel<$model, O>,)+)
        {
            type Batch = O;

            fn eval(&mut self, accelerator: &Accelerator) -> Result<()> {
                let ($($part,)+) = self;
                $($part.eval(accelerator)?;)+
                Ok(())
            }

            fn train(&mut self) {
                let ($($part,)+) = self;
                $($part.train();)+
            }

            fn save(
                &self,
                accelerator: &Accelerator,
                path: &Path,
                loader: &PreparedLoader<O>,
                progress: &OperatorProgress,
            ) -> Result<Saved> {
                let ($($part,)+) = self;
                let models = ($(($part.model.get(), &$part.optimizer),)+);
                accelerator.save_state(path, (models, loader, Object(progress)))
            }

            #[allow(non_snake_case, reason = "the names are those of the type parameters")]
            fn load(
                self,
                accelerator: &Accelerator,
                path: &Path,
                loader: PreparedLoader<O>,
            ) -> Result<(Self, PreparedLoader<O>, OperatorProgress, Position)> {
                let ($($part,)+) = self;
                let models = ($(($part.model.get().clone(), $part.optimizer),)+);
                let parts = (models, loader, Object(OperatorProgress::default()));
                let ((models, loader, Object(progress)), position) =
                    accelerator.resume(path, parts)?;
                let ($(($model, $optimizer),)+) = models;
                let models = ($(
                    RegisteredModel {
                        criterion: $part.criterion,
                        model: Held::new($model),
                        optimizer: $optimizer,
                        valid: None,
                    },
                )+);
                Ok((models, loader, progress, position))
            }
        }
    };
}

several_models!(A AO a, B BO b);
several_models!(A AO a, B BO b, C CO c);
several_models!(A AO a, B BO b, C CO c, D DO d);
