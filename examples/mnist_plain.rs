//! Trains a small CNN to read handwritten digits in a loop of Burn's own, on one process.
//!
//! `cargo run --release --example mnist_plain -- --help` lists the flags.

use std::sync::Arc;

use accelerator_examples::{
    Cnn, CnnConfig, ComparisonArgs, DigitBatch, DigitBatcher, MnistArgs, Report, ReportArgs,
    Reporter, SampleLog, Score, cross_entropy, init_logging, save_model,
};
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::module::Module;
use burn::optim::GradientsParams;
use clap::Parser;

/// Train a small convolutional network to read handwritten digits in a loop of Burn's own
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    mnist: MnistArgs,

    #[command(flatten)]
    report: ReportArgs,

    #[command(flatten)]
    comparison: ComparisonArgs,
}

fn main() -> Result<(), Report> {
    let Args {
        mnist: args,
        report,
        comparison,
    } = Args::parse();
    init_logging();
    let lr = args.learning_rate();
    let digits = args.digits()?;

    let device = args.open_device()?.autodiff();

    let mut model = CnnConfig::new().with_dropout(args.dropout).init(&device);
    let mut optimizer = args.optimizer.init();
    let train = DataLoaderBuilder::new(DigitBatcher)
        .batch_size(args.batch_size.get())
        .shuffle(args.seed)
        .set_device(device.clone())
        .build(digits.train);
    let valid = DataLoaderBuilder::new(DigitBatcher)
        .batch_size(256)
        .set_device(device.clone().inner())
        .build(digits.validation);
    let test = DataLoaderBuilder::new(DigitBatcher)
        .batch_size(256)
        .set_device(device.inner())
        .build(digits.test);

    let mut samples = SampleLog::open(comparison.log_samples.as_deref(), 0)?;
    let steps = train.num_items().div_ceil(args.batch_size.get());
    let mut reporter = Reporter::new(0, &report, steps as u64)?;
    if let Some(path) = &comparison.save_initial {
        save_model(&model, path)?;
    }

    for epoch in 0..args.epochs {
        for batch in train.iter() {
            let batch = batch?;
            let loss = cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            reporter.step(
                epoch,
                loss.into_scalar::<f64>(),
                lr,
                batch.indices.len() as f64,
            )?;
            model = optimizer.step(lr, model, gradients);
            samples.log(&batch.indices)?;
        }
        let score = evaluate(&model.valid(), &valid)?;
        reporter.validated(epoch, score.loss(), score.accuracy())?;
    }

    let score = evaluate(&model.valid(), &test)?;
    reporter.tested(score.loss(), score.accuracy())?;
    if let Some(path) = &report.save {
        save_model(&model, path)?;
    }
    Ok(())
}

fn evaluate(model: &Cnn, loader: &Arc<dyn DataLoader<DigitBatch>>) -> Result<Score, Report> {
    let mut score = Score::new();
    for batch in loader.iter() {
        let batch = batch?;
        let logits = model.forward(batch.images.clone());
        score.update(logits, batch.targets.clone(), batch.indices.len());
    }
    Ok(score)
}
