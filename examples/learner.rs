//! The training of Burn's guide on several processes: a `Learner` of burn-train learns to read handwritten digits.
//!
//! `cargo run --release --example learner -- --help` lists the flags.

use std::path::PathBuf;

use accelerator::learner::into_result;
use accelerator::prelude::*;
use accelerator_examples::{
    Cnn, CnnConfig, DigitBatch, DigitBatcher, Report, Split, cross_entropy,
};
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::optim::AdamConfig;
use burn_train::metric::{AccuracyMetric, LossMetric};
use burn_train::{ClassificationOutput, InferenceStep, Learner, TrainOutput, TrainStep};
use clap::Parser;

/// Train a small convolutional network to read handwritten digits, with burn-train
#[derive(Parser)]
struct Args {
    /// The folder with MNIST's files; without it, digits are drawn
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Train on at most this many samples
    #[arg(long, default_value_t = 3200, value_name = "N")]
    limit: usize,
    #[arg(long, default_value_t = 3, value_name = "N")]
    epochs: usize,
    /// The number of samples in a batch of each process
    #[arg(long, default_value_t = 64, value_name = "N")]
    batch_size: usize,
    /// The folder that burn-train writes metrics and checkpoints to
    #[arg(long, default_value = "artifacts", value_name = "DIR")]
    artifacts: PathBuf,
    /// Resume after this epoch, from its checkpoint
    #[arg(long, value_name = "EPOCH")]
    checkpoint: Option<usize>,
}

fn main() -> Result<(), Report> {
    let args = Args::parse();
    let digits = Split::open(args.data_dir.as_deref(), Some(args.limit))?;

    let accelerator = Accelerator::builder().seed(42).build()?;
    let device = accelerator.device();

    let train = LoaderBuilder::new(DigitBatcher)
        .batch_size(args.batch_size)
        .shuffle(42)
        .num_workers(1)
        .build(digits.train);
    let valid = LoaderBuilder::new(DigitBatcher)
        .batch_size(args.batch_size)
        .num_workers(1)
        .build(digits.validation);
    let (train, valid) = accelerator.prepare((train, valid))?;

    let training = accelerator
        .supervised_training(&args.artifacts, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_default_checkpointers()
        .num_epochs(args.epochs)
        .summary();
    let training = match args.checkpoint {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    };

    let model = Model {
        cnn: CnnConfig::new().init(&device),
    };
    let learner = Learner::new(model, AdamConfig::new().init(), ConstantLr::new(1e-3));
    let result = into_result(training.launch(learner))?;

    accelerator.save_model(&result.model, args.artifacts.join("model.safetensors"))?;
    Ok(accelerator.finish()?)
}

#[derive(Debug, Module)]
struct Model {
    cnn: Cnn,
}

impl Model {
    fn classify(&self, batch: DigitBatch) -> ClassificationOutput {
        let output = self.cnn.forward(batch.images);
        let loss = cross_entropy(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Model {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> TrainOutput<ClassificationOutput> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Model {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> ClassificationOutput {
        self.classify(batch)
    }
}
