//! The measured models, built once with Burn's layers and once with those of `accelerator::ops`.

/// Defines the models with the layers that the imports bring into scope.
macro_rules! models {
    ($module:ident, [$($imports:tt)*], $rectified:item, $loss:item) => {
        pub(super) mod $module {
            use burn::module::Module;
            use burn::nn::PaddingConfig2d;
            use burn::tensor::{Device, Int, Tensor};
            $($imports)*

            #[derive(Module, Debug)]
            pub(crate) struct Cnn {
                conv1: Conv2d,
                conv2: Conv2d,
                pool: MaxPool2d,
                dropout: Dropout,
                dense1: Linear,
                dense2: Linear,
            }

            impl Cnn {
                pub(crate) fn new(dropout: f64, device: &Device) -> Self {
                    Self {
                        conv1: Conv2dConfig::new([1, 32], [3, 3]).init(device),
                        conv2: Conv2dConfig::new([32, 64], [3, 3]).init(device),
                        pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
                        dropout: DropoutConfig::new(dropout).init(),
                        dense1: LinearConfig::new(64 * 12 * 12, 128).init(device),
                        dense2: LinearConfig::new(128, 10).init(device),
                    }
                }

                pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
                    let x = rectified(&self.conv1, images);
                    let x = rectified(&self.conv2, x);
                    let x = self.dropout.forward(self.pool.forward(x)).flatten(1, 3);
                    let x = self.dropout.forward(relu(self.dense1.forward(x)));
                    self.dense2.forward(x)
                }
            }

            $rectified

            $loss

            #[derive(Module, Debug)]
            pub(crate) struct Transformer {
                tokens: Embedding,
                places: Embedding,
                encoder: TransformerEncoder,
                output: Linear,
            }

            impl Transformer {
                pub(crate) fn new(
                    width: usize,
                    layers: usize,
                    length: usize,
                    dropout: f64,
                    device: &Device,
                ) -> Self {
                    let encoder = TransformerEncoderConfig::new(width, 4 * width, 4, layers);
                    Self {
                        tokens: EmbeddingConfig::new(1024, width).init(device),
                        places: EmbeddingConfig::new(length, width).init(device),
                        encoder: encoder.with_dropout(dropout).init(device),
                        output: LinearConfig::new(width, 10).init(device),
                    }
                }

                pub(crate) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
                    let x = self.tokens.forward(tokens) + self.places.weight.val().unsqueeze();
                    let x = self.encoder.forward(TransformerEncoderInput::new(x));
                    self.output.forward(x.mean_dim(1).squeeze_dim(1))
                }
            }

            #[derive(Module, Debug)]
            pub(crate) struct Mlp {
                first: Linear,
                second: Linear,
                third: Linear,
                dropout: Dropout,
            }

            impl Mlp {
                pub(crate) fn new(dropout: f64, device: &Device) -> Self {
                    Self {
                        first: LinearConfig::new(784, 1024).init(device),
                        second: LinearConfig::new(1024, 1024).init(device),
                        third: LinearConfig::new(1024, 10).init(device),
                        dropout: DropoutConfig::new(dropout).init(),
                    }
                }

                pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
                    let x = self.dropout.forward(relu(self.first.forward(x)));
                    let x = self.dropout.forward(relu(self.second.forward(x)));
                    self.third.forward(x)
                }
            }

            #[derive(Module, Debug)]
            pub(crate) struct Resnet {
                first: Convolution,
                blocks: Vec<Block>,
                output: Linear,
            }

            /// Two convolutions, whose output is added to the input.
            #[derive(Module, Debug)]
            struct Block {
                first: Convolution,
                second: Convolution,
                shortcut: Option<Convolution>,
            }

            /// A convolution without a bias, and a normalization of its output.
            #[derive(Module, Debug)]
            struct Convolution {
                convolution: Conv2d,
                norm: BatchNorm,
            }

            impl Resnet {
                pub(crate) fn new(_dropout: f64, device: &Device) -> Self {
                    let block = |from, to, stride| Block {
                        first: Convolution::new(from, to, 3, stride, device),
                        second: Convolution::new(to, to, 3, 1, device),
                        shortcut: (stride > 1).then(|| Convolution::new(from, to, 1, stride, device)),
                    };
                    let stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)];
                    let blocks = stages.map(|(from, to, stride)| [block(from, to, stride), block(to, to, 1)]);
                    Self {
                        first: Convolution::new(3, 64, 3, 1, device),
                        blocks: blocks.into_iter().flatten().collect(),
                        output: LinearConfig::new(512, 10).init(device),
                    }
                }

                pub(crate) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
                    let mut x = relu(self.first.forward(images));
                    for block in &self.blocks {
                        let y = block.second.forward(relu(block.first.forward(x.clone())));
                        x = relu(y + block.shortcut.as_ref().map_or(x.clone(), |layer| layer.forward(x)));
                    }
                    self.output.forward(x.mean_dims(&[2, 3]).flatten(1, 3))
                }
            }

            impl Convolution {
                fn new(from: usize, to: usize, size: usize, stride: usize, device: &Device) -> Self {
                    let border = size / 2;
                    Self {
                        convolution: Conv2dConfig::new([from, to], [size, size])
                            .with_stride([stride, stride])
                            .with_padding(PaddingConfig2d::Explicit(border, border, border, border))
                            .with_bias(false)
                            .init(device),
                        norm: BatchNormConfig::new(to).init(device),
                    }
                }

                fn forward(&self, x: Tensor<4>) -> Tensor<4> {
                    self.norm.forward(self.convolution.forward(x))
                }
            }

            #[derive(Module, Debug)]
            pub(crate) struct Recurrent {
                lstm: Lstm,
                dropout: Dropout,
                output: Linear,
            }

            impl Recurrent {
                pub(crate) fn new(dropout: f64, device: &Device) -> Self {
                    Self {
                        lstm: LstmConfig::new(28, 128, true).init(device),
                        dropout: DropoutConfig::new(dropout).init(),
                        output: LinearConfig::new(128, 10).init(device),
                    }
                }

                pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<2> {
                    let (_, state) = self.lstm.forward(x, None);
                    self.output.forward(self.dropout.forward(state.hidden))
                }
            }

            #[derive(Module, Debug)]
            pub(crate) struct Text {
                words: Embedding,
                convolution: Conv1d,
                dropout: Dropout,
                output: Linear,
            }

            impl Text {
                pub(crate) fn new(dropout: f64, device: &Device) -> Self {
                    Self {
                        words: EmbeddingConfig::new(10_000, 128).init(device),
                        convolution: Conv1dConfig::new(128, 128, 3).init(device),
                        dropout: DropoutConfig::new(dropout).init(),
                        output: LinearConfig::new(128, 10).init(device),
                    }
                }

                pub(crate) fn forward(&self, words: Tensor<2, Int>) -> Tensor<2> {
                    let x = self.words.forward(words).swap_dims(1, 2);
                    let x = relu(self.convolution.forward(x)).max_dim(2).squeeze_dim(2);
                    self.output.forward(self.dropout.forward(x))
                }
            }
        }
    };
}

models! {
    of_burn,
    [
        use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig};
        use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
        use burn::nn::transformer::{
            TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
        };
        use burn::nn::{
            BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear,
            LinearConfig, Lstm, LstmConfig,
        };
        use burn::tensor::activation::relu;
    ],
    fn rectified(layer: &Conv2d, x: Tensor<4>) -> Tensor<4> {
        relu(layer.forward(x))
    },
    pub(crate) fn loss(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        let loss = burn::nn::loss::CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits, targets)
    }
}

models! {
    of_ops,
    [
        use accelerator::ops::relu;
        use accelerator::ops::nn::{
            BatchNorm, BatchNormConfig, Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Dropout,
            DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig,
            MaxPool2d, MaxPool2dConfig,
            TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
        };
    ],
    fn rectified(layer: &Conv2d, x: Tensor<4>) -> Tensor<4> {
        layer.forward_relu(x)
    },
    pub(crate) fn loss(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        accelerator::ops::cross_entropy(logits, targets)
    }
}
