use core::fmt;
use std::sync::{Arc, OnceLock};

use burn::backend::DispatchTensor;
use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};

/// Runs `$body` with `$D` bound to the rank of a tensor that is known at run time only. Burn's
/// containers of gradients want the rank as a constant, and panic on a wrong one.
macro_rules! with_rank {
    ($rank:expr, $D:ident => $body:expr) => {
        match $rank {
            0 | 1 => {
                const $D: usize = 1;
                $body
            }
            2 => {
                const $D: usize = 2;
                $body
            }
            3 => {
                const $D: usize = 3;
                $body
            }
            4 => {
                const $D: usize = 4;
                $body
            }
            5 => {
                const $D: usize = 5;
                $body
            }
            6 => {
                const $D: usize = 6;
                $body
            }
            7 => {
                const $D: usize = 7;
                $body
            }
            _ => {
                const $D: usize = 8;
                $body
            }
        }
    };
}

pub(crate) use with_rank;

/// A tensor of floats of any rank, for operations in which each element is for itself: compiled once, not once per rank.
pub(crate) fn any_rank(tensor: &DispatchTensor) -> Tensor<1> {
    Tensor::from_dispatch(tensor.clone())
}

pub(crate) fn from_data(data: TensorData, device: &Device) -> DispatchTensor {
    let dtype = data.dtype();
    with_rank!(data.rank(), D => Tensor::<D>::from_data(data, (device, dtype)).into_dispatch())
}

pub(crate) fn register(gradients: &mut GradientsParams, id: ParamId, gradient: DispatchTensor) {
    with_rank!(any_rank(&gradient).shape().num_dims(), D => {
        gradients.register(id, Tensor::<D>::from_dispatch(gradient));
    });
}

/// A number, which is read from its device when somebody asks for it, and once.
#[derive(Clone)]
pub(crate) struct Scalar(Arc<ScalarValue>);

struct ScalarValue {
    /// The one element; `None` if it was never on a device.
    tensor: Option<Tensor<1>>,
    read: OnceLock<f64>,
}

impl Scalar {
    pub(crate) fn on_device(tensor: Tensor<1>) -> Self {
        Self(Arc::new(ScalarValue {
            tensor: Some(tensor),
            read: OnceLock::new(),
        }))
    }

    pub(crate) fn tensor(&self) -> Option<&Tensor<1>> {
        self.0.tensor.as_ref()
    }

    /// Its value, for which this waits where it has not been read yet.
    pub(crate) fn read(&self) -> f64 {
        let ScalarValue { tensor, read } = &*self.0;
        *read.get_or_init(|| tensor.clone().map_or(f64::NAN, number))
    }

    pub(crate) fn is_read(&self) -> bool {
        self.0.read.get().is_some()
    }
}

impl From<f64> for Scalar {
    fn from(value: f64) -> Self {
        Self(Arc::new(ScalarValue {
            tensor: None,
            read: OnceLock::from(value),
        }))
    }
}

/// Shows the value without a wait.
impl fmt::Debug for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.read.get() {
            Some(value) => value.fmt(f),
            None => f.write_str("on the device"),
        }
    }
}

/// The number of a tensor of one element, in `f64`; NaN of none.
pub(crate) fn number(scalar: Tensor<1>) -> f64 {
    let data = scalar.into_data();
    // Losses are read in every step, and a conversion would take longer than this.
    match data.as_slice::<f32>() {
        Ok(values) => values.first().copied().map(f64::from),
        Err(_) => data.iter::<f64>().next(),
    }
    .unwrap_or(f64::NAN)
}
