//! The program of the README: fits a line to points, on any number of processes.
//!
//! ```text
//! cargo run --release --example quickstart
//! cargo run --release --bin accel-launch -- --num-processes 2 --example quickstart
//! ```

use accelerator::metric::Mean;
use accelerator::prelude::*;
use burn::data::dataset::InMemDataset;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Tensor, TensorData};

fn main() -> Result<()> {
    let accelerator = Accelerator::new()?; // the rank and device of this process
    let model = LinearConfig::new(1, 1).init(&accelerator.device());
    let loader = || LoaderBuilder::from_fn(points_and_targets);
    let train = loader().batch_size(32).shuffle(42).build(points(4000)); // 32 samples per rank
    let valid = loader().batch_size(100).build(points(1001));
    let parts = (model, AdamConfig::new().init(), train, valid);
    let (mut model, mut optimizer, train, valid) = accelerator.prepare(parts)?;
    for epoch in 0..3 {
        for batch in train.epoch(epoch) {
            let batch = batch?; // this rank's share of a global batch
            let gradients = accelerator.backward(loss(&model, &batch), &model, &batch)?;
            model = optimizer.step(0.1, model, gradients);
        }
        let trained = accelerator.valid(&model)?;
        let mut mean = Mean::new();
        for batch in valid.eval() {
            let batch = batch?;
            mean.update_with(loss(&trained, &batch), batch.real()); // samples, not padding
        }
        let mean = accelerator.reduce_metric(mean)?; // over all ranks
        print_main!(accelerator, "epoch {epoch}: validation loss {mean:.6}");
    }
    accelerator.save_model(&model, "model.safetensors")?;
    accelerator.finish()
}

fn points(count: u32) -> InMemDataset<f32> {
    InMemDataset::new((0..count).map(|i| i as f32 / count as f32).collect())
}

fn points_and_targets(points: Vec<f32>, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let shape = [points.len(), 1];
    let x = Tensor::<2>::from_data(TensorData::new(points, shape), device);
    (x.clone(), x * 2.0 + 3.0)
}

fn loss(model: &Linear, (x, targets): &(Tensor<2>, Tensor<2>)) -> Tensor<1> {
    MseLoss::new().forward(model.forward(x.clone()), targets.clone(), Reduction::Mean)
}
