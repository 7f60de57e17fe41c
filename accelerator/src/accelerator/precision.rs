use core::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::module::Module;
use burn::tensor::{DType, Tensor};

use super::Accelerator;
use crate::core::error::{Result, panic_text};
use crate::reduce::working_copy;

/// Computes in half precision.
impl Accelerator {
    /// Runs the forward pass on a [working copy](Self::working_copy) of the model, or on the model
    /// itself with [`Precision::No`](crate::precision::Precision::No). See the [module](crate::precision) for the whole loop.
    ///
    /// The inputs of the model must be in that precision too: pass the inputs through
    /// [`to_working`](Self::to_working) before, and the output through [`to_full`](Self::to_full) before the
    /// loss. State that the model makes itself is made in the type of what came in
    /// (`LstmState::new(Tensor::zeros(shape, (&device, input.dtype())), …)`, not `LstmState::initial`).
    ///
    /// # Panics
    ///
    /// Panics if `forward` does. If Burn says that two types do not fit together, the panic says first
    /// which calls are missing.
    #[track_caller]
    pub fn forward<M: Module + 'static, T>(&self, model: &M, forward: impl FnOnce(&M) -> T) -> T {
        if self.precision().dtype().is_none() {
            return forward(model);
        }
        let copy = self.working_copy(model, |_| false);
        // Nothing is used again after a panic, which continues.
        match catch_unwind(AssertUnwindSafe(|| forward(&copy))) {
            Ok(output) => output,
            Err(panic) => self.explain(panic),
        }
    }

    /// Continues with a panic of a forward pass; one about types says what to do.
    #[track_caller]
    fn explain(&self, panic: Box<dyn Any + Send>) -> ! {
        let said = panic_text(&*panic);
        // Burn names the types that do not fit together.
        let working = self.precision().dtype();
        let names_it = working.is_some_and(|dtype| said.contains(&format!("{dtype:?}")));
        if !(names_it && said.to_lowercase().contains("dtype")) {
            resume_unwind(panic);
        }
        let full =
            format!("{:?}", self.shared.context.device.settings().float_dtype).to_lowercase();
        panic!(
            "the model computes in {}, and met a tensor of another type, such as {}: pass what goes in through \
             `accelerator.to_working(input)`, and what comes out through `accelerator.to_full(output)`; make \
             tensors inside the model, such as an initial state, in the type of what came in, `input.dtype()`. \
             The panic says: {said}",
            self.precision(),
            full
        )
    }

    /// Returns the model with parameters in the [precision](Self::precision) to compute in. They are cast from the
    /// parameters of `model`, which still get the gradients. `BatchNorm` stays as it is, and so do the parameters
    /// whose paths (`layers.0.weight`) `keep` chooses. With [`Precision::No`](crate::precision::Precision::No), this
    /// is the same model.
    ///
    /// It serves one backward pass, and is gone with it: [`forward`](Self::forward) makes one each time.
    /// Two models that share parameters, or two forward passes whose losses are added, may each have a
    /// copy; then gradients are sent when backward has ended, whatever
    /// [`Overlap`](crate::Overlap) says. One whose loss goes to no backward looks like the first of two, and is
    /// kept until the next backward: evaluate on `model.valid()`, which leaves nothing behind.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::DType;
    ///
    /// let accelerator = Accelerator::builder().precision(Precision::Bf16).build()?;
    /// # let device = accelerator.device();
    /// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
    /// let copy = accelerator.working_copy(&model, |path| path.ends_with("bias"));
    /// assert_eq!(copy.weight.val().dtype(), DType::BF16);
    /// assert_eq!(copy.bias.unwrap().val().dtype(), DType::F32);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn working_copy<M: Module + 'static>(&self, model: &M, keep: impl Fn(&str) -> bool) -> M {
        working_copy(&self.shared.reduction, model, &keep).into_model()
    }

    /// Casts a tensor to the [precision](Self::precision) to compute in. Use it for inputs of the model in
    /// [`forward`](Self::forward). Tensors of integers, such as tokens, need no cast. Without `forward`, Burn panics
    /// where the two types meet; when the accelerator is dropped in a panic and no working copy was ever made, rank 0
    /// says what is missing.
    pub fn to_working<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        match self.precision().dtype() {
            Some(dtype) => {
                self.shared.reduction.working.note_cast();
                tensor.cast(dtype)
            }
            None => tensor,
        }
    }

    /// Casts a half-precision tensor to the type of the parameters. Use it for inputs of a loss or a metric.
    pub fn to_full<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        let full = self.shared.context.device.settings().float_dtype;
        match (self.precision().dtype(), tensor.dtype()) {
            (Some(_), DType::F16 | DType::BF16) => tensor.cast(full),
            _ => tensor,
        }
    }

    /// Returns the factor by which the loss of a model is multiplied before backward; `None` if it is not scaled.
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) for a model that was not prepared.
    pub fn loss_scale<M: Module + 'static>(&self, model: &M) -> Result<Option<f64>> {
        Ok(self.shared.reduction.models.find(model)?.loss_scale())
    }
}
