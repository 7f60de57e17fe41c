//! Measures training steps on the CPU with Burn's layers, and with those of `accelerator::ops`.
//!
//! ```text
//! cargo bench -p accelerator-benches --bench cpu_step
//! ```
//!
//! `benches/compare/cpu_step.py` trains the same models with PyTorch, in turns with this program.

mod models;

use std::error::Error;
use std::fmt;
use std::process::Command;
use std::time::Instant;

use accelerator::prelude::*;
use accelerator_benches::{Interval, Output};
use accelerator_host::allocator::ALLOCATOR_VARIABLES;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::{Parser, ValueEnum};
use serde::Serialize;

use crate::models::{of_burn, of_ops};

/// Measure training steps on the CPU
#[derive(Clone, Debug, Parser)]
struct Args {
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "cnn,transformer,mlp,resnet,wide-transformer,lstm,text"
    )]
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
    /// ResNet-18 for images of 32 by 32, batches of 16
    Resnet,
    /// 4 layers of width 256, batches of 16 sequences of 128
    WideTransformer,
    /// An LSTM of width 128, batches of 32 sequences of 28
    Lstm,
    /// Embeddings, a convolution over words and the largest value of each channel, batches of 32 texts of 64 words
    Text,
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
    args.output.header("milliseconds per step");
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
        .envs(ALLOCATOR_VARIABLES)
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
    let accelerator = Accelerator::builder()
        .device(BackendKind::Flex)
        .allow_same_batches()
        .build()?;
    let device = accelerator.device();
    let images = |size| numbers(size, &device);
    let words =
        |texts: usize, length| classes(texts * length, 1024, &device).reshape([texts, length]);
    macro_rules! run {
        ($layers:ident, $model:ident($($argument:expr),*), $input:expr) => {{
            let input = $input;
            let model = $layers::$model::new($($argument,)* args.dropout, &device);
            let batch = input.dims()[0];
            let loss = |model: &_, targets| {
                let logits = $layers::$model::forward(model, input.clone());
                $layers::loss(logits, targets)
            };
            steps(args, &accelerator, model, loss, batch)
        }};
        ($layers:ident) => {
            match model {
                Model::Cnn => run!($layers, Cnn(), images([64, 1, 28, 28])),
                Model::Transformer => run!($layers, Transformer(64, 2, 32), words(16, 32)),
                Model::Mlp => run!($layers, Mlp(), numbers([128, 784], &device)),
                Model::Resnet => run!($layers, Resnet(), images([16, 3, 32, 32])),
                Model::WideTransformer => run!($layers, Transformer(256, 4, 128), words(16, 128)),
                Model::Lstm => run!($layers, Recurrent(), numbers([32, 28, 28], &device)),
                Model::Text => run!($layers, Text(), words(32, 64)),
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
    loss: impl Fn(&M, Tensor<1, Int>) -> Tensor<1>,
    batch: usize,
) -> Result<f64, Box<dyn Error>> {
    let parts = (model, AdamWConfig::new().init_fused());
    let (mut model, mut optimizer) = accelerator.prepare(parts)?;
    let targets = classes(batch, 10, &accelerator.device());
    let mut durations = Vec::new();
    for _ in 0..args.steps + 5 {
        let start = Instant::now();
        let loss = loss(&model, targets.clone());
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
            "{:>16}  {:>5}  {:.2}",
            format!("{:?}", self.model),
            format!("{:?}", self.layers),
            self.step
        )
    }
}
