//! Trains the network of the `mnist` example on digits that come as a stream of unknown length: rank 0 reads it and
//! sends each rank its samples, or each rank reads its own part.
//!
//! ```text
//! cargo run --release --example streaming
//! cargo run --release --bin accel-launch -- --num-processes 2 --example streaming --sharing dispatched
//! cargo run --release --bin accel-launch -- --num-processes 2 --example streaming --sharing sharded
//! ```

use accelerator::data::StreamPart;
use accelerator::prelude::*;
use accelerator_examples::{
    CnnConfig, Course, DigitBatcher, MnistArgs, Report, ReportArgs, Reporter, TrackArgs,
    cross_entropy, init_logging,
};
use burn::data::dataset::Dataset;
use clap::{Parser, ValueEnum};

/// Train on samples that come as a stream
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    mnist: MnistArgs,

    /// The way processes share the stream
    #[arg(long, value_enum, default_value_t = Sharing::Dispatched)]
    sharing: Sharing,

    #[command(flatten)]
    report: ReportArgs,

    #[command(flatten)]
    tracking: TrackArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Sharing {
    /// Rank 0 reads the stream and sends each rank its samples
    Dispatched,
    /// Each rank reads its own part
    Sharded,
}

fn main() -> Result<(), Report> {
    let Args {
        mnist: args,
        sharing,
        report,
        tracking,
    } = Args::parse();
    init_logging();
    let lr = args.learning_rate();
    let digits = args.digits()?.train;

    let accelerator = args.accelerator(&tracking).build()?;
    let device = accelerator.device();

    let model = CnnConfig::new().with_dropout(args.dropout).init(&device);
    let optimizer = args.optimizer.init();
    let stream = move |part: StreamPart| {
        let digits = digits.clone();
        let mine = (part.index()..digits.len()).step_by(part.count());
        mine.map(move |index| digits.get(index))
    };
    let builder = LoaderBuilder::new(DigitBatcher).batch_size(args.batch_size.get());
    let train = match sharing {
        Sharing::Dispatched => builder.build_dispatched_stream(stream),
        Sharing::Sharded => builder.build_sharded_stream(stream),
    };
    let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;

    tracking.begin(&accelerator, &args.hyperparameters())?;
    let mut reporter = Reporter::tracked(&accelerator, &report, train.steps())?;
    let mut course = Course::new();
    for epoch in 0..args.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = cross_entropy(model.forward(batch.images.clone()), batch.targets.clone());
            let gradients = accelerator.backward(loss, &model, &batch)?;
            reporter.step(epoch, gradients.loss(), lr, gradients.samples())?;
            course.note(gradients.loss());
            model = optimizer.step(lr, model, gradients);
        }
    }
    if let Some(path) = &report.save {
        accelerator.save_model(&model, path)?;
    }
    accelerator.check_replicas(&model)?;
    // Every rank prints the same loss.
    println!("rank {}: loss {course}", accelerator.rank());
    Ok(accelerator.finish()?)
}
