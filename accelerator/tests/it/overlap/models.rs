use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Tensor};

use super::harness::Place;

#[derive(Debug, Module)]
pub(crate) struct Mlp {
    pub(crate) layers: Vec<Linear>,
}

impl Mlp {
    pub(crate) const WIDTH: usize = 16;

    pub(crate) fn new(depth: usize, device: &Device) -> Self {
        let layer = |_| LinearConfig::new(Self::WIDTH, Self::WIDTH).init(device);
        Self {
            layers: (0..depth).map(layer).collect(),
        }
    }

    pub(crate) fn four(device: &Device) -> Self {
        Self::new(4, device)
    }

    pub(crate) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.layers
            .iter()
            .fold(input, |x, layer| relu(layer.forward(x)) + 0.1)
    }

    pub(crate) fn loss(&self, place: &Place) -> Tensor<1> {
        let output = self.forward(place.input([place.rows(), Self::WIDTH]));
        (output.clone() * output).mean()
    }
}

#[derive(Debug, Module)]
pub(crate) struct Cnn {
    pub(crate) first: Conv2d,
    pub(crate) norm: BatchNorm,
    pub(crate) second: Conv2d,
    pub(crate) last: Linear,
}

impl Cnn {
    pub(crate) fn new(device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([1, 8], [3, 3]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            second: Conv2dConfig::new([8, 8], [3, 3]).init(device),
            last: LinearConfig::new(8 * 4 * 4, 3).init(device),
        }
    }

    pub(crate) fn loss(&self, place: &Place) -> Tensor<1> {
        let x = place.input([place.rows(), 1, 8, 8]);
        let x = relu(self.norm.forward(self.first.forward(x)));
        let x = relu(self.second.forward(x));
        let x = self.last.forward(x.flatten::<2>(1, 3));
        (x.clone() * x).mean()
    }
}

/// Uses a weight at the top of the graph, and from the fourth step on at the bottom too.
pub(crate) fn top_and_later_bottom(model: &Mlp, place: &Place) -> Tensor<1> {
    let mut x = place.input([place.rows(), Mlp::WIDTH]);
    if place.step >= 3 {
        x = relu(model.layers[3].forward(x)) + 0.1;
    }
    let output = model.forward(x);
    (output.clone() * output).mean()
}

/// Parameters of several types.
#[derive(Debug, Module)]
pub(crate) struct Mixed {
    pub(crate) layers: Mlp,
    pub(crate) half: Param<Tensor<2>>,
    pub(crate) brain: Param<Tensor<2>>,
    pub(crate) double: Param<Tensor<2>>,
}

impl Mixed {
    pub(crate) fn new(device: &Device) -> Self {
        let weight = |dtype: DType| {
            Param::from_tensor(Tensor::<2>::zeros(
                [Mlp::WIDTH, Mlp::WIDTH],
                (device, dtype),
            ))
        };
        Self {
            layers: Mlp::four(device),
            half: weight(DType::F16),
            brain: weight(DType::BF16),
            double: weight(DType::F64),
        }
    }

    pub(crate) fn loss(&self, place: &Place) -> Tensor<1> {
        let mut x = self.layers.forward(place.input([place.rows(), Mlp::WIDTH]));
        for weight in [&self.half, &self.brain, &self.double] {
            let weight = weight.val();
            let dtype = weight.dtype();
            x = relu(x.cast(dtype).matmul(weight)).cast(DType::F32) + 0.1;
        }
        (x.clone() * x).mean()
    }
}
