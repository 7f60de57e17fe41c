//! Trains the network of the example `mnist` in steps of a given size: finds the largest batch that the
//! memory of every process holds, and accumulates as many of them as the step takes.
//!
//! ```text
//! cargo run --release --example big_batch -- --global-batch 512
//! cargo run --release -p accel-launch -- --num-processes 2 --example big_batch --holds 50
//! ```

use accelerator::prelude::*;
use accelerator_examples::{
    Cnn, CnnConfig, Course, DigitBatcher, MnistArgs, Report, cross_entropy, init_logging,
};
use burn::tensor::{Int, Tensor};
use clap::Parser;

/// Train on batches that are larger than memory, whatever it holds
#[derive(Debug, Parser)]
struct Args {
    /// `--batch-size` is where the search begins
    #[command(flatten)]
    mnist: MnistArgs,

    /// The samples of an optimizer step, over all processes
    #[arg(long, default_value = "256", value_name = "N")]
    global_batch: std::num::NonZeroUsize,

    /// Pretend that memory holds so many samples and no more
    #[arg(long, value_name = "N")]
    holds: Option<usize>,
}

fn main() -> Result<(), Report> {
    let args = Args::parse();
    init_logging();
    let mnist = &args.mnist;
    let lr = mnist.learning_rate();
    let digits = mnist.digits()?;

    let accelerator = Accelerator::builder()
        .device(mnist.device.map(Into::into))
        .seed(mnist.seed)
        .build()?;

    let model = CnnConfig::new()
        .with_dropout(mnist.dropout)
        .init(&accelerator.device());
    let (size, ()) = accelerator.find_executable_batch_size(mnist.batch_size.get(), |size| {
        step(&accelerator, &model, size, args.holds)
    })?;
    // No more than a step takes; micro-steps are of the same size but for the last.
    let each = args.global_batch.get().div_ceil(accelerator.world_size());
    let micro_steps = each.div_ceil(size) as u64;
    let batch_size = each.div_ceil(micro_steps as usize);
    accelerator.print(format_args!(
        "memory holds {size} samples: {micro_steps} × {batch_size} in a step of each process"
    ));

    let train = DataLoaderBuilder::new(DigitBatcher)
        .batch_size(batch_size)
        .shuffle(mnist.seed)
        .build(digits.train);
    let (mut model, mut optimizer, train) =
        accelerator.prepare((model, mnist.optimizer.init(), train))?;

    let mut course = Course::new();
    for epoch in 0..mnist.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
            // The window stays open until it holds a step, or the epoch ends.
            let is_full = (batch.step() + 1).is_multiple_of(micro_steps) || batch.is_last();
            let weight = match is_full {
                true => batch.weight(),
                false => batch.weight().no_sync(),
            };
            let gradients = accelerator.backward(loss, &model, weight)?;
            course.note(gradients.loss());
            model = optimizer.step(lr, model, gradients);
        }
    }
    // The same on each of them.
    println!("rank {}: loss {course}", accelerator.rank());
    Ok(accelerator.finish()?)
}

/// What a micro-step computes, by this process alone.
fn step(
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
