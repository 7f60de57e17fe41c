//! Learns to read handwritten digits with arguments instead of a loop, as with Hugging Face's Trainer: the banner, a
//! table with a row per evaluation, and checkpoints to resume from.
//!
//! ```text
//! cargo run --release --bin accel-launch -- --num-processes 2 --example trainer_mnist \
//!     --data-dir mnist --num-train-epochs 1 --per-device-train-batch-size 64 --eval-strategy epoch
//! ```
//!
//! Each argument is a flag; `cargo run --release --example trainer_mnist -- --help` lists them. With `--arguments-file
//! mnist.toml`, they come from a file.

use std::path::PathBuf;
use std::process::ExitCode;

use accelerator::train::{Inputs, Trainer, TrainingArguments};
use accelerator_examples::{
    Cnn, CnnConfig, DigitBatch, DigitBatcher, Report, Split, cross_entropy, init_logging,
};
use burn::tensor::{Int, Tensor};
use clap::Parser;

/// Train on handwritten digits with arguments instead of a loop
#[derive(Debug, Parser)]
struct Args {
    /// The folder with MNIST's files, or others in that format; without it, digits are drawn
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    #[command(flatten)]
    training: TrainingArguments,
}

/// Logits and labels.
type Outputs = (Tensor<2>, Tensor<1, Int>);

fn main() -> Result<ExitCode, Report> {
    let args = Args::parse();
    init_logging();
    let digits = Split::open(args.data_dir.as_deref(), None)?;
    let mut trainer = Trainer::builder(
        args.training,
        |device| CnnConfig::new().init(device),
        DigitBatcher,
        compute_loss,
    )
    .train_dataset(digits.train)
    .eval_dataset(digits.test)
    .compute_metrics(compute_metrics)
    .build()?;
    trainer.train()?;
    Ok(trainer.finish()?)
}

fn compute_loss(model: &Cnn, inputs: &Inputs<'_, DigitBatch>) -> (Tensor<1>, Outputs) {
    let images = inputs.to_working(inputs.images.clone());
    let logits = inputs.to_full(model.forward(images));
    let loss = cross_entropy(logits.clone(), inputs.targets.clone());
    (loss, (logits, inputs.targets.clone()))
}

fn compute_metrics((logits, labels): Outputs) -> [(&'static str, f64); 1] {
    let answers = logits.argmax(1).flatten::<1>(0, 1);
    let right = answers.equal(labels).float().mean();
    [("accuracy", right.into_scalar())]
}
