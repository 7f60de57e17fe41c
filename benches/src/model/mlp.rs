use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

/// Three dense layers.
#[derive(Debug, Module)]
pub(super) struct Mlp {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Mlp {
    pub(super) fn new(inputs: usize, width: usize, outputs: usize, device: &Device) -> Self {
        Self {
            first: LinearConfig::new(inputs, width).init(device),
            second: LinearConfig::new(width, width).init(device),
            third: LinearConfig::new(width, outputs).init(device),
        }
    }

    pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.first.forward(x));
        self.third.forward(relu(self.second.forward(x)))
    }
}
