//! Measures how long a save of about 400 MB blocks training: synchronous and in the background.
//!
//! `cargo bench -p accelerator-benches --bench save_state`

use std::time::{Duration, Instant};

use accelerator::optim::Manual;
use accelerator::prelude::*;
use accelerator_benches::middle;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Distribution, Tensor};

/// The layers: 33 of 4 MiB, and twice that in AdamW's moments, are 396 MiB.
const LAYERS: usize = 33;
const WIDTH: usize = 1024;
const RUNS: usize = 7;

#[derive(Debug, Module)]
struct Tower {
    layers: Vec<Linear>,
}

fn main() -> Result<()> {
    let accelerator = Accelerator::new()?;
    let device = accelerator.device();
    let model = Tower::new(&device);
    let (mut model, mut optimizer) = accelerator.prepare((model, AdamWConfig::new().init()))?;
    let folder = std::env::temp_dir().join(format!("save-state-{}", std::process::id()));
    let checkpoints = Checkpoints::new(&folder).with_total_limit(1);

    let (mut ratios, mut blocked, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    let (mut calm, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..=RUNS {
        // A step creates new tensors of the state, as training does between two saves.
        let step_alone;
        (model, step_alone) = step(&accelerator, model, &mut optimizer, &device)?;

        let start = Instant::now();
        accelerator.save_state(&checkpoints, (&model, &optimizer))?;
        let at_once = start.elapsed();

        let start = Instant::now();
        let saving = accelerator.save_state_async(&checkpoints, (&model, &optimizer))?;
        let copied = start.elapsed();
        let step_beside;
        (model, step_beside) = step(&accelerator, model, &mut optimizer, &device)?;
        saving.wait()?;

        ratios.push(copied.as_secs_f64() / at_once.as_secs_f64());
        blocked.push(copied.as_secs_f64());
        whole.push(at_once.as_secs_f64());
        calm.push(step_alone.as_secs_f64());
        beside.push(step_beside.as_secs_f64());
    }
    // The first run is cold: the pages of the files are not cached.
    for figures in [
        &mut ratios,
        &mut blocked,
        &mut whole,
        &mut calm,
        &mut beside,
    ] {
        figures.remove(0);
    }
    println!("saving {} MiB, medians of {RUNS} in turn", 3 * 4 * LAYERS);
    println!("at once:           {:.3} s", middle(whole));
    println!("in the background: {:.4} s blocked", middle(blocked));
    println!("blocked / at once: {:.4}", middle(ratios));
    println!(
        "a step: {:.3} s, beside a save {:.3} s",
        middle(calm),
        middle(beside)
    );
    if let Err(error) = std::fs::remove_dir_all(&folder) {
        println!("{} stays: {error}", folder.display());
    }
    accelerator.finish()
}

fn step(
    accelerator: &Accelerator,
    model: Tower,
    optimizer: &mut PreparedOptimizer<Manual>,
    device: &Device,
) -> Result<(Tower, Duration)> {
    let start = Instant::now();
    let x = Tensor::random([1, WIDTH], Distribution::Default, device);
    let loss = model.forward(x).powi_scalar(2).mean();
    let gradients = accelerator.backward(loss, &model, 1)?;
    let model = optimizer.step(1e-4, model, gradients);
    Ok((model, start.elapsed()))
}

impl Tower {
    fn new(device: &Device) -> Self {
        let layer = |_| {
            LinearConfig::new(WIDTH, WIDTH)
                .with_bias(false)
                .init(device)
        };
        Self {
            layers: (0..LAYERS).map(layer).collect(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x))
    }
}
