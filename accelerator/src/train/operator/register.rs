//! What an operator registers.

use core::fmt;
use core::marker::PhantomData;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use super::runner::Progress;
use super::{BatchOf, TrainingOperator};
use crate::accelerator::{Accelerator, Prepare};
use crate::checkpoint::{Object, Position, Saved};
use crate::core::error::{Error, Result};
use crate::data::{Batch, Loader, PreparedLoader};
use crate::metric::Accuracy;
use crate::optim::{PreparedOptimizer, Scheduled};
use crate::reduce::AveragedGradients;
use crate::train::loss::{Inputs, IntoLossOutput, LossOutput};
use crate::train::state::Figures;
use crate::train::trainer::Held;

/// What [`TrainingOperator::setup`] registers with.
#[derive(Debug)]
pub struct Setup<T> {
    accelerator: Accelerator,
    operator: PhantomData<fn() -> T>,
}

impl<T: TrainingOperator> Setup<T> {
    pub(super) fn new(accelerator: Accelerator) -> Self {
        Self {
            accelerator,
            operator: PhantomData,
        }
    }

    /// The ranks.
    pub fn accelerator(&self) -> &Accelerator {
        &self.accelerator
    }

    /// Registers the model that `model_init` makes on the device of this rank, from the seed, with its optimizer and
    /// scheduler: `(optimizer, scheduler)` advances with each step, `(optimizer, PerEpoch(scheduler))` with each epoch, as
    /// [`prepare`](Accelerator::prepare) takes them. Several models are registered one after the other.
    ///
    /// # Errors
    ///
    /// Those of [`prepare`](Accelerator::prepare).
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
            model: Held::new(model),
            optimizer: accelerator.prepare(optimizer)?,
            valid: None,
        })
    }

    /// Registers what is trained on, and what is validated on: a loader, or `None`.
    ///
    /// # Errors
    ///
    /// Those of [`prepare`](Accelerator::prepare).
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

/// What [`TrainingOperator::setup`] has registered.
#[derive(Debug)]
pub struct Registered<T: TrainingOperator> {
    pub(super) operator: T,
    pub(super) models: T::Models,
    pub(super) data: RegisteredData<BatchOf<T>>,
}

impl<T: TrainingOperator> Registered<T> {
    /// The operator, with what it keeps itself, what it trains, and on what.
    pub fn new(operator: T, models: T::Models, data: RegisteredData<BatchOf<T>>) -> Self {
        Self {
            operator,
            models,
            data,
        }
    }
}

/// What is trained and validated on; of [`Setup::register_data`].
pub struct RegisteredData<O> {
    pub(super) train: PreparedLoader<O>,
    pub(super) validation: Option<PreparedLoader<O>>,
}

impl<O> fmt::Debug for RegisteredData<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredData").finish_non_exhaustive()
    }
}

/// A model with its optimizer and scheduler; of [`Setup::register`].
pub struct RegisteredModel<M, O> {
    criterion: Option<Box<Criterion<M, O>>>,
    model: Held<M>,
    optimizer: PreparedOptimizer<Scheduled>,
    /// While it is validated.
    valid: Option<M>,
}

type Criterion<M, O> = dyn Fn(&M, &Inputs<'_, O>) -> LossOutput<Option<Classes>>;
type Classes = (Tensor<2>, Tensor<1, Int>);

/// What a criterion gives beside its loss: nothing, or logits `[samples, classes]` with targets `[samples]`, for
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
    /// Sets how the loss of a batch is computed: forward, and the mean loss of the batch, alone or as
    /// `(loss, (logits, targets))`, which gives a `val_accuracy`, or as a [`LossOutput`]. It is called for training and
    /// for validation.
    #[must_use]
    pub fn with_criterion<L>(self, criterion: impl Fn(&M, &Inputs<'_, O>) -> L + 'static) -> Self
    where
        L: IntoLossOutput<Outputs: CriterionOutputs>,
    {
        let criterion: Box<Criterion<M, O>> = Box::new(move |model, inputs| {
            let LossOutput {
                loss,
                outputs,
                items,
            } = criterion(model, inputs).into_loss_output();
            LossOutput {
                loss,
                outputs: outputs.into_classes(),
                items,
            }
        });
        Self {
            criterion: Some(criterion),
            ..self
        }
    }

    /// The model; while it is validated, the one that records no gradients.
    pub fn model(&self) -> &M {
        self.valid.as_ref().unwrap_or_else(|| self.model.get())
    }

    /// The optimizer with its scheduler.
    pub fn optimizer(&self) -> &PreparedOptimizer<Scheduled> {
        &self.optimizer
    }

    /// The loss of a batch, by the criterion.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`] without a criterion.
    pub fn loss(&self, accelerator: &Accelerator, batch: &Batch<O>) -> Result<Tensor<1>> {
        Ok(self.output(accelerator, batch)?.loss)
    }

    /// Steps the optimizer with what [`backward`](Accelerator::backward) gave, where the accumulation window has ended.
    #[track_caller]
    pub fn step(&mut self, gradients: AveragedGradients) {
        let optimizer = &mut self.optimizer;
        self.model.replace(|model| optimizer.step(model, gradients));
    }

    fn output(
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

/// What an operator trains: a [`RegisteredModel`], or a tuple of up to four.
pub trait Models: Sized + 'static {
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
        progress: &Progress,
    ) -> Result<Saved>;

    #[doc(hidden)]
    fn load(
        self,
        accelerator: &Accelerator,
        path: &Path,
        loader: PreparedLoader<Self::Batch>,
    ) -> Result<(Self, PreparedLoader<Self::Batch>, Progress, Position)>;
}

fn several(what: &str) -> Error {
    let whole = if what == "train" { "train_epoch" } else { what };
    Error::misuse(format!(
        "several models are registered, and there is no default for how to {what} them: implement `{what}_batch` or \
         `{whole}` of the `TrainingOperator`"
    ))
}

impl<M: Module + fmt::Display + 'static, O: Send + 'static> Models for RegisteredModel<M, O> {
    type Batch = O;

    fn train_batch(&mut self, accelerator: &Accelerator, batch: &Batch<O>) -> Result<Figures> {
        let output = self.output(accelerator, batch)?;
        let weight = match output.items {
            Some(items) => batch.with_weight(items as f64),
            None => batch.weight(),
        };
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
        progress: &Progress,
    ) -> Result<Saved> {
        let parts = (self.model.get(), &self.optimizer, loader, Object(progress));
        accelerator.save_state(path, parts)
    }

    fn load(
        self,
        accelerator: &Accelerator,
        path: &Path,
        loader: PreparedLoader<O>,
    ) -> Result<(Self, PreparedLoader<O>, Progress, Position)> {
        let model = self.model.get().clone();
        let parts = (model, self.optimizer, loader, Object(Progress::default()));
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
    let count = match output.items {
        Some(items) if !batch.is_idle() => items,
        Some(_) => 0,
        None => batch.real(),
    };
    let loss = output.loss.clone().into_scalar::<f64>();
    let mut figures = Figures::default();
    figures.push(format!("{kind}_loss"), loss);
    figures.push("num_samples", count as f64);
    figures
}

macro_rules! several_models {
    ($($model:ident $optimizer:ident $part:ident),+) => {
        impl<O: Send + 'static, $($model: Module + fmt::Display + 'static),+> Models
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
                progress: &Progress,
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
            ) -> Result<(Self, PreparedLoader<O>, Progress, Position)> {
                let ($($part,)+) = self;
                let models = ($(($part.model.get().clone(), $part.optimizer),)+);
                let parts = (models, loader, Object(Progress::default()));
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
