//! Compares a plain Burn loop with the prepared one.
//!
//! Both train the same network from the same weights on the same batches, which they make themselves. Neither reads
//! anything from the device in the timed part: a round ends when the device has finished all its work.

mod plain;
mod prepared;

use std::error::Error;
use std::time::Instant;

use accelerator::prelude::*;
use accelerator_benches::Samples;
use accelerator_examples::DeviceName;
use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
use burn::tensor::Device;
use serde::Serialize;

use self::plain::Plain;
use self::prepared::Prepared;
use crate::memory::{self, Memory};
use crate::model::{Kind, Model};
use crate::outcome::{Outcome, skip_unsupported};
use crate::setting::{self, Computing, Size};
use crate::spread::Spread;

/// The steps of either loop before anything is timed, twice: kernels are compiled and chosen.
const WARM_UP: usize = 8;

/// The steps to start one after the other, to see how far the program runs ahead of the device.
const BURST: usize = 3;
const BURSTS: usize = 10;

/// The fewest pairs of rounds to measure.
const FEWEST: usize = 3;

/// The learning rate: so low that both sides keep computing with numbers of the same magnitude.
pub(super) const RATE: f64 = 1e-5;
const SEED: u64 = 42;

/// The batches of an epoch, more than are ever reached.
const ENDLESS: usize = 1_000_000;

/// The settings of `plain-and-prepared`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The kind of device
    #[arg(long, value_enum)]
    device: DeviceName,
    /// The network
    #[arg(long, value_enum)]
    model: Kind,
    /// The precision to compute in
    #[arg(long, value_enum, default_value = "f32")]
    precision: Computing,
    /// The size of network and batch
    #[arg(long, value_enum, default_value = "full")]
    size: Size,
    /// The samples in a batch [default: what suits network and size]
    #[arg(long)]
    batch_size: Option<usize>,
    /// The number of pairs of rounds
    #[arg(long, default_value_t = 20)]
    pairs: usize,
    /// The approximate duration of a round, in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Stop after this many seconds of the program, even with fewer pairs, but not with fewer than three
    #[arg(long, default_value_t = f64::INFINITY)]
    limit: f64,
    /// The threads of each loader that make batches; with 0, the loop makes them
    #[arg(long, default_value_t = 0)]
    workers: usize,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Comparison {
    measure: &'static str,
    device: String,
    model: Kind,
    precision: Computing,
    size: Size,
    batch_size: usize,
    workers: usize,
    #[serde(flatten)]
    outcome: Outcome<Figures>,
}

#[derive(Clone, Debug, Serialize)]
struct Figures {
    parameters: usize,
    pairs: usize,
    steps_a_round: usize,
    /// The seconds of the very first steps, in which kernels are compiled and chosen.
    first_steps_seconds: f64,
    /// The time of a prepared step over that of a plain one, pair by pair.
    ratio: Spread,
    plain: SideFigures,
    prepared: SideFigures,
}

#[derive(Clone, Debug, Serialize)]
struct SideFigures {
    step_ms: Spread,
    samples_per_second: Spread,
    /// The loss at the end: the same on both sides if the device is deterministic.
    loss: f64,
    memory: Memory,
    ahead: Ahead,
}

/// The lead of the program over a device that is idle at first.
#[derive(Clone, Debug, Serialize)]
struct Ahead {
    /// The number of steps started one after the other.
    steps: usize,
    /// The time until the program had started them.
    started_ms: Spread,
    /// The time until the device had finished them.
    done_ms: Spread,
    /// The difference. If it is more than a step, nothing in the last step waited for the device.
    ahead_ms: Spread,
}

/// One of the two loops.
pub(super) trait Side {
    /// Trains for `steps` steps, and reads nothing from the device.
    fn train(&mut self, steps: usize) -> Result<(), Box<dyn Error>>;

    /// Takes one more step, and returns its loss.
    fn loss(&mut self) -> Result<f64, Box<dyn Error>>;
}

/// Compares the two loops.
pub(crate) fn run(args: &Args) -> Result<Comparison, Box<dyn Error>> {
    let model = Model::new(args.model, args.size);
    let batch_size = args.batch_size.unwrap_or(model.batch_size());
    Ok(Comparison {
        measure: "plain_and_prepared",
        device: args.device.to_string(),
        model: args.model,
        precision: args.precision,
        size: args.size,
        batch_size,
        workers: args.workers,
        outcome: skip_unsupported(measure(args, model, batch_size))?,
    })
}

