//! A process that trains on command.
//!
//! The measuring side starts workers with [`Crew::start`](crate::Crew::start), keeps them running, and gives them
//! rounds of steps through their standard input. The sides of a comparison thus take turns within seconds of each
//! other, and no start-up falls into the timed part.

use std::io::{BufRead, Write};
use std::time::Instant;

use accelerator::prelude::*;
use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
use burn::optim::{AdamWConfig, GradientsParams};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::model::{Model, Net, Samples};
use crate::usage::Usage;

/// The samples of the data set: so many that a round rarely meets its end.
const SAMPLES: usize = 1 << 16;
const RATE: f64 = 1e-5;

/// The training loop of a worker.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Loop {
    /// The parts without an `Accelerator`: Burn's loader and `backward`, and the fused optimizer
    Plain,
    /// The same parts, prepared by an `Accelerator`
    Prepared,
}

/// The command line of a worker.
#[derive(Clone, Debug, Parser)]
pub struct WorkerArgs {
    /// The network
    #[arg(long)]
    pub model: Model,
    /// The training loop
    #[arg(long = "loop")]
    pub kind: Loop,
    /// The samples in a batch of this process
    #[arg(long)]
    pub batch_size: usize,
}

/// A worker's report of a round.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Round {
    /// The number of steps done.
    pub steps: usize,
    /// The seconds that each step took.
    pub each: Vec<f64>,
    /// The seconds that all steps took.
    pub seconds: f64,
    /// The processor time and memory that the steps took.
    pub usage: Usage,
}

/// Runs a worker: answers `steps N` on standard input with a [`Round`] as a line of JSON on standard output, until its
/// input ends.
///
/// # Errors
///
/// If training fails, or a command cannot be parsed.
pub fn work(args: &WorkerArgs) -> Result<(), Box<dyn std::error::Error>> {
    match args.kind {
        Loop::Plain => plain(args),
        Loop::Prepared => prepared(args),
    }
}

fn plain(args: &WorkerArgs) -> Result<(), Box<dyn std::error::Error>> {
    let device = burn::tensor::Device::flex().autodiff();
    device.seed(0);
    let mut model = Some(args.model.init(&device));
    let mut optimizer = AdamWConfig::new().init_fused();
    let loader = PlainBuilder::new(args.model.samples().batcher())
        .batch_size(args.batch_size)
        .set_device(device.clone().inner())
        .build(Samples::dataset(SAMPLES));
    let mut batches = loader.iter();
    serve(|| {
        let batch = match batches.next() {
            Some(batch) => batch?,
            None => {
                batches = loader.iter();
                return Ok(false);
            }
        };
        if let Some(before) = model.take() {
            let loss = before.loss(&batch);
            let gradients = GradientsParams::from_grads(loss.backward(), &before);
            model = Some(optimizer.step(RATE, before, gradients));
        }
        Ok(true)
    })
}

fn prepared(args: &WorkerArgs) -> Result<(), Box<dyn std::error::Error>> {
    let accelerator = Accelerator::builder().device(BackendKind::Flex).build()?;
    let model = args.model.init(&accelerator.device());
    let loader = LoaderBuilder::new(args.model.samples().batcher())
        .batch_size(args.batch_size)
        .num_workers(0)
        .build(Samples::dataset(SAMPLES));
    let parts = (model, AdamWConfig::new().init_fused(), loader);
    let (model, mut optimizer, loader): (Net, _, _) = accelerator.prepare(parts)?;
    let mut model = Some(model);
    let mut epoch = 0;
    let mut batches = loader.epoch(epoch);
    serve(|| {
        let batch = match batches.next() {
            Some(batch) => batch?,
            None => {
                epoch += 1;
                batches = loader.epoch(epoch);
                return Ok(false);
            }
        };
        if let Some(before) = model.take() {
            let gradients = accelerator.backward(before.loss(&batch), &before, &batch)?;
            model = Some(optimizer.step(RATE, before, gradients));
        }
        Ok(true)
    })?;
    drop(batches);
    Ok(accelerator.finish()?)
}

/// Answers commands; `step` returns false if it took no step, since the epoch has ended.
fn serve(
    mut step: impl FnMut() -> Result<bool, Box<dyn std::error::Error>>,
) -> Result<(), Box<dyn std::error::Error>> {
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let steps: usize = line
            .strip_prefix("steps ")
            .and_then(|number| number.parse().ok())
            .ok_or_else(|| format!("expected `steps N` on the standard input, found {line:?}"))?;
        let (start, before) = (Instant::now(), Usage::of_this_process());
        let (mut each, mut last) = (Vec::with_capacity(steps), start);
        while each.len() < steps {
            if step()? {
                let end = Instant::now();
                each.push((end - last).as_secs_f64());
                last = end;
            }
        }
        let round = Round {
            steps,
            each,
            seconds: start.elapsed().as_secs_f64(),
            usage: Usage::of_this_process() - before,
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&round)?)?;
        out.flush()?;
    }
    Ok(())
}
