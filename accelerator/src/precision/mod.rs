//! Computing in half precision, with parameters in full.
//!
//! What differs from the loop in full precision:
//!
//! ```diff
//! -let accelerator = Accelerator::new()?;
//! +let accelerator = Accelerator::builder().precision(Precision::Bf16).build()?;
//!  …
//! -let loss = cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
//! +let loss = accelerator.forward(&model, |model| {
//! +    let logits = model.forward(accelerator.to_working(batch.images.clone()));
//! +    cross_entropy(accelerator.to_full(logits), batch.targets.clone())
//! +});
//!  let gradients = accelerator.backward(loss, &model, &batch)?;
//!  model = optimizer.step(model, gradients);
//! ```
//!
//! The same loop also runs in full precision: [`Precision::No`] makes all three calls no-ops, and
//! `ACCEL_PRECISION=bf16` selects half precision if the program does not set one.
//!
//! The model that the program holds has the *master weights*, in `f32` (or the
//! [`dtype`](crate::AcceleratorBuilder::dtype) that was asked for): the optimizer updates them,
//! checkpoints save them, and `model.valid()` evaluates with them. `forward` lends a *working copy*, whose
//! parameters are cast from the masters inside the graph, so that gradients come back to the masters in
//! full precision. A copy serves one backward; `forward` makes a new one each time, which costs half the
//! memory of the parameters while it lives.
//!
//! # What stays in full precision
//!
//! - Losses: cast what goes into them, with [`to_full`](crate::Accelerator::to_full).
//! - `BatchNorm`: Burn's cannot mix half-precision inputs with its running statistics, so its
//!   parameters stay in full precision in the copy. In the model's own `forward`, wrap it in [`in_full`],
//!   which casts its input to `f32` and its output back. `LayerNorm`, `GroupNorm` and `RmsNorm` compute in `f32` by
//!   themselves.
//! - What [`working_copy`](crate::Accelerator::working_copy) is told to keep.
//!
//! # Overflow
//!
//! `f16` has few exponents: gradients below 6·10⁻⁸ are 0, and nothing above 65504 is finite. So with
//! [`Precision::F16`] the loss is multiplied by a [scale](LossScale) before backward, and the averaged
//! gradients are divided by it. If a reduced gradient is not finite, the step is skipped on all ranks,
//! which see the same bits: the optimizer reports
//! [`StepOutcome::Skipped`](crate::optim::StepOutcome::Skipped), its schedule does not advance, and the scale is
//! smaller from then on. Each model has a scale of its own, which checkpoints keep.
//!
//! ```
//! use accelerator::prelude::*;
//! use accelerator::precision::Precision;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::SgdConfig;
//! use burn::tensor::{DType, Tensor};
//!
//! let accelerator = Accelerator::builder().precision(Precision::F16).build()?;
//! let device = accelerator.device();
//! let model: Linear = LinearConfig::new(2, 1).init(&device);
//! let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
//! for _ in 0..20 {
//!     let input = accelerator.to_working(Tensor::<2>::ones([4, 2], &device));
//!     let loss = accelerator.forward(&model, |model| {
//!         let output = model.forward(input);
//!         assert_eq!(output.dtype(), DType::F16);
//!         accelerator.to_full(output).powi_scalar(2).mean()
//!     });
//!     let gradients = accelerator.backward(loss, &model, 4)?;
//!     model = optimizer.step(0.1, model, gradients);
//!     // The first steps may be, until the scale is small enough.
//!     if let StepOutcome::Skipped { scale } = optimizer.outcome() {
//!         accelerator.print(format_args!("the scale {scale} is too large"));
//!     }
//! }
//! assert!(optimizer.steps() > 10);
//! assert_eq!(model.weight.val().dtype(), DType::F32);
//! # Ok::<(), Error>(())
//! ```

mod cast;
mod scale;

use core::fmt;
use core::str::FromStr;

use burn::tensor::{DType, FloatDType, Tensor};

pub(crate) use self::cast::Cast;
pub use self::scale::LossScale;
pub(crate) use self::scale::{Finiteness, Scaler, ScalerState, SkipNotice};
use crate::core::error::{Error, Result, named};

/// The type in which forward and backward compute. Parameters, their gradients and the optimizer stay in
/// full precision. As text, the settings have the names of `ACCEL_PRECISION`.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Precision {
    /// bfloat16: the range of `f32` with 8 bits of precision.
    Bf16,
    /// Half precision of 11 bits, in a narrow range: the loss is [scaled](LossScale).
    F16,
    /// The type of the parameters.
    #[default]
    No,
}

impl Precision {
    const ALL: [Self; 3] = [Self::No, Self::F16, Self::Bf16];

    /// The type of a working copy; `None` if there is none.
    pub(crate) fn dtype(self) -> Option<FloatDType> {
        match self {
            Self::Bf16 => Some(FloatDType::BF16),
            Self::F16 => Some(FloatDType::F16),
            Self::No => None,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::No => "no",
        })
    }
}

impl FromStr for Precision {
    type Err = Error;

    /// Reads the name of a setting, or PyTorch's `fp16` for `f16`.
    fn from_str(name: &str) -> Result<Self> {
        match name {
            "fp16" => Ok(Self::F16),
            _ => named("precision", name, &Self::ALL),
        }
    }
}

/// Runs `layer` in `f32` on an input that may be in half precision, and gives its output in the
/// input's type: for layers that do not compute in half precision. A full-precision input is passed
/// through unchanged.
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
