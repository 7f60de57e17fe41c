//! Trains two models against each other: a generator learns to place points like a cloud that it never sees, from a
//! critic that tells its points from real ones. Each has its own optimizer and its own window.
//!
//! ```text
//! cargo run --release --example gan
//! cargo run --release --bin accel-launch -- --num-processes 2 --example gan
//! ```

use accelerator::prelude::*;
use accelerator_examples::Course;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::tensor::activation::{leaky_relu, softplus};
use burn::tensor::{Device, Distribution, Tensor, TensorData};

/// The centre of the cloud.
const CENTRE: [f32; 2] = [2.0, -1.0];
const WIDTH: f32 = 0.5;
const NOISE: usize = 4;

#[derive(Debug, Module)]
struct Net {
    hidden: Linear,
    output: Linear,
}

impl Net {
    fn new(inputs: usize, outputs: usize, device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(inputs, 32).init(device),
            output: LinearConfig::new(32, outputs).init(device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.output.forward(leaky_relu(self.hidden.forward(x), 0.2))
    }
}

struct PointBatcher;

impl Batcher<[f32; 2], Tensor<2>> for PointBatcher {
    fn batch(&self, items: Vec<[f32; 2]>, device: &Device) -> Tensor<2> {
        let shape = [items.len(), 2];
        Tensor::from_data(TensorData::new(items.concat(), shape), device)
    }
}

fn main() -> Result<()> {
    let accelerator = Accelerator::builder().accumulation_steps(2).build()?;
    let device = accelerator.device();

    let adam = || AdamConfig::new().with_beta_1(0.5).init();
    let train = LoaderBuilder::new(PointBatcher)
        .batch_size(32)
        .shuffle(42)
        .build(cloud(1024));
    let (mut generator, mut critic, mut making, mut judging, train) = accelerator.prepare((
        Net::new(NOISE, 2, &device),
        Net::new(2, 1, &device),
        adam(),
        adam(),
        train,
    ))?;
    accelerator.print(accelerator.plan(&train, 20));

    let mut course = Course::new();
    for epoch in 0..20 {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let noise =
                Tensor::random([batch.num_samples(), NOISE], Distribution::Default, &device) - 0.5;

            let made = generator.forward(noise.clone()).detach();
            let real = softplus(-critic.forward((*batch).clone()), 1.0).mean();
            let loss = real + softplus(critic.forward(made), 1.0).mean();
            let gradients = accelerator.backward(loss, &critic, &batch)?;
            critic = judging.step(2e-3, critic, gradients);

            let loss = softplus(-critic.forward(generator.forward(noise)), 1.0).mean();
            let gradients = accelerator.backward(loss, &generator, &batch)?;
            generator = making.step(2e-3, generator, gradients);
            if let StepOutcome::Stepped { .. } = making.outcome() {
                course.note(distance(&generator.valid()));
            }
        }
    }
    // Every rank prints the same distance.
    println!("rank {}: distance {course}", accelerator.rank());
    accelerator.finish()
}

/// Returns how far the mean and the width of generated points are from those of the cloud.
fn distance(generator: &Net) -> f64 {
    let device = generator.hidden.weight.val().device();
    let noise: Vec<f32> = (0..256 * NOISE as u32).map(uniform).collect();
    let noise = TensorData::new(noise, [256, NOISE]);
    let made = generator.forward(Tensor::from_data(noise, &device));
    let (variance, mean) = made.var_mean(0);
    let centre = Tensor::<2>::from_data([CENTRE], &device);
    let distance = (mean - centre).abs().sum() + (variance.sqrt() - WIDTH).abs().sum();
    distance.into_scalar::<f64>()
}

/// Draws points around the centre, the same on every rank.
fn cloud(count: u32) -> InMemDataset<[f32; 2]> {
    // The sum of twelve numbers of variance 1/12 is nearly normal.
    let normal = |seed: u32| (0..12).map(|at| uniform(seed * 12 + at)).sum::<f32>();
    let point = |at: u32| [0, 1].map(|axis| CENTRE[axis] + WIDTH * normal(2 * at + axis as u32));
    InMemDataset::new((0..count).map(point).collect())
}

/// Maps a number to a pseudorandom one from -0.5 to 0.5.
fn uniform(number: u32) -> f32 {
    let mixed = accelerator::plan::mix(&[u64::from(number)]);
    (mixed >> 40) as f32 / (1_u64 << 24) as f32 - 0.5
}
