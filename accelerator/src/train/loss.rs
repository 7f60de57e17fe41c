//! The output of a program for a batch: its loss, and the inputs of metrics.

use core::ops::Deref;

use burn::tensor::Tensor;

use crate::accelerator::Accelerator;
use crate::core::tensors::Tensors;
use crate::data::Batch;
use crate::data::batch::Weight;

/// The batch that [`compute_loss`](super::Trainer::builder) gets: the batcher's value, with its weight and position.
/// See [`LossOutput`] for an example.
#[derive(Debug)]
pub struct Inputs<'a, O> {
    pub(super) accelerator: &'a Accelerator,
    pub(super) batch: &'a Batch<O>,
}

impl<O> Inputs<'_, O> {
    /// Converts a tensor to the type in which the model computes. With `bf16` and `fp16`, the model's inputs must
    /// have this type.
    pub fn to_working<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.accelerator.to_working(tensor)
    }

    /// Converts a tensor to the type of the weights. Use it for the model's outputs before the loss.
    pub fn to_full<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        self.accelerator.to_full(tensor)
    }
}

impl<O> Deref for Inputs<'_, O> {
    type Target = Batch<O>;

    fn deref(&self) -> &Batch<O> {
        self.batch
    }
}

/// The loss of a batch, with the inputs of the program's metrics.
///
/// ```
/// use accelerator::train::{Inputs, LossOutput};
/// use burn::nn::Linear;
/// use burn::tensor::{Bool, Tensor};
///
/// struct Tokens {
///     inputs: Tensor<3>,
///     targets: Tensor<3>,
///     has_label: Tensor<2, Bool>,
/// }
///
/// /// The mean over the tokens that have a label, in half precision where that is asked for.
/// fn compute_loss(model: &Linear, batch: &Inputs<'_, Tokens>) -> LossOutput<Tensor<3>> {
///     let outputs = batch.to_full(model.forward(batch.to_working(batch.inputs.clone())));
///     let errors = (outputs.clone() - batch.targets.clone()).powi_scalar(2);
///     let errors: Tensor<2> = errors.mean_dim(2).squeeze_dim(2);
///     let labelled = batch.has_label.clone().float();
///     let tokens = labelled.clone().sum().into_scalar::<f64>();
///     let loss = (errors * labelled).sum() / tokens;
///     LossOutput::new(loss).with_num_items(tokens as usize).with_outputs(outputs)
/// }
/// ```
#[derive(Clone, Debug)]
pub struct LossOutput<P = ()> {
    pub(super) loss: Tensor<1>,
    pub(super) outputs: P,
    pub(super) num_items: Option<usize>,
}

impl LossOutput {
    /// Makes an output of the mean loss of the batch.
    pub fn new(loss: Tensor<1>) -> Self {
        Self {
            loss,
            outputs: (),
            num_items: None,
        }
    }
}

impl<P> LossOutput<P> {
    /// Sets the number of items over which the loss is the mean, if they are not the batch's samples: for example,
    /// tokens with a label. Gradients and losses are then averaged over the items of all ranks and batches, as with
    /// Hugging Face's `num_items_in_batch`.
    #[must_use]
    pub fn with_num_items(self, num_items: usize) -> Self {
        Self {
            num_items: Some(num_items),
            ..self
        }
    }

    /// Adds the inputs of metrics, with one row per sample: usually logits and labels.
    pub fn with_outputs<Q>(self, outputs: Q) -> LossOutput<Q> {
        LossOutput {
            loss: self.loss,
            outputs,
            num_items: self.num_items,
        }
    }

    /// Returns over how many of this rank's items the loss is the mean; 0 for an idle batch.
    pub(super) fn count<O>(&self, batch: &Batch<O>) -> usize {
        match self.num_items {
            Some(items) if !batch.is_idle() => items,
            Some(_) => 0,
            None => batch.real(),
        }
    }

    pub(super) fn weight<O>(&self, batch: &Batch<O>) -> Weight {
        match self.num_items {
            Some(items) => batch.with_weight(items as f64),
            None => batch.weight(),
        }
    }
}

/// A value that a loss function may return: a loss, a loss with outputs, or a [`LossOutput`].
pub trait IntoLossOutput {
    /// The inputs of metrics.
    type Outputs: Tensors + Clone + 'static;

    /// The same, in full.
    fn into_loss_output(self) -> LossOutput<Self::Outputs>;
}

impl IntoLossOutput for Tensor<1> {
    type Outputs = ();

    fn into_loss_output(self) -> LossOutput {
        LossOutput::new(self)
    }
}

impl<P: Tensors + Clone + 'static> IntoLossOutput for (Tensor<1>, P) {
    type Outputs = P;

    fn into_loss_output(self) -> LossOutput<P> {
        LossOutput::new(self.0).with_outputs(self.1)
    }
}

impl<P: Tensors + Clone + 'static> IntoLossOutput for LossOutput<P> {
    type Outputs = P;

    fn into_loss_output(self) -> Self {
        self
    }
}
