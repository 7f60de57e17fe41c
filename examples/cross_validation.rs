//! Trains the network of the `mnist` example once per fold, without the samples of that fold, and validates it on them:
//! in the end, every sample has been validated once.
//!
//! ```text
//! cargo run --release --example cross_validation -- --folds 5
//! cargo run --release --bin accel-launch -- --num-processes 2 --example cross_validation
//! ```

use accelerator::metric::Confusion;
use accelerator::prelude::*;
use accelerator_examples::{
    CnnConfig, Course, Digit, DigitBatcher, Digits, MnistArgs, Report, TrackArgs, cross_entropy,
    init_logging,
};
use burn::data::dataset::Dataset;
use burn::data::dataset::transform::SelectionDataset;
use burn::tensor::{Int, Tensor};
use clap::Parser;

/// Train once per fold on the samples of all other folds, and validate on the fold
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    mnist: MnistArgs,

    /// The number of folds
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    folds: u64,

    #[command(flatten)]
    tracking: TrackArgs,
}

fn main() -> Result<(), Report> {
    let Args {
        mnist,
        folds,
        tracking,
    } = Args::parse();
    init_logging();
    let lr = mnist.learning_rate();
    let digits = mnist.digits()?.train;

    let accelerator = mnist.accelerator(&tracking).build()?;

    let mut confusion = Confusion::new(10);
    let mut course = Course::new();
    for fold in 0..folds {
        let model = CnnConfig::new()
            .with_dropout(mnist.dropout)
            .init(&accelerator.device());
        let train = LoaderBuilder::new(DigitBatcher)
            .batch_size(mnist.batch_size.get())
            .shuffle(mnist.seed + fold)
            .build(select(&digits, |index| index % folds != fold));
        let valid = LoaderBuilder::new(DigitBatcher)
            .batch_size(64)
            .build(select(&digits, |index| index % folds == fold));
        let (mut model, mut optimizer, train, valid) =
            accelerator.prepare((model, mnist.optimizer.init(), train, valid))?;

        let given = mnist.hyperparameters();
        course = tracking.course(&accelerator, &format!("fold-{fold}"), &given)?;
        for epoch in 0..mnist.epochs {
            for batch in train.epoch(epoch) {
                let batch = batch?;
                let loss =
                    cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
                let gradients = accelerator.backward(loss, &model, &batch)?;
                course.note(gradients.loss());
                model = optimizer.step(lr, model, gradients);
            }
        }

        let model = accelerator.valid(&model)?;
        let mut part = Confusion::new(10);
        for batch in valid.eval() {
            let batch = batch?;
            let answers = model.forward(batch.images.clone()).argmax(1).flatten(0, 1);
            // Gathers from all processes, and drops the padding of the last batch.
            let answers = numbers(accelerator.gather_for_metrics(answers, &batch)?);
            let targets = accelerator.gather_for_metrics(batch.targets.clone(), &batch)?;
            let targets = numbers(targets);
            part.count(&targets, &answers)?;
            confusion.count(&targets, &answers)?;
        }
        accelerator.print(format_args!(
            "fold {fold}: {} samples, accuracy {:.1} %",
            part.samples(),
            100.0 * part.accuracy()
        ));
    }
    accelerator.print(format_args!(
        "all {} of {} samples, accuracy {:.1} %, macro F1 {:.3}",
        confusion.samples(),
        digits.len(),
        100.0 * confusion.accuracy(),
        confusion.macro_f1()
    ));
    // The loss of the last fold: every rank prints the same.
    println!("rank {}: loss {course}", accelerator.rank());
    Ok(accelerator.finish()?)
}

fn select(digits: &Digits, is_in: impl Fn(u64) -> bool) -> SelectionDataset<Digits, Digit> {
    let indices = (0..digits.len()).filter(|&index| is_in(index as u64));
    SelectionDataset::from_indices_unchecked(digits.clone(), indices.collect())
}

fn numbers(tensor: Tensor<1, Int>) -> Vec<i64> {
    tensor.into_data().iter::<i64>().collect()
}
