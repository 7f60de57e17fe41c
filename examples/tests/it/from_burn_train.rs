//! The two programs of `docs/from-burn-train.md`, compiled: a loop of plain Burn, and the same here.

#![allow(
    clippy::print_stdout,
    clippy::single_range_in_vec_init,
    dead_code,
    unused_imports,
    reason = "the programs are blocks of a document, and only compiled"
)]

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};

#[derive(Debug, Module)]
struct Net {
    hidden: Linear,
    norm: BatchNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(2, 16).init(device),
            norm: BatchNormConfig::new(16).init(device),
            head: LinearConfig::new(16, 2).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.norm.forward(self.hidden.forward(x)))
    }
}

#[derive(Clone, Debug)]
struct Points {
    x: Tensor<2>,
    targets: Tensor<1, Int>,
}

#[derive(Clone)]
struct PointBatcher;

impl Batcher<([f32; 2], i64), Points> for PointBatcher {
    fn batch(&self, items: Vec<([f32; 2], i64)>, device: &Device) -> Points {
        let count = items.len();
        let x: Vec<f32> = items.iter().flat_map(|(x, _)| *x).collect();
        let targets: Vec<i64> = items.iter().map(|(_, target)| *target).collect();
        Points {
            x: Tensor::from_data(TensorData::new(x, [count, 2]), device),
            targets: Tensor::from_data(TensorData::new(targets, [count]), device),
        }
    }
}

fn points(count: i64) -> InMemDataset<([f32; 2], i64)> {
    let point = |i: i64| ([(i % 7) as f32 - 3.0, (i % 5) as f32], i64::from(i % 7 > 3));
    InMemDataset::new((0..count).map(point).collect())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::default().autodiff();
    device.seed(7);
    let epochs = 3;
    let steps = epochs * 1000_usize.div_ceil(32);

    let mut model = Net::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let mut schedule = CosineAnnealingLrSchedulerConfig::new(1e-2, steps).init()?;
    let train = DataLoaderBuilder::new(PointBatcher)
        .batch_size(32)
        .shuffle(42)
        .set_device(device.clone())
        .build(points(1000));
    let valid = DataLoaderBuilder::new(PointBatcher)
        .batch_size(256)
        .set_device(device.clone().inner())
        .build(points(300));

    for epoch in 0..epochs {
        for batch in train.iter() {
            let batch = batch?;
            let logits = model.forward(batch.x.clone());
            let loss = CrossEntropyLossConfig::new()
                .init(&logits.device())
                .forward(logits, batch.targets.clone());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(schedule.step(), model, gradients);
        }
        let evaluated = model.valid();
        let (mut right, mut seen) = (0, 0);
        for batch in valid.iter() {
            let batch = batch?;
            let guesses = evaluated.forward(batch.x.clone()).argmax(1).reshape([-1]);
            right += guesses
                .equal(batch.targets.clone())
                .int()
                .sum()
                .into_scalar::<i64>();
            seen += batch.targets.dims()[0];
        }
        println!("epoch {epoch}: {right} of {seen} are right");
    }
    model.valid().into_record().save("model.bpk")?;
    Ok(())
}

mod here {
    use accelerator::metric::Mean;
    use accelerator::prelude::*;
    use burn::data::dataloader::batcher::Batcher;
    use burn::data::dataset::InMemDataset;
    use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
    use burn::module::Module;
    use burn::nn::loss::CrossEntropyLossConfig;
    use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
    use burn::optim::AdamWConfig;
    use burn::tensor::{Device, Int, Tensor, TensorData};

    use super::{Net, PointBatcher, points};

    fn main() -> Result<(), Box<dyn std::error::Error>> {
        let accelerator = Accelerator::builder().seed(7).build()?;
        let device = accelerator.device();
        let epochs = 3;

        let train = LoaderBuilder::new(PointBatcher)
            .batch_size(32)
            .shuffle(42)
            .build(points(1000));
        let valid = LoaderBuilder::new(PointBatcher)
            .batch_size(256)
            .build(points(300));
        let (mut model, train, valid) = accelerator.prepare((Net::new(&device), train, valid))?;

        let steps = accelerator.plan(&train, epochs).steps.unwrap_or(1) as usize;
        let schedule = CosineAnnealingLrSchedulerConfig::new(1e-2, steps).init()?;
        let mut optimizer = accelerator.prepare((AdamWConfig::new().init(), schedule))?;

        for epoch in 0..epochs {
            for batch in train.epoch(epoch) {
                let batch = batch?;
                let logits = model.forward(batch.x.clone());
                let loss = CrossEntropyLossConfig::new()
                    .init(&logits.device())
                    .forward(logits, batch.targets.clone());
                let gradients = accelerator.backward(loss, &model, &batch)?;
                model = optimizer.step(model, gradients);
            }
            let evaluated = accelerator.valid(&model)?;
            let mut accuracy = Mean::new();
            for batch in valid.eval() {
                let batch = batch?;
                let real = batch.real();
                if real == 0 {
                    continue; // an idle batch
                }
                let guesses = evaluated.forward(batch.x.clone()).argmax(1).reshape([-1]);
                let right = guesses.equal(batch.targets.clone()).int().slice([0..real]);
                accuracy.update(right.float().mean().into_scalar::<f64>(), real);
            }
            let accuracy = accelerator.reduce_metric(accuracy)?;
            accelerator.print(format_args!("epoch {epoch}: accuracy {accuracy}"));
        }
        accelerator.save_model(&model, "model.safetensors")?;
        accelerator.finish()?;
        Ok(())
    }
}
