use core::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, FloatDType, Tensor};

use crate::accelerator::Accelerator;
use crate::core::module_path::ModulePath;
use crate::core::panic_text::panic_text;
use crate::reduce::{ModelState, WorkingPart};

use super::cast::Cast;

/// Runs `layer` in `f32` on an input that may be in half precision, and gives its output in the
/// input's type: for layers that do not compute in half precision. What is in full precision goes
/// through as it is.
///
/// ```
/// use accelerator::precision::in_full;
/// use burn::nn::{BatchNorm, BatchNormConfig};
/// use burn::tensor::{DType, Device, Tensor};
///
/// let norm: BatchNorm = BatchNormConfig::new(3).init(&Device::default());
/// let half = Tensor::<3>::ones([2, 3, 4], &Device::default()).cast(DType::BF16);
/// let output = in_full(half, |x| norm.forward(x));
/// assert_eq!(output.dtype(), DType::BF16);
/// ```
pub fn in_full<const D: usize, const E: usize>(
    input: Tensor<D>,
    layer: impl FnOnce(Tensor<D>) -> Tensor<E>,
) -> Tensor<E> {
    match input.dtype() {
        half @ (DType::F16 | DType::BF16) => layer(input.cast(DType::F32)).cast(half),
        _ => layer(input),
    }
}

impl Accelerator {
    /// Runs the forward pass on a [working copy](Self::working_copy) of the model, or on the model
    /// itself with [`Precision::No`](super::Precision::No). See the [module](super) for the whole loop.
    ///
    /// What goes into the model must be in that precision too: pass the inputs through
    /// [`to_working`](Self::to_working) before, and the output through [`to_full`](Self::to_full) before the
    /// loss. State that the model makes itself is made in the type of what came in
    /// (`LstmState::new(Tensor::zeros(shape, (&device, input.dtype())), …)`, not `LstmState::initial`).
    ///
    /// # Panics
    ///
    /// With what `forward` panics. Where Burn says that two types do not fit together, the panic says first
    /// which calls are missing.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::{DType, Tensor};
    ///
    /// let accelerator = Accelerator::builder().precision(Precision::Bf16).build()?;
    /// # let device = accelerator.device();
    /// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
    /// # let inputs = Tensor::<2>::ones([4, 2], &device);
    /// # let targets = Tensor::<2>::zeros([4, 1], &device);
    /// let loss = accelerator.forward(&model, |model| {
    ///     let outputs = model.forward(accelerator.to_working(inputs));
    ///     assert_eq!(outputs.dtype(), DType::BF16);
    ///     (accelerator.to_full(outputs) - targets).powi_scalar(2).mean()
    /// });
    /// let gradients = accelerator.backward(loss, &model, 4)?;
    /// # let _ = gradients;
    /// # Ok::<(), Error>(())
    /// ```
    #[track_caller]
    pub fn forward<M: Module, T>(&self, model: &M, forward: impl FnOnce(&M) -> T) -> T {
        if self.precision().dtype().is_none() {
            return forward(model);
        }
        let copy = self.working_copy(model);
        // Nothing is used again after a panic, which goes on.
        match catch_unwind(AssertUnwindSafe(|| forward(&copy))) {
            Ok(output) => output,
            Err(panic) => self.explain(panic),
        }
    }

    /// Goes on with a panic of a forward pass; one about types says what to do.
    #[track_caller]
    fn explain(&self, panic: Box<dyn Any + Send>) -> ! {
        let said = panic_text(&*panic);
        // Burn names the types that do not fit together.
        let working = self.precision().dtype();
        let names_it = working.is_some_and(|dtype| said.contains(&format!("{dtype:?}")));
        if !(names_it && said.to_lowercase().contains("dtype")) {
            resume_unwind(panic);
        }
        let full = format!("{:?}", self.shared.device.settings().float_dtype).to_lowercase();
        panic!(
            "the model computes in {}, and met a tensor of another type, such as {}: pass what goes in through \
             `accelerator.to_working(input)`, and what comes out through `accelerator.to_full(output)`; make \
             tensors inside the model, such as an initial state, in the type of what came in, `input.dtype()`. \
             The panic says: {said}",
            self.precision(),
            full
        )
    }

