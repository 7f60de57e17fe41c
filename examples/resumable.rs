//! The training of `mnist.rs`, made to survive being stopped or killed: started again, it resumes from its last
//! checkpoint. When it is asked to stop, by SIGTERM for example, it saves at once and exits with code 75, which asks
//! for a restart. When the launcher changes the number of processes, or one of them dies, those that stay continue
//! without a restart. With `--track`, all attempts are recorded as one run.
//!
//! ```text
//! cargo run --release --bin accel-launch -- --num-processes 2 --max-restarts 3 \
//!     --example resumable --checkpoints checkpoints/digits --track digits
//! accel-launch checkpoint list checkpoints/digits
//! ```
//!
//! `cargo run --release --example resumable -- --help` lists the flags.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use accelerator::prelude::*;
use accelerator_examples::{
    CnnConfig, DigitBatcher, MnistArgs, Report, ReportArgs, Reporter, Score, Split, TrackArgs,
    cross_entropy, init_logging,
};
use clap::Parser;

#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    training: MnistArgs,

    /// Save into this folder, and resume from the checkpoints in it
    #[arg(long, value_name = "DIR")]
    checkpoints: PathBuf,

    /// Save every this many optimizer steps, and at the end
    #[arg(long, default_value = "20", value_name = "N")]
    save_every: NonZeroUsize,

    /// The number of checkpoints to keep
    #[arg(long, default_value = "3", value_name = "N")]
    keep: NonZeroUsize,

    #[command(flatten)]
    report: ReportArgs,

    #[command(flatten)]
    tracking: TrackArgs,
}

fn main() -> Result<ExitCode, Report> {
    let args = Args::parse();
    init_logging();
    let digits = args.training.digits()?;

    let mut accelerator = args.training.accelerator(&args.tracking).build()?;
    accelerator.on_preemption(Preemption::new())?;
    loop {
        match train(&accelerator, &args, digits.clone())? {
            ControlFlow::Continue(next) => accelerator = next,
            ControlFlow::Break(code) => return Ok(code),
        }
    }
}

/// Trains to the end and returns the exit code, or until the number of ranks changes and returns the next accelerator.
fn train(
    accelerator: &Accelerator,
    args: &Args,
    digits: Split,
) -> Result<ControlFlow<ExitCode, Accelerator>, Report> {
    let Args {
        training: args,
        checkpoints,
        save_every,
        keep,
        report,
        tracking,
    } = args;
    let lr = args.learning_rate();
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
    let (model, optimizer, train, valid) = accelerator.prepare((model, optimizer, train, valid))?;

    let checkpoints = Checkpoints::new(checkpoints).with_total_limit(keep.get());
    let best = Object(0.0_f64);
    let (parts, position) = accelerator.resume(&checkpoints, (model, optimizer, train, best))?;
    let (mut model, mut optimizer, train, Object(mut best)) = parts;
    for reason in position.passed_over() {
        accelerator.print(format_args!("not used: {reason}"));
    }
    accelerator.print(accelerator.plan(&train, args.epochs));
    accelerator.print(format_args!("training begins at {position}"));

    let mut saved = position.checkpoint().map(|_| position.step());
    tracking.begin(accelerator, &args.hyperparameters())?;
    let reporter = Reporter::tracked(accelerator, report, train.steps())?;
    let mut reporter = reporter.starting_behind(position.step());
    for epoch in position.epoch()..args.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
            let gradients = match accelerator.backward(loss, &model, &batch) {
                Ok(gradients) => gradients,
                Err(lost) if lost.is_peer_lost() => {
                    let next = accelerator.recover((&model, &optimizer, &train, Object(&best)))?;
                    return Ok(ControlFlow::Continue(next));
                }
                Err(error) => return Err(error.into()),
            };
            reporter.step(epoch, gradients.loss(), lr, gradients.samples())?;
            model = optimizer.step(lr, model, gradients);
            if accelerator.regroup_pending()? {
                let next = accelerator.regroup((&model, &optimizer, &train, Object(&best)))?;
                return Ok(
                    next.map_or(ControlFlow::Break(ExitCode::SUCCESS), ControlFlow::Continue)
                );
            }
            let preempted = accelerator.preempted()?;
            if preempted || optimizer.steps().is_multiple_of(save_every.get() as u64) {
                let parts = (&model, &optimizer, &train, Object(&best));
                accelerator.save_state(&checkpoints, parts)?;
                saved = Some(optimizer.steps());
            }
            if preempted {
                return Ok(ControlFlow::Break(accelerator.finish_preempted()?));
            }
        }
        let trained = accelerator.valid(&model)?;
        let score = Score::on(&valid, |images| trained.forward(images))?;
        let score = accelerator.reduce_metric(score)?;
        reporter.validated(epoch, score.loss(), score.accuracy())?;
        best = best.max(score.accuracy());
    }
    // Saves the end of the training, unless the last step was saved.
    if saved != Some(optimizer.steps()) {
        let parts = (&model, &optimizer, &train, Object(&best));
        accelerator.save_state(&checkpoints, parts)?;
    }
    accelerator.print(format_args!("best accuracy {:.1} %", 100.0 * best));
    if let Some(path) = &report.save {
        accelerator.save_model(&model, path)?;
    }
    accelerator.finish()?;
    Ok(ControlFlow::Break(ExitCode::SUCCESS))
}
