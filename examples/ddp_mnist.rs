//! The script of the tutorials for PyTorch's DistributedDataParallel: a learning rate that grows with the number of
//! processes and falls after each epoch, three data sets with a batch size each, and metrics for TensorBoard.
//!
//! ```text
//! cargo run --release --bin accel-launch -- --num-processes 2 --example ddp_mnist --data-dir mnist --log-dir log
//! ```
//!
//! `Accelerator::builder` and `prepare` replace `init_process_group`, `DDP(model)` and the `DistributedSampler`; the
//! program never asks for its rank. The script evaluates a loss as a mean over the batches of one process; this program
//! takes the mean over the samples of all.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use accelerator::prelude::*;
use accelerator_examples::{
    CnnConfig, DigitBatcher, Report, Score, Split, TrackArgs, cross_entropy, init_logging,
};
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::optim::AdamConfig;
use clap::{Parser, ValueEnum};

/// Train on handwritten digits in parallel
#[derive(Debug, Parser)]
struct Args {
    /// The backend that averages gradients
    #[arg(long, value_enum, default_value_t = Backend::Gloo)]
    backend: Backend,

    /// The folder with MNIST's files, or others in that format; without it, digits are drawn
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// The number of passes over the training samples
    #[arg(long, default_value_t = 10, value_name = "N")]
    epochs: u64,

    /// Train on at most this many samples
    #[arg(long, value_name = "N")]
    limit: Option<NonZeroUsize>,

    #[command(flatten)]
    tracking: TrackArgs,
}

/// The backends, by the names that PyTorch gives them.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Backend {
    /// Through the memory of the host, for CPUs and any GPUs
    Gloo,
    /// Between GPUs
    Nccl,
}

fn main() -> Result<(), Report> {
    let args = Args::parse();
    init_logging();
    let digits = Split::open(args.data_dir.as_deref(), None)?;
    let digits = digits.limit(args.limit.map_or(usize::MAX, NonZeroUsize::get));
    let reduction = match args.backend {
        Backend::Gloo => GradientReduction::Staged,
        Backend::Nccl => GradientReduction::Nccl,
    };
    let accelerator = Accelerator::builder()
        .gradient_reduction(reduction)
        .seed(1)
        .log_with(args.tracking.trackers())
        .build()?;
    let ranks = accelerator.world_size();

    let model = accelerator.init(|device| CnnConfig::new().init(device));
    // 32 samples per process: the global batch grows with the number of processes.
    let train = LoaderBuilder::new(DigitBatcher)
        .batch_size(32)
        .shuffle(1)
        .build(digits.train);
    let valid = LoaderBuilder::new(DigitBatcher)
        .batch_size(400)
        .build(digits.validation);
    let test = LoaderBuilder::new(DigitBatcher)
        .batch_size(1000)
        .build(digits.test);
    let rate = accelerator.scaled_rate(0.001, RateScaling::Linear);
    let schedule = StepLrSchedulerConfig::new(rate, 1).with_gamma(0.7);
    let schedule = PerEpoch(schedule.init().map_err(std::io::Error::other)?);
    let optimizer = (AdamConfig::new().init_fused(), schedule);
    let (mut model, mut optimizer, train, valid, test) =
        accelerator.prepare((model, optimizer, train, valid, test))?;

    let given = serde_json::json!({ "batch_size": 32 * ranks, "epochs": args.epochs, "learning_rate": rate });
    args.tracking.begin(&accelerator, &given)?;
    let (epochs, steps) = (args.epochs, train.steps().unwrap_or(0));
    let every = (500 / ranks as u64).clamp(1, steps.max(1));
    for epoch in 1..=epochs {
        for batch in train.epoch(epoch - 1) {
            let batch = batch?;
            let loss = cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
            let gradients = accelerator.backward(loss, &model, &batch)?;
            let step = batch.step() + 1;
            if let Some(loss) = gradients.loss().filter(|_| step % every == 0) {
                accelerator.print(format_args!(
                    "epoch {epoch}/{epochs}, batch {step:5}/{steps} with loss: {loss:.4}"
                ));
                let step = (epoch - 1) * steps + step;
                accelerator.log("train", [("loss", loss)], step, epoch as f64);
            }
            model = optimizer.step(model, gradients);
        }
        let trained = accelerator.valid(&model)?;
        let score = Score::on(&valid, |images| trained.forward(images))?;
        let score = accelerator.reduce_metric(score)?;
        let said = told(&accelerator, "val", &score, epoch * steps, epoch);
        accelerator.print(format_args!("epoch {epoch}/{epochs} with {said}"));
    }
    let trained = accelerator.valid(&model)?;
    let score = Score::on(&test, |images| trained.forward(images))?;
    let score = accelerator.reduce_metric(score)?;
    let said = told(&accelerator, "test", &score, epochs * steps, epochs);
    accelerator.print(said);
    Ok(accelerator.finish()?)
}

/// Logs the score of a data set, and returns it as text.
fn told(accelerator: &Accelerator, kind: &str, score: &Score, step: u64, epoch: u64) -> String {
    let (loss, accuracy) = (score.loss(), score.accuracy());
    let figures = [("loss", loss), ("accuracy", accuracy)];
    accelerator.log(kind, figures, step, epoch as f64);
    format!("{kind} loss: {loss:.4}, {kind} accuracy: {accuracy:.4}")
}
