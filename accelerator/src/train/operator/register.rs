//! The registration of an operator's models and data.

use core::fmt;
use core::marker::PhantomData;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use super::{BatchOf, TrainingOperator};
use crate::accelerator::{Accelerator, Prepare};
use crate::core::error::{Error, Result};
use crate::data::{Batch, Loader, PreparedLoader};
use crate::optim::{PreparedOptimizer, Scheduled};
use crate::reduce::AveragedGradients;
use crate::train::loss::{Inputs, IntoLossOutput, LossOutput};
use crate::train::model_cell::ModelCell;

/// The registry that [`TrainingOperator::setup`] gets.
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

    /// Registers what is trained on, and what is validated on: a loader, or `None`.
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

/// The data to train and validate on; made by [`Setup::register_data`].
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
    pub(super) criterion: Option<Box<Criterion<M, O>>>,
    pub(super) model: ModelCell<M>,
    pub(super) optimizer: PreparedOptimizer<Scheduled>,
    /// The model that is validated, meanwhile.
    pub(super) valid: Option<M>,
}

pub(super) type Criterion<M, O> = dyn Fn(&M, &Inputs<'_, O>) -> LossOutput<Option<Classes>>;
pub(super) type Classes = (Tensor<2>, Tensor<1, Int>);

/// The outputs of a criterion beside its loss: nothing, or logits `[samples, classes]` with targets `[samples]`, for
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
