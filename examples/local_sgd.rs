//! Trains the network of the `mnist` example with little communication: each process steps by itself, and every few
//! steps the parameters are averaged or go through an outer optimizer (DiLoCo).
//!
//! ```text
//! cargo run --release --bin accel-launch -- --num-processes 2 --example local_sgd -- --period 8
//! cargo run --release --bin accel-launch -- --num-processes 2 --example local_sgd -- --period 8 --diloco
//! ```

use std::path::PathBuf;

use accelerator::metric::Mean;
use accelerator::optim::Manual;
use accelerator::prelude::*;
use accelerator_examples::{
    Cnn, CnnConfig, Course, DigitBatch, DigitBatcher, MnistArgs, Report, TrackArgs, cross_entropy,
    init_logging,
};
use clap::Parser;

/// Train with parameters that are averaged every few steps
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    mnist: MnistArgs,

    /// The number of steps between two averages
    #[arg(long, default_value_t = 8, value_name = "N")]
    period: u64,

    /// Apply the changes of all processes with an outer optimizer that has momentum
    #[arg(long)]
    diloco: bool,

    /// Write the trained model to this safetensors file
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,

    #[command(flatten)]
    tracking: TrackArgs,
}

fn main() -> Result<(), Report> {
    let args = Args::parse();
    init_logging();
    let mnist = &args.mnist;
    let digits = mnist.digits()?;

    let accelerator = mnist.accelerator(&args.tracking).build()?;
    let model = CnnConfig::new()
        .with_dropout(mnist.dropout)
        .init(&accelerator.device());
    let train = LoaderBuilder::new(DigitBatcher)
        .batch_size(mnist.batch_size.get())
        .shuffle(mnist.seed)
        .build(digits.train);
    let (model, optimizer, train) = accelerator.prepare((model, mnist.optimizer.init(), train))?;
    accelerator.print(accelerator.plan(&train, mnist.epochs));

    let course = if args.diloco {
        let local = DiLoCoConfig::new(args.period).init(&accelerator, &model)?;
        run(&accelerator, &args, local, (model, optimizer, train))?
    } else {
        let local = LocalSgdConfig::new(args.period).init(&accelerator, &model)?;
        run(&accelerator, &args, local, (model, optimizer, train))?
    };
    // Every rank prints the same loss.
    println!("rank {}: loss {course}", accelerator.rank());
    Ok(accelerator.finish()?)
}

type Parts = (Cnn, PreparedOptimizer<Manual>, PreparedLoader<DigitBatch>);

fn run(
    accelerator: &Accelerator,
    args: &Args,
    mut local: impl LocalTraining<Cnn>,
    (mut model, mut optimizer, train): Parts,
) -> Result<Course> {
    let mnist = &args.mnist;
    let given = mnist.hyperparameters();
    let mut course = args.tracking.course(accelerator, "train", &given)?;
    // The mean loss of this rank's samples since the last average.
    let mut round = Mean::new();
    for epoch in 0..mnist.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let logits = model.forward(batch.images.clone());
            let loss = cross_entropy(logits, batch.targets.clone());
            // Sends nothing: each process steps by itself.
            let gradients = local.backward(loss, &model, &batch)?.clip_norm(1.0);
            if let (Some(loss), Some(samples)) = (gradients.loss(), gradients.samples()) {
                round.update(loss, samples as usize);
            }
            model = optimizer.step(mnist.learning_rate(), model, gradients);
            if local.step(&mut model)? == LocalOutcome::Averaged {
                let mean = accelerator.reduce_metric(core::mem::take(&mut round))?;
                course.note(mean.value());
            }
        }
    }
    local.finish(&mut model)?;
    accelerator.check_replicas(&model)?;
    if let Some(path) = &args.save {
        accelerator.save_model(&model, path)?;
    }
    Ok(course)
}
