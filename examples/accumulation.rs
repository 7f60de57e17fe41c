//! Trains the network of the `mnist` example with steps of a fixed size on any number of processes: accumulates as many
//! micro-steps as each step needs.
//!
//! ```text
//! cargo run --release --example accumulation -- --global-batch 256 --batch-size 32
//! cargo run --release --bin accel-launch -- --num-processes 2 --example accumulation
//! ```
//!
//! With `--checkpoints`, a training resumes from its last checkpoint, with its schedule, on any number of processes.

use std::path::PathBuf;

use accelerator::prelude::*;
use accelerator_examples::{
    CnnConfig, DigitBatcher, MnistArgs, Report, TrackArgs, cross_entropy, init_logging,
};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use clap::Parser;

/// Train on batches that are larger than the memory of a device
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    mnist: MnistArgs,

    /// The number of samples in an optimizer step, over all processes
    #[arg(long, default_value_t = 256, value_name = "N")]
    global_batch: usize,

    /// Save into this folder after each epoch, and resume from the checkpoint in it
    #[arg(long, value_name = "DIR")]
    checkpoints: Option<PathBuf>,

    /// The precision to compute in: no, f16 or bf16 [default: ACCEL_PRECISION, else no]
    #[arg(long)]
    precision: Option<Precision>,

    #[command(flatten)]
    tracking: TrackArgs,
}

fn main() -> Result<(), Report> {
    let args = Args::parse();
    init_logging();
    let (mnist, epochs) = (&args.mnist, args.mnist.epochs);
    let digits = mnist.digits()?;
    let batch_size = mnist.batch_size.get();

    let mut builder = mnist
        .accelerator(&args.tracking)
        .global_batch(args.global_batch, batch_size);
    if let Some(precision) = args.precision {
        builder = builder.precision(precision);
    }
    let accelerator = builder.build()?;
    let device = accelerator.device();

    let model = CnnConfig::new().with_dropout(mnist.dropout).init(&device);
    let train = LoaderBuilder::new(DigitBatcher)
        .batch_size(batch_size)
        .shuffle(mnist.seed)
        .build(digits.train);
    let (mut model, mut train) = accelerator.prepare((model, train))?;
    if let Some(folder) = &args.checkpoints {
        // The plan uses the batch size that the checkpoint resumes with.
        train = accelerator.resume_loader(folder, train)?;
    }
    let plan = accelerator.plan(&train, epochs);
    let steps = plan.steps.unwrap_or(1).max(1) as usize;
    let schedule = CosineAnnealingLrSchedulerConfig::new(mnist.learning_rate(), steps);
    let schedule = schedule.init().map_err(std::io::Error::other)?;
    let mut optimizer = accelerator.prepare((mnist.optimizer.init(), schedule))?;
    accelerator.print(plan.with_schedule(&optimizer));
    let precision = match accelerator.precision() {
        Precision::No => "full precision".to_owned(),
        half => half.to_string(),
    };
    accelerator.print(format_args!("forward and backward in {precision}"));

    let mut start = 0;
    if let Some(folder) = &args.checkpoints {
        let (parts, position) = accelerator.resume(folder, (model, optimizer, train))?;
        (model, optimizer, train) = parts;
        start = position.epoch();
        accelerator.print(format_args!("training begins at {position}"));
    }

    let given = mnist.hyperparameters();
    let mut course = args.tracking.course(&accelerator, "train", &given)?;
    for epoch in start..epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let images = accelerator.to_working(batch.images.clone());
            let loss = accelerator.forward(&model, |model| {
                let logits = accelerator.to_full(model.forward(images));
                cross_entropy(logits, batch.targets.clone())
            });
            // Sends nothing and changes no parameter until the window is full.
            let gradients = accelerator.backward(loss, &model, &batch)?.clip_norm(1.0);
            course.note(gradients.loss());
            model = optimizer.step(model, gradients);
            if let StepOutcome::Skipped { scale } = optimizer.outcome() {
                accelerator.print(format_args!(
                    "step skipped: the loss scale {scale} is too large"
                ));
            }
        }
        if let Some(folder) = &args.checkpoints {
            accelerator.save_state(folder, (&model, &optimizer, &train))?;
        }
    }
    accelerator.check_replicas(&model)?;
    // Every rank prints the same loss.
    println!("rank {}: loss {course}", accelerator.rank());
    Ok(accelerator.finish()?)
}