    /// The model with parameters in the [precision](Self::precision) to compute in, cast from those of
    /// `model`, which get the gradients. `BatchNorm` stays as it is. With
    /// [`Precision::No`](super::Precision::No) it is the same model.
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
    /// let copy = accelerator.working_copy(&model);
    /// assert_eq!(copy.weight.val().dtype(), DType::BF16);
    /// assert_eq!(model.weight.val().dtype(), DType::F32);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn working_copy<M: Module>(&self, model: &M) -> M {
        self.working_copy_except(model, |_| false)
    }

    /// The same, but for parameters with paths (`layers.0.weight`) that `keep` chooses, which stay as they
    /// are.
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::DType;
    ///
    /// let accelerator = Accelerator::builder().precision(Precision::Bf16).build()?;
    /// # let device = accelerator.device();
    /// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
    /// let copy = accelerator.working_copy_except(&model, |path| path.ends_with("bias"));
    /// assert_eq!(copy.weight.val().dtype(), DType::BF16);
    /// assert_eq!(copy.bias.unwrap().val().dtype(), DType::F32);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn working_copy_except<M: Module>(&self, model: &M, keep: impl Fn(&str) -> bool) -> M {
        let Some(dtype) = self.precision().dtype() else {
            return model.clone();
        };
        self.shared.working.copied.store(true, Ordering::Relaxed);
        // One that was not prepared, for evaluation say, has no gradients to wait for.
        let slot = self.shared.models.find(model).ok();
        let mut caster = Caster {
            dtype,
            keep: &keep,
            norms: 0,
            parts: Vec::new(),
            path: ModulePath::default(),
            slot: slot.as_deref(),
            trains: false,
        };
        if let Some(slot) = &slot {
            caster.parts.resize_with(slot.parameters().len(), || None);
        }
        let copy = model.clone().map(&mut caster);
        let Caster { parts, trains, .. } = caster;
        if let Some(slot) = &slot
            && trains
        {
            slot.note_copied();
        }
        if let Some(slot) = &slot
            && parts.iter().any(Option::is_some)
        {
            slot.note_working(parts);
        }
        copy
    }

    /// A tensor in the [precision](Self::precision) to compute in: for what goes into the model in
    /// [`forward`](Self::forward). Tensors of integers, such as tokens, need nothing. Without `forward`, Burn panics
    /// where the two types meet; when the accelerator is dropped in a panic and no working copy was ever made, rank 0
    /// says what is missing.
    pub fn to_working<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        match self.precision().dtype() {
            Some(dtype) => {
                self.shared.working.cast.store(true, Ordering::Relaxed);
                tensor.cast(dtype)
            }
            None => tensor,
        }
    }

    /// A tensor in the type of the parameters, if it is in half precision: for what goes into a loss or a
    /// metric.
    pub fn to_full<const D: usize>(&self, tensor: Tensor<D>) -> Tensor<D> {
        let full = self.shared.device.settings().float_dtype;
        match (self.precision().dtype(), tensor.dtype()) {
            (Some(_), DType::F16 | DType::BF16) => tensor.cast(full),
            _ => tensor,
        }
    }

    /// By what the loss of a model is multiplied before backward; `None` where it is not scaled.
    ///
    /// ```
    /// use accelerator::precision::LossScale;
    /// use accelerator::prelude::*;
    /// # use burn::nn::{Linear, LinearConfig};
    ///
    /// let accelerator = Accelerator::builder()
    ///     .precision(Precision::F16)
    ///     .loss_scale(LossScale::new().with_initial(1024.0))
    ///     .build()?;
    /// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&accelerator.device()))?;
    /// assert_eq!(accelerator.loss_scale(&model)?, Some(1024.0), "until steps say otherwise");
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::is_misuse`](crate::Error::is_misuse) for a model that was not prepared.
    pub fn loss_scale<M: Module>(&self, model: &M) -> crate::Result<Option<f64>> {
        Ok(self.shared.models.find(model)?.loss_scale())
    }
}

/// Which half of a forward pass in half precision the program has ever asked for.
#[derive(Debug, Default)]
pub(crate) struct WorkingUse {
    /// An input was cast.
    cast: AtomicBool,
    /// A working copy of a model was made.
    copied: AtomicBool,
}

impl WorkingUse {
    /// Whether inputs are in half precision, and no model is: most models panic then, without a word of what is missing.
    pub(crate) fn lacks_copy(&self) -> bool {
        self.cast.load(Ordering::Relaxed) && !self.copied.load(Ordering::Relaxed)
    }
}

/// Casts parameters inside the graph, and notes what became of those that take a gradient.
struct Caster<'a, K> {
    dtype: FloatDType,
    keep: &'a K,
    /// Inside of how many layers that do not compute in half precision.
    norms: usize,
    parts: Vec<Option<WorkingPart>>,
    path: ModulePath,
    slot: Option<&'a ModelState>,
    /// Whether there is a parameter that takes a gradient.
    trains: bool,
}

impl<K: Fn(&str) -> bool> ModuleMapper for Caster<'_, K> {
    fn enter_module(&mut self, name: &str, kind: &str) {
        self.path.enter(name);
        self.norms += usize::from(is_norm(kind));
    }

    fn exit_module(&mut self, _name: &str, kind: &str) {
        self.path.exit();
        self.norms -= usize::from(is_norm(kind));
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.trains |= param.is_require_grad();
        if self.norms > 0 || (self.keep)(self.path.as_str()) {
            return param;
        }
        let (id, value, mapper) = param.consume();
        let trained = value.is_require_grad();
        let index = self.slot.and_then(|slot| slot.number(id));
        let part = index.filter(|_| trained);
        let mut part = part.and_then(|index| self.parts.get_mut(index));
        // All places of a tied parameter get one cast, and it one gradient.
        if let Some(Some(part)) = &part {
            let working = Tensor::<D>::from_dispatch(part.tensor.clone());
            return Param::from_mapped_value(id, working, mapper);
        }
        let (working, cast) = match trained {
            true => Cast::of(value, self.dtype),
            false => (value.cast(self.dtype), None),
        };
        if let Some(part) = &mut part {
            **part = Some(WorkingPart {
                tensor: working.clone().into_dispatch(),
                cast,
            });
        }
        Param::from_mapped_value(id, working, mapper)
    }
}

/// Layers whose running statistics are shared by all copies of them, and stay in full precision: Burn's,
/// and ours.
fn is_norm(kind: &str) -> bool {
    kind.ends_with(":BatchNorm") || kind.ends_with(":SyncBatchNorm")
}
