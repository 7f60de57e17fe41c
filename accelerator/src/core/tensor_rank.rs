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

/// A tensor of these floats, in their type.
pub(crate) fn from_data(data: TensorData, device: &Device) -> DispatchTensor {
    let dtype = data.dtype();
    with_rank!(data.rank(), D => Tensor::<D>::from_data(data, (device, dtype)).into_dispatch())
}

/// Registers the gradient of a parameter.
pub(crate) fn register(gradients: &mut GradientsParams, id: ParamId, gradient: DispatchTensor) {
    with_rank!(any_rank(&gradient).shape().num_dims(), D => {
        gradients.register(id, Tensor::<D>::from_dispatch(gradient));
    });
}
