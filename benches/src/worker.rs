//! A process that trains when it is told to.
//!
//! The side that measures starts workers with [`Crew::start`](crate::Crew::start), keeps them, and
//! gives them rounds of steps over their standard input. So what is compared runs in turns, within
//! seconds of each other, and never starts up within what is timed.

use std::io::{BufRead, Write};
use std::time::Instant;

use accelerator::prelude::*;
use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
use burn::optim::{AdamWConfig, GradientsParams};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::model::{Model, Net, Samples};
use crate::usage::Usage;

/// Samples of a data set: enough that a round rarely meets its end.
const SAMPLES: usize = 1 << 16;
const RATE: f64 = 1e-5;

/// How a worker trains.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Loop {
    /// Burn's loader, `backward` and optimizer
    Plain,
    /// The same, prepared by an `Accelerator`
    Prepared,
}

/// What a worker is told on its command line.
#[derive(Clone, Debug, Parser)]
pub struct WorkerArgs {
    /// The network
    #[arg(long)]
    pub model: Model,
    /// The loop
    #[arg(long = "loop")]
    pub kind: Loop,
    /// Samples in a batch of this process
    #[arg(long)]
    pub batch_size: usize,
}

/// A worker's report of a round.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Round {
    /// Steps that were done.
    pub steps: usize,
    /// How long each of them took, in seconds.
    pub each: Vec<f64>,
    /// How long they took, in seconds.
    pub seconds: f64,
    /// What they took of the processor and of memory.
    pub usage: Usage,
}

/// Runs a worker: `steps N` on standard input is answered by a [`Round`] as a line of JSON on
/// standard output. It ends with its input.
///
/// # Errors
///
/// When training fails, or a command cannot be read.
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
    let mut optimizer = AdamWConfig::new().init();
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
    let parts = (model, AdamWConfig::new().init(), loader);
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

/// Answers commands; `step` tells whether it did a step, or only found the end of an epoch.
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
