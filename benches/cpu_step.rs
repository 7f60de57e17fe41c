//! Measures training steps on the CPU with Burn's layers, and with those of `accelerator::ops`.
//!
//! ```text
//! cargo bench -p accelerator-benches --bench cpu_step
//! ```
//!
//! `benches/compare/cpu_step.py` trains the same models with PyTorch, in turns with this program.

use std::error::Error;
use std::fmt;
use std::process::Command;
use std::time::Instant;

use accelerator::prelude::*;
use accelerator_benches::{ALLOCATOR, Interval, Output};
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::{Parser, ValueEnum};
use serde::Serialize;

/// Measure training steps on the CPU
#[derive(Clone, Debug, Parser)]
struct Args {
    #[arg(long, value_delimiter = ',', default_value = "cnn,transformer,mlp")]
    model: Vec<Model>,
    #[arg(long, value_delimiter = ',', default_value = "burn,ops")]
    layers: Vec<Layers>,
    /// The probability of dropout
    #[arg(long, default_value_t = 0.0)]
    dropout: f64,
    /// The number of threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
    #[arg(long, default_value_t = 30)]
    steps: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Train in this process, and print the milliseconds of a step
    #[arg(long, hide = true)]
    train: bool,
    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Model {
    /// The network of the `mnist` example, batches of 64
    Cnn,
    /// 2 layers of width 64, batches of 16 sequences of 32
    Transformer,
    /// Dense layers 784-1024-1024-10, batches of 128
    Mlp,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Layers {
    Burn,
    Ops,
}

/// The results of one side.
#[derive(Debug, Serialize)]
struct Line {
    model: Model,
    layers: Layers,
    /// Milliseconds.
    step: Interval,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    if args.train {
        println!("{}", train(&args)?);
        return Ok(());
    }
    args.output.header("milliseconds a step");
    for &model in &args.model {
        let mut results = vec![Vec::new(); args.layers.len()];
        for _ in 0..args.rounds {
            for (&layers, results) in args.layers.iter().zip(&mut results) {
                results.push(process(&args, model, layers)?);
            }
        }
        for (&layers, results) in args.layers.iter().zip(results) {
            args.output.print(&Line {
                model,
                layers,
                step: Interval::of(results),
            })?;
        }
    }
    Ok(())
}

/// Runs this program again as a new process, which trains.
fn process(args: &Args, model: Model, layers: Layers) -> Result<f64, Box<dyn Error>> {
    let name = |value: Option<clap::builder::PossibleValue>| {
        value
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default()
    };
    let output = Command::new(std::env::current_exe()?)
        .arg("--train")
        .args(["--model", &name(model.to_possible_value())])
        .args(["--layers", &name(layers.to_possible_value())])
        .args(["--dropout", &args.dropout.to_string()])
        .args(["--steps", &args.steps.to_string()])
        .env("RAYON_NUM_THREADS", args.threads.to_string())
        .envs(ALLOCATOR)
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

fn train(args: &Args) -> Result<f64, Box<dyn Error>> {
    let (Some(&model), Some(&layers)) = (args.model.first(), args.layers.first()) else {
        return Err("a model and layers are needed".into());
    };
    let accelerator = Accelerator::builder().device(BackendKind::Flex).build()?;
    let device = accelerator.device();
    macro_rules! run {
        ($layers:ident) => {
            match model {
                Model::Cnn => {
                    let model = $layers::Cnn::new(args.dropout, &device);
                    let images = numbers([64, 1, 28, 28], &device);
                    steps(
                        args,
                        &accelerator,
                        model,
                        |model| model.forward(images.clone()),
                        64,
                    )
                }
                Model::Transformer => {
                    let model = $layers::Transformer::new(args.dropout, &device);
                    let tokens = classes(16 * 32, 1024, &device).reshape([16, 32]);
                    steps(
                        args,
                        &accelerator,
                        model,
                        |model| model.forward(tokens.clone()),
                        16,
                    )
                }
                Model::Mlp => {
                    let model = $layers::Mlp::new(args.dropout, &device);
                    let values = numbers([128, 784], &device);
                    steps(
                        args,
                        &accelerator,
                        model,
                        |model| model.forward(values.clone()),
                        128,
                    )
                }
            }
        };
    }
    match layers {
        Layers::Burn => run!(of_burn),
        Layers::Ops => run!(of_ops),
    }
}

/// Trains, and returns the median of a step's milliseconds.
fn steps<M: Module + fmt::Display + 'static>(
    args: &Args,
    accelerator: &Accelerator,
    model: M,
    logits: impl Fn(&M) -> Tensor<2>,
    batch: usize,
) -> Result<f64, Box<dyn Error>> {
    let parts = (model, AdamWConfig::new().init_fused());
    let (mut model, mut optimizer) = accelerator.prepare(parts)?;
    let targets = classes(batch, 10, &accelerator.device());
    let mut durations = Vec::new();
    for _ in 0..args.steps + 5 {
        let start = Instant::now();
        let loss = accelerator_examples::cross_entropy(logits(&model), targets.clone());
        let gradients = accelerator.backward(loss, &model, batch as f64)?;
        model = optimizer.step(1e-3, model, gradients);
        durations.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(Interval::of(durations.split_off(5)).median)
}

fn numbers<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let count: usize = shape.iter().product();
    let values = (0..count).map(|at| (at as f32 * 0.37).sin());
    Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), shape), device)
}

