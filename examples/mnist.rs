//! Trains a small CNN to read handwritten digits, on any number of processes.
//!
//! `cargo run --release --example mnist -- --help` lists the flags.

use accelerator::prelude::*;
use accelerator_examples::{
    Cnn, CnnConfig, ComparisonArgs, DigitBatch, DigitBatcher, MnistArgs, Report, ReportArgs,
    Reporter, SampleLog, Score, TrackArgs, cross_entropy, init_logging,
};
use clap::Parser;

/// Train a small convolutional network to read handwritten digits
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    mnist: MnistArgs,

    #[command(flatten)]
    report: ReportArgs,

    #[command(flatten)]
    comparison: ComparisonArgs,

    #[command(flatten)]
    tracking: TrackArgs,
}

fn main() -> Result<(), Report> {
    let Args {
        mnist: args,
        report,
        comparison,
        tracking,
    } = Args::parse();
    init_logging();
    let lr = args.learning_rate();
    let digits = args.digits()?;

    let accelerator = Accelerator::builder()
        .device(args.device.map(Into::into))
        .dtype(args.dtype.into())
        .seed(args.seed)
        .log_with(tracking.trackers())
        .data_folders(&args.data_dir)
        .build()?;
    let device = accelerator.device();

    let model = CnnConfig::new().with_dropout(args.dropout).init(&device);
    let optimizer = args.optimizer.init();
    let train = LoaderBuilder::new(DigitBatcher)
        .batch_size(args.batch_size.get())
        .shuffle(args.seed)
        .build(digits.train);
    let valid = LoaderBuilder::new(DigitBatcher)
        .batch_size(256)
        .build(digits.validation);
    let test = LoaderBuilder::new(DigitBatcher)
        .batch_size(256)
        .build(digits.test);
    let (mut model, mut optimizer, train, valid, test) =
        accelerator.prepare((model, optimizer, train, valid, test))?;

    let mut samples = SampleLog::open(comparison.log_samples.as_deref(), accelerator.rank())?;
    tracking.begin(&accelerator, &args.hyperparameters())?;
    let mut reporter = Reporter::tracked(&accelerator, &report, train.steps())?;
    accelerator.print(accelerator.plan(&train, args.epochs));
    if let Some(path) = &comparison.save_initial {
        accelerator.save_model(&model, path)?;
    }

    for epoch in 0..args.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
            let gradients = accelerator.backward(loss, &model, &batch)?;
            reporter.step(epoch, gradients.loss(), lr, gradients.samples())?;
            model = optimizer.step(lr, model, gradients);
            samples.log(batch.real_indices())?;
        }
        let score = accelerator.reduce_metric(evaluate(&accelerator.valid(&model)?, &valid)?)?;
        reporter.validated(epoch, score.loss(), score.accuracy())?;
    }

    let score = accelerator.reduce_metric(evaluate(&accelerator.valid(&model)?, &test)?)?;
    reporter.tested(score.loss(), score.accuracy())?;
    if let Some(path) = &report.save {
        accelerator.save_model(&model, path)?;
    }
    Ok(accelerator.finish()?)
}

fn evaluate(model: &Cnn, loader: &PreparedLoader<DigitBatch>) -> Result<Score, Report> {
    let mut score = Score::new();
    for batch in loader.eval() {
        let batch = batch?;
        let logits = model.forward(batch.images.clone());
        score.update(logits, batch.targets.clone(), batch.real());
    }
    Ok(score)
}
