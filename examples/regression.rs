//! The smallest complete program: fits a line to noisy points, on any number of processes.
//!
//! ```text
//! cargo run --release --example regression
//! cargo run --release --bin accel-launch -- --num-processes 2 --example regression
//! ```

use accelerator::metric::Mean;
use accelerator::prelude::*;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::LinearConfig;
use burn::nn::loss::{MseLoss, Reduction};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};

#[derive(Clone, Copy, Debug)]
struct Point {
    x: f32,
    y: f32,
}

#[derive(Clone, Debug)]
struct Points {
    x: Tensor<2>,
    y: Tensor<2>,
}

struct PointBatcher;

impl Batcher<Point, Points> for PointBatcher {
    fn batch(&self, items: Vec<Point>, device: &Device) -> Points {
        let column = |values: Vec<f32>| {
            let shape = [values.len(), 1];
            Tensor::from_data(TensorData::new(values, shape), device)
        };
        Points {
            x: column(items.iter().map(|point| point.x).collect()),
            y: column(items.iter().map(|point| point.y).collect()),
        }
    }
}

fn main() -> Result<()> {
    let accelerator = Accelerator::new()?;
    let device = accelerator.device();

    let model = LinearConfig::new(1, 1).init(&device);
    let optimizer = SgdConfig::new().init();
    let train = LoaderBuilder::new(PointBatcher)
        .batch_size(16)
        .shuffle(42)
        .build(points(256));
    let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;

    let ranks = accelerator.reduce_metric(Mean::of(1.0, 1))?.samples();
    accelerator.print(format_args!(
        "ready: {ranks} ranks, {}",
        accelerator.backend_kind()
    ));

    accelerator.print(accelerator.plan(&train, 10));

    for epoch in 0..10 {
        let mut loss = None;
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let predicted = model.forward(batch.x.clone());
            let error = MseLoss::new().forward(predicted, batch.y.clone(), Reduction::Mean);
            let gradients = accelerator.backward(error, &model, &batch)?;
            loss = gradients.loss();
            model = optimizer.step(0.1, model, gradients);
        }
        if let Some(loss) = loss {
            accelerator.print(format_args!("epoch {epoch}: loss {loss:.4}"));
        }
    }
    let slope = model.weight.val().into_scalar::<f32>();
    accelerator.print(format_args!("slope {slope:.3}, expected about 2"));
    accelerator.finish()
}

/// Samples `y = 2 x + 3` with a little noise, the same on every rank.
fn points(count: u32) -> InMemDataset<Point> {
    let noise =
        |i: u32| (f64::from(i.wrapping_mul(2_654_435_761)) / f64::from(u32::MAX) - 0.5) as f32;
    let point = |i| {
        let x = i as f32 / count as f32 * 2.0 - 1.0;
        Point {
            x,
            y: 2.0 * x + 3.0 + 0.1 * noise(i),
        }
    };
    InMemDataset::new((0..count).map(point).collect())
}
