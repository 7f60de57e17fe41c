//! Trains the network of the `mnist` example with steps of a fixed size: finds the largest batch that fits in the
//! memory of every process, and accumulates as many batches as each step needs.
//!
//! ```text
//! cargo run --release --example big_batch -- --global-batch 512
//! cargo run --release --bin accel-launch -- --num-processes 2 --example big_batch --holds 50
//! ```

use accelerator::prelude::*;
use accelerator_examples::{
    Cnn, CnnConfig, DigitBatcher, MnistArgs, Report, TrackArgs, cross_entropy, init_logging,
};
use burn::tensor::{Int, Tensor};
use clap::Parser;

/// Train on batches that are larger than memory, whatever its size
#[derive(Debug, Parser)]
struct Args {
    /// The search begins at `--batch-size`
    #[command(flatten)]
    mnist: MnistArgs,

    /// The number of samples in an optimizer step, over all processes
    #[arg(long, default_value = "256", value_name = "N")]
    global_batch: std::num::NonZeroUsize,

    /// Pretend that memory holds this many samples at most
    #[arg(long, value_name = "N")]
    holds: Option<usize>,

    #[command(flatten)]
    tracking: TrackArgs,
}

fn main() -> Result<(), Report> {
    let args = Args::parse();
    init_logging();
    let mnist = &args.mnist;
    let lr = mnist.learning_rate();
    let digits = mnist.digits()?;

    let accelerator = mnist.accelerator(&args.tracking).build()?;

    let model = CnnConfig::new()
        .with_dropout(mnist.dropout)
        .init(&accelerator.device());
    let (mut model, mut optimizer) = accelerator.prepare((model, mnist.optimizer.init()))?;
    let start = mnist.batch_size.get();
    let (size, ()) = accelerator.find_executable_batch_size(start, &model, |size| {
        attempt(&accelerator, &model, size, args.holds)
    })?;
    let processes = accelerator.world_size();
    let (micro_steps, together) = divided(args.global_batch.get(), processes, size)?;
    accelerator.print(format_args!(
        "memory holds {size} samples: {micro_steps} × {together} in a step of all processes"
    ));

    let train = LoaderBuilder::new(DigitBatcher)
        .global_batch_size(together)
        .shuffle(mnist.seed)
        .build(digits.train);
    let train = accelerator.prepare(train)?;

    let given = mnist.hyperparameters();
    let mut course = args.tracking.course(&accelerator, "train", &given)?;
    let mut sizes = Vec::new();
    for epoch in 0..mnist.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
            // The window stays open until it holds a whole step, or the epoch ends.
            let is_full = (batch.step() + 1).is_multiple_of(micro_steps as u64) || batch.is_last();
            let weight = match is_full {
                true => batch.weight(),
                false => batch.weight().no_sync(),
            };
            let gradients = accelerator.backward(loss, &model, weight)?;
            course.note(gradients.loss());
            sizes.extend(gradients.samples().map(|samples| samples as usize));
            model = optimizer.step(lr, model, gradients);
        }
    }
    accelerator.print(format_args!(
        "{} steps of at most {} samples, {} in all",
        sizes.len(),
        sizes.iter().max().unwrap_or(&0),
        sizes.iter().sum::<usize>()
    ));
    accelerator.check_replicas(&model)?;
    // Every rank prints the same loss.
    println!("rank {}: loss {course}", accelerator.rank());
    Ok(accelerator.finish()?)
}

/// Divides a step of `step` samples into the fewest micro-steps of one size that fit: each process `holds` this many
/// samples at most. Returns the number of micro-steps, and the samples of each over all processes.
fn divided(step: usize, processes: usize, holds: usize) -> Result<(usize, usize), Report> {
    let divide = |step: usize| {
        // Each process gets at least one sample.
        let mut counts = (1..=step / processes).filter(|count| step.is_multiple_of(*count));
        let count = counts.find(|count| (step / count).div_ceil(processes) <= holds)?;
        Some((count, step / count))
    };
    divide(step).ok_or_else(|| {
        // The search ends: a multiple of `processes` can always be divided, down to one sample for each of them.
        let next = (step..).find(|&step| divide(step).is_some());
        let message = format!(
            "a step of {step} samples cannot be divided into micro-steps of the same size that hold 1 to {holds} \
             samples in each of {processes} processes; the next size that can is {}",
            next.unwrap_or(step)
        );
        std::io::Error::new(std::io::ErrorKind::InvalidInput, message).into()
    })
}

/// Computes a micro-step on this process alone.
fn attempt(
    accelerator: &Accelerator,
    model: &Cnn,
    size: usize,
    holds: Option<usize>,
) -> Result<(), Report> {
    if holds.is_some_and(|holds| size > holds) {
        return Err(std::io::Error::from(std::io::ErrorKind::OutOfMemory).into());
    }
    let device = accelerator.device().inner();
    let images = Tensor::zeros([size, 1, 28, 28], &device);
    let targets = Tensor::<1, Int>::zeros([size], &device);
    let loss = cross_entropy(model.forward(images), targets);
    drop(loss.backward());
    Ok(())
}
