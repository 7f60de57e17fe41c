//! Activations, a number at a time.

use burn_flex::FlexTensor;

use super::loops::{mapped, mapped_both, shape, tensor, values};
use super::math::{erf, exp, sigmoid};
use crate::backend::{Backprop, Forward};

/// An activation with a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Elementwise {
    Gelu,
    GeluTanh,
    Silu,
    Relu,
}

impl Elementwise {
    /// Returns the operation. It keeps for backward its input, or its output if that is enough.
    pub(crate) fn forward(self) -> Forward<1> {
        Box::new(move |[x]| {
            let x = x.to_contiguous();
            let y = tensor(self.of(values(&x)), shape(&x));
            let kept = match self {
                Self::Relu => y.clone(),
                Self::Gelu | Self::GeluTanh | Self::Silu => x,
            };
            let back: Backprop<1> = Box::new(move |gradient, _| {
                let gradient = gradient.to_contiguous();
                [Some(self.back(&kept, &gradient))]
            });
            (y, back)
        })
    }

    fn of(self, x: &[f32]) -> Vec<f32> {
        match self {
            Self::Gelu => mapped(x, |x| {
                0.5 * x * (1.0 + erf(x * core::f32::consts::FRAC_1_SQRT_2))
            }),
            Self::GeluTanh => mapped(x, |x| x * sigmoid(2.0 * inner(x))),
            Self::Silu => mapped(x, |x| x * sigmoid(x)),
            Self::Relu => mapped(x, relu),
        }
    }

    fn back(self, kept: &FlexTensor, gradient: &FlexTensor) -> FlexTensor {
        let (of, g) = (values(kept), values(gradient));
        let dx = match self {
            Self::Gelu => mapped_both(of, g, |x, g| {
                let below = 0.5 * (1.0 + erf(x * core::f32::consts::FRAC_1_SQRT_2));
                let density = ONE_BY_ROOT_TWO_PI * exp(-0.5 * x * x);
                g * x.mul_add(density, below)
            }),
            Self::GeluTanh => mapped_both(of, g, |x, g| {
                let u = 2.0 * inner(x);
                let slope = 2.0 * ROOT_TWO_BY_PI * (3.0 * CUBIC * x).mul_add(x, 1.0);
                let e = exp(-u.abs());
                let larger = 1.0 / (1.0 + e);
                let s = if u < 0.0 { e * larger } else { larger };
                // The slope of the sigmoid `s`, without the difference of two numbers close to one.
                let steepness = e * larger * larger;
                g * (x * steepness).mul_add(slope, s)
            }),
            Self::Silu => mapped_both(of, g, |x, g| {
                let s = sigmoid(x);
                g * s * (1.0 - s).mul_add(x, 1.0)
            }),
            Self::Relu => mapped_both(of, g, through_relu),
        };
        tensor(dx, shape(kept))
    }
}

/// Returns the larger of a number and 0, and NaN for NaN.
#[inline(always)]
pub(super) fn relu(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

/// Returns the gradient of a number, given `y`, its [`relu`], and the gradient of `y`.
#[inline(always)]
pub(super) fn through_relu(y: f32, gradient: f32) -> f32 {
    // The gradient passes if `y` is NaN.
    if y <= 0.0 { 0.0 } else { gradient }
}

const ONE_BY_ROOT_TWO_PI: f32 = 0.398_942_3;
const ROOT_TWO_BY_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

/// The argument of the hyperbolic tangent by which GELU is approximated. With it, `(1 + tanh(u)) / 2` is the sigmoid of
/// `2 · u`.
#[inline(always)]
fn inner(x: f32) -> f32 {
    ROOT_TWO_BY_PI * (CUBIC * x * x).mul_add(x, x)
}
