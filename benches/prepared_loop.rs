//! A prepared loop on one process beside the same loop in plain Burn, epoch by epoch in turn.
//!
//! `cargo bench -p accelerator-benches --bench prepared_loop`

#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

use std::time::Instant;

use accelerator::prelude::*;
use accelerator_benches::middle;
use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};

const BATCH: usize = 64;
const EPOCHS: u64 = 15;
const SAMPLES: usize = 64 * 40;

#[derive(Debug, Module)]
struct Mlp {
    first: Linear,
    second: Linear,
    third: Linear,
}

#[derive(Clone, Debug)]
struct Samples {
    x: Tensor<2>,
    y: Tensor<1, Int>,
}

struct SampleBatcher;

fn main() -> Result<()> {
    let accelerator = Accelerator::new()?;
    let device = accelerator.device();
    let dataset = || InMemDataset::new((0..SAMPLES).collect::<Vec<_>>());

    let train = DataLoaderBuilder::new(SampleBatcher)
        .batch_size(BATCH)
        .num_workers(0)
        .build(dataset());
    let parts = (Mlp::new(&device), AdamWConfig::new().init(), train);
    let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;

    let mut plain = Mlp::new(&device);
    let mut plain_optimizer = AdamWConfig::new().init();
    let plain_train = PlainBuilder::new(SampleBatcher)
        .batch_size(BATCH)
        .set_device(device.clone().inner())
        .build(dataset());

    let mut ratios = Vec::new();
    for epoch in 0..EPOCHS {
        let start = Instant::now();
        for batch in plain_train.iter() {
            let batch = batch.unwrap_or_else(|error| panic!("{error}"));
            let gradients = GradientsParams::from_grads(loss(&plain, &batch).backward(), &plain);
            plain = plain_optimizer.step(1e-3, plain, gradients);
        }
        let plain_time = start.elapsed();

        let start = Instant::now();
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let gradients = accelerator.backward(loss(&model, &batch), &model, &batch)?;
            model = optimizer.step(1e-3, model, gradients);
        }
        ratios.push(start.elapsed().as_secs_f64() / plain_time.as_secs_f64());
    }
    println!("prepared loop / plain loop, MLP 784-512-512-10, batches of {BATCH}, one process");
    println!("median of {EPOCHS} epochs in turn: {:.4}", middle(ratios));
    accelerator.finish()
}

fn loss(model: &Mlp, batch: &Samples) -> Tensor<1> {
    let logits = model.forward(batch.x.clone());
    CrossEntropyLossConfig::new()
        .init(&logits.device())
        .forward(logits, batch.y.clone())
}

impl Mlp {
    fn new(device: &Device) -> Self {
        Self {
            first: LinearConfig::new(784, 512).init(device),
            second: LinearConfig::new(512, 512).init(device),
            third: LinearConfig::new(512, 10).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = relu(self.first.forward(x));
        self.third.forward(relu(self.second.forward(x)))
    }
}

impl Batcher<usize, Samples> for SampleBatcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Samples {
        let count = items.len();
        let x: Vec<f32> = items
            .iter()
            .flat_map(|&item| (0..784).map(move |at| ((item * 7 + at * 13) % 255) as f32 / 255.0))
            .collect();
        let y: Vec<i64> = items.iter().map(|item| (item % 10) as i64).collect();
        Samples {
            x: Tensor::from_data(TensorData::new(x, [count, 784]), device),
            y: Tensor::from_data(TensorData::new(y, [count]), device),
        }
    }
}
