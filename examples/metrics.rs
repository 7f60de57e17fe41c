//! Trains the network of the `mnist` example and reports more than a loss: accuracy, top-3 accuracy, and which digits
//! are mistaken for which, over all samples and processes. When the first process's time is up, all processes stop.
//!
//! ```text
//! cargo run --release --example metrics
//! cargo run --release --bin accel-launch -- --num-processes 2 --example metrics --time-limit 60
//! ```

use std::time::{Duration, Instant};

use accelerator::metric::{Accuracy, Confusion, Mean, TopK};
use accelerator::prelude::*;
use accelerator_examples::{
    Cnn, CnnConfig, DigitBatch, DigitBatcher, MnistArgs, Report, TrackArgs, cross_entropy,
    init_logging,
};
use clap::Parser;

/// Train, and measure the result
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    mnist: MnistArgs,

    /// Stop training after this many seconds on the first process's clock
    #[arg(long, value_name = "SECONDS")]
    time_limit: Option<u64>,

    #[command(flatten)]
    tracking: TrackArgs,
}

fn main() -> Result<(), Report> {
    let Args {
        mnist,
        time_limit,
        tracking,
    } = Args::parse();
    init_logging();
    let lr = mnist.learning_rate();
    let digits = mnist.digits()?;

    let accelerator = mnist.accelerator(&tracking).build()?;

    let model = CnnConfig::new()
        .with_dropout(mnist.dropout)
        .init(&accelerator.device());
    let optimizer = mnist.optimizer.init();
    let train = LoaderBuilder::new(DigitBatcher)
        .batch_size(mnist.batch_size.get())
        .shuffle(mnist.seed)
        .build(digits.train);
    let valid = LoaderBuilder::new(DigitBatcher)
        .batch_size(64)
        .build(digits.validation);
    let (mut model, mut optimizer, train, valid) =
        accelerator.prepare((model, optimizer, train, valid))?;

    let limit = time_limit.map(Duration::from_secs);
    let start = Instant::now();
    let mut course = tracking.course(&accelerator, "train", &mnist.hyperparameters())?;
    'training: for epoch in 0..mnist.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
            let gradients = accelerator.backward(loss, &model, &batch)?;
            course.note(gradients.loss());
            model = optimizer.step(lr, model, gradients);
            // Clocks differ, so one process decides, and the gradients of the next step carry its decision to the
            // others.
            if accelerator.is_main_process() && limit.is_some_and(|limit| start.elapsed() > limit) {
                accelerator.set_trigger();
            }
            if accelerator.check_trigger()? {
                accelerator.print("time is up");
                break 'training;
            }
        }
        let (loss, accuracy, top, confusion) =
            accelerator.reduce_metric(evaluate(&accelerator.valid(&model)?, &valid)?)?;
        accelerator.print(format_args!(
            "epoch {epoch}: loss {loss} accuracy {accuracy} best three {top}\n{confusion}"
        ));
    }
    // Every rank prints the same loss.
    println!("rank {}: loss {course}", accelerator.rank());
    Ok(accelerator.finish()?)
}

type Figures = (Mean, Accuracy, TopK, Confusion);

fn evaluate(model: &Cnn, loader: &PreparedLoader<DigitBatch>) -> Result<Figures, Report> {
    let (mut loss, mut accuracy) = (Mean::new(), Accuracy::new());
    let (mut top, mut confusion) = (TopK::new(3), Confusion::new(10));
    for batch in loader.eval() {
        let batch = batch?;
        let (targets, real) = (batch.targets.clone(), batch.real());
        let logits = model.forward(batch.images.clone());
        if real > 0 {
            let rows = logits.clone().narrow(0, 0, real);
            loss.update_with(
                cross_entropy(rows, targets.clone().narrow(0, 0, real)),
                real,
            );
        }
        accuracy.update(logits.clone(), targets.clone(), real);
        top.update(logits.clone(), targets.clone(), real);
        confusion.update(logits, targets, real)?;
    }
    Ok((loss, accuracy, top, confusion))
}