fn classes(count: usize, classes: usize, device: &Device) -> Tensor<1, Int> {
    let values = (0..count).map(|at| (at * 7919 % 104_729 % classes) as i64);
    Tensor::from_data(TensorData::new(values.collect::<Vec<_>>(), [count]), device)
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>12}  {:>5}  {:.2}",
            format!("{:?}", self.model),
            format!("{:?}", self.layers),
            self.step
        )
    }
}

/// The models, of layers by these imports.
macro_rules! models {
    ($module:ident, [$($imports:tt)*], $rectified:item) => {
        mod $module {
            use burn::module::Module;
            use burn::nn::{Embedding, EmbeddingConfig};
            use burn::tensor::activation::relu;
            use burn::tensor::{Device, Int, Tensor};
            $($imports)*

            #[derive(Module, Debug)]
            pub(super) struct Cnn {
                conv1: Conv2d,
                conv2: Conv2d,
                pool: MaxPool2d,
                dropout: Dropout,
                dense1: Linear,
                dense2: Linear,
            }

            impl Cnn {
                pub(super) fn new(dropout: f64, device: &Device) -> Self {
                    Self {
                        conv1: Conv2dConfig::new([1, 32], [3, 3]).init(device),
                        conv2: Conv2dConfig::new([32, 64], [3, 3]).init(device),
                        pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
                        dropout: DropoutConfig::new(dropout).init(),
                        dense1: LinearConfig::new(64 * 12 * 12, 128).init(device),
                        dense2: LinearConfig::new(128, 10).init(device),
                    }
                }

                pub(super) fn forward(&self, images: Tensor<4>) -> Tensor<2> {
                    let x = rectified(&self.conv1, images);
                    let x = rectified(&self.conv2, x);
                    let x = self.dropout.forward(self.pool.forward(x)).flatten(1, 3);
                    let x = self.dropout.forward(relu(self.dense1.forward(x)));
                    self.dense2.forward(x)
                }
            }

            $rectified

            #[derive(Module, Debug)]
            pub(super) struct Transformer {
                tokens: Embedding,
                places: Embedding,
                encoder: TransformerEncoder,
                output: Linear,
            }

            impl Transformer {
                pub(super) fn new(dropout: f64, device: &Device) -> Self {
                    let encoder = TransformerEncoderConfig::new(64, 256, 4, 2);
                    Self {
                        tokens: EmbeddingConfig::new(1024, 64).init(device),
                        places: EmbeddingConfig::new(32, 64).init(device),
                        encoder: encoder.with_dropout(dropout).init(device),
                        output: LinearConfig::new(64, 10).init(device),
                    }
                }

                pub(super) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
                    let x = self.tokens.forward(tokens) + self.places.weight.val().unsqueeze();
                    let x = self.encoder.forward(TransformerEncoderInput::new(x));
                    self.output.forward(x.mean_dim(1).squeeze_dim(1))
                }
            }

            #[derive(Module, Debug)]
            pub(super) struct Mlp {
                first: Linear,
                second: Linear,
                third: Linear,
                dropout: Dropout,
            }

            impl Mlp {
                pub(super) fn new(dropout: f64, device: &Device) -> Self {
                    Self {
                        first: LinearConfig::new(784, 1024).init(device),
                        second: LinearConfig::new(1024, 1024).init(device),
                        third: LinearConfig::new(1024, 10).init(device),
                        dropout: DropoutConfig::new(dropout).init(),
                    }
                }

                pub(super) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
                    let x = self.dropout.forward(relu(self.first.forward(x)));
                    let x = self.dropout.forward(relu(self.second.forward(x)));
                    self.third.forward(x)
                }
            }
        }
    };
}

models! {
    of_burn,
    [
        use burn::nn::conv::{Conv2d, Conv2dConfig};
        use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
        use burn::nn::transformer::{
            TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
        };
        use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
    ],
    fn rectified(layer: &Conv2d, x: Tensor<4>) -> Tensor<4> {
        relu(layer.forward(x))
    }
}

models! {
    of_ops,
    [
        use accelerator::ops::nn::{
            Conv2d, Conv2dConfig, Dropout, DropoutConfig, Linear, LinearConfig, MaxPool2d,
            MaxPool2dConfig, TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
        };
    ],
    fn rectified(layer: &Conv2d, x: Tensor<4>) -> Tensor<4> {
        layer.forward_relu(x)
    }
}
