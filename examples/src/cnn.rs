use accelerator::ops::nn::{
    Conv2d, Conv2dConfig, Dropout, DropoutConfig, Linear, LinearConfig, MaxPool2d, MaxPool2dConfig,
};
use accelerator::ops::relu;
use burn::config::Config;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};

use crate::digits::CLASSES;

/// The settings of a [`Cnn`].
#[derive(Config, Debug)]
pub struct CnnConfig {
    /// The probability with which a value is dropped in training, in `[0, 1)`, before each of the two dense layers.
    /// Default: 0.25.
    #[config(default = 0.25)]
    pub dropout: f64,
}

/// The network of PyTorch's basic MNIST example: two convolutions of 3x3 without padding, with
/// 32 and 64 channels, pooling over 2x2, and two dense layers of 128 and 10 outputs.
#[derive(Module, Debug)]
pub struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool2d,
    dropout: Dropout,
    dense1: Linear,
    dense2: Linear,
}

impl CnnConfig {
    /// Creates a network with new weights on the device.
    ///
    /// # Panics
    ///
    /// If `dropout` is not in `[0, 1)`.
    pub fn init(&self, device: &Device) -> Cnn {
        let model = Cnn {
            conv1: Conv2dConfig::new([1, 32], [3, 3]).init(device),
            conv2: Conv2dConfig::new([32, 64], [3, 3]).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            dropout: DropoutConfig::new(self.dropout).init(),
            // 28 pixels, less 2 for each convolution, halved.
            dense1: LinearConfig::new(64 * 12 * 12, 128).init(device),
            dense2: LinearConfig::new(128, CLASSES).init(device),
        };
        model.visit(&mut DrawWeights);
        model
    }
}

impl Cnn {
    /// Returns the logits of the ten digits, `[batch, 10]`, for images `[batch, 1, 28, 28]`.
    ///
    /// ```
    /// use accelerator_examples::CnnConfig;
    /// use burn::tensor::{Device, Tensor};
    ///
    /// let device = Device::default();
    /// let model = CnnConfig::new().init(&device);
    /// let logits = model.forward(Tensor::zeros([2, 1, 28, 28], &device));
    /// assert_eq!(logits.dims(), [2, 10]);
    /// ```
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.conv1.forward_relu(images);
        let x = self.conv2.forward_relu(x);
        let x = self.dropout.forward(self.pool.forward(x)).flatten(1, 3);
        let x = self.dropout.forward(relu(self.dense1.forward(x)));
        self.dense2.forward(x)
    }
}

/// Draws the weights at once and in order. Burn draws each of them on first use, in between the numbers that dropout
/// draws, so the weights of a seed would depend on what comes first: saving the model, or training it.
struct DrawWeights;

impl ModuleVisitor for DrawWeights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_network_has_the_size_of_the_known_one() {
        // The count of PyTorch: 320 + 18,496 + 1,179,776 + 1,290.
        let model = CnnConfig::new().init(&Device::default());
        assert_eq!(model.num_params(), 1_199_882);
    }

    #[test]
    fn the_weights_are_drawn_at_once() {
        let model = CnnConfig::new().init(&Device::default());
        assert!(model.conv1.weight.is_initialized());
        assert!(model.dense2.bias.as_ref().unwrap().is_initialized());
    }
}