fn measure(args: &Args, model: Model, batch_size: usize) -> Result<Figures, Box<dyn Error>> {
    let begun = Instant::now();
    let accelerator = setting::open(args.device, args.precision, SEED)?;
    let device = accelerator.device();
    let batcher = model.samples().batcher();
    let plain_loader = PlainBuilder::new(batcher.clone())
        .batch_size(batch_size)
        .num_workers(args.workers)
        .set_device(device.clone().inner())
        .build(Samples::dataset(batch_size * ENDLESS));
    let plain = || {
        device.seed(SEED);
        Plain::new(
            model.init(&device),
            args.precision.dtype(),
            plain_loader.iter(),
        )
    };
    let prepared = || {
        device.seed(SEED);
        let loader = LoaderBuilder::new(batcher.clone())
            .batch_size(batch_size)
            .num_workers(args.workers)
            .build(Samples::dataset(batch_size * ENDLESS));
        Prepared::new(&accelerator, model.init(&device), loader)
    };

    let kind = accelerator.backend_kind();
    let (first_steps_seconds, plain_memory) = alone(kind, &device, plain())?;
    let (_, prepared_memory) = alone(kind, &device, prepared()?)?;

    let (mut plain, mut prepared) = (plain(), prepared()?);
    for side in [&mut plain as &mut dyn Side, &mut prepared] {
        round(&device, side, WARM_UP)?;
    }
    let step = round(&device, &mut plain, WARM_UP)? / WARM_UP as f64;
    round(&device, &mut prepared, WARM_UP)?;
    let steps = (args.seconds / step).ceil().clamp(1.0, 1e6) as usize;
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..args.pairs {
        if turn >= FEWEST && begun.elapsed().as_secs_f64() > args.limit {
            break;
        }
        let sides = [&mut plain as &mut dyn Side, &mut prepared];
        for index in [turn % 2, 1 - turn % 2] {
            times[index].push(round(&device, sides[index], steps)? / steps as f64);
        }
    }
    let ratios = times[1].iter().zip(&times[0]).map(|(new, old)| new / old);
    let ratio = Spread::of(ratios.collect::<Vec<_>>());
    let parameters = plain.parameters();
    let figures = |side: &mut dyn Side, times: &[f64], memory| {
        Ok::<_, Box<dyn Error>>(SideFigures {
            step_ms: Spread::of(times.iter().map(|time| time * 1e3)),
            samples_per_second: Spread::of(times.iter().map(|time| batch_size as f64 / time)),
            ahead: ahead(&device, side)?,
            loss: side.loss()?,
            memory,
        })
    };
    let figures = Figures {
        parameters,
        pairs: times[0].len(),
        steps_a_round: steps,
        first_steps_seconds,
        ratio,
        plain: figures(&mut plain, &times[0], plain_memory)?,
        prepared: figures(&mut prepared, &times[1], prepared_memory)?,
    };
    drop(prepared);
    accelerator.finish()?;
    Ok(figures)
}

/// Returns the seconds of a loop's first steps, and the memory that it needs, while nothing else runs.
fn alone(
    kind: BackendKind,
    device: &Device,
    mut side: impl Side,
) -> Result<(f64, Memory), Box<dyn Error>> {
    let seconds = round(device, &mut side, WARM_UP)?;
    let memory = Memory::of(kind, device, || side.train(WARM_UP))?;
    drop(side);
    memory::release(device);
    Ok((seconds, memory))
}

/// Returns the seconds of a round, until the device is idle again.
fn round(device: &Device, side: &mut dyn Side, steps: usize) -> Result<f64, Box<dyn Error>> {
    wait(device)?;
    let start = Instant::now();
    side.train(steps)?;
    wait(device)?;
    Ok(start.elapsed().as_secs_f64())
}

fn ahead(device: &Device, side: &mut dyn Side) -> Result<Ahead, Box<dyn Error>> {
    let (mut started, mut done) = (Vec::new(), Vec::new());
    for _ in 0..BURSTS {
        wait(device)?;
        let start = Instant::now();
        side.train(BURST)?;
        started.push(start.elapsed().as_secs_f64() * 1e3);
        wait(device)?;
        done.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(Ahead {
        steps: BURST,
        ahead_ms: Spread::of(
            done.iter()
                .zip(&started)
                .map(|(done, started)| done - started),
        ),
        started_ms: Spread::of(started),
        done_ms: Spread::of(done),
    })
}

fn wait(device: &Device) -> Result<(), Box<dyn Error>> {
    device
        .sync()
        .map_err(|error| format!("the device {device:?} does not answer: {error:?}").into())
}
