//! Trains a small language model on a text, character by character.
//!
//! ```text
//! cargo run --release --example nlp_transformer
//! cargo run --release --bin accel-launch -- --num-processes 2 --example nlp_transformer --text my.txt
//! ```

use std::num::NonZeroUsize;
use std::path::PathBuf;

use accelerator::metric::Mean;
use accelerator::nn::Units;
use accelerator::prelude::*;
use accelerator_examples::text::{TextBatcher, TextWindows};
use accelerator_examples::{
    DeviceName, Report, TrackArgs, TransformerConfig, cross_entropy, init_logging,
};
use burn::module::Module;
use burn::optim::AdamWConfig;
use clap::Parser;

/// Learn a text character by character, and continue it
#[derive(Debug, Parser)]
struct Args {
    /// The text to learn [default: one that is built in]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,

    /// The number of passes over the text
    #[arg(long, default_value_t = 30, value_name = "N")]
    epochs: u64,

    /// The number of windows in a batch of each process
    #[arg(long, default_value = "8", value_name = "N")]
    batch_size: NonZeroUsize,

    /// The number of characters in a window
    #[arg(long, default_value = "64", value_name = "N")]
    length: NonZeroUsize,

    /// The width of the model, a multiple of four
    #[arg(long, default_value_t = 64, value_name = "N")]
    width: usize,

    /// The number of layers
    #[arg(long, default_value_t = 2, value_name = "N")]
    layers: usize,

    /// Use the token embedding as the output layer as well
    #[arg(long)]
    tied: bool,

    /// Compute the activations of layers again in backward, in place of keeping them
    #[arg(long)]
    recompute: bool,

    /// Shard the layers over the ranks, which also computes their activations again
    #[arg(long, conflicts_with = "recompute")]
    shard: bool,

    /// The learning rate
    #[arg(long, default_value_t = 3e-3, value_name = "RATE")]
    lr: f64,

    /// The text to continue after training
    #[arg(long, default_value = "The ", value_name = "TEXT")]
    prompt: String,

    /// The kind of device [default: the fastest that is compiled in]
    #[arg(long, value_enum)]
    device: Option<DeviceName>,

    #[command(flatten)]
    tracking: TrackArgs,
}

fn main() -> Result<(), Report> {
    let args = Args::parse();
    init_logging();
    let length = args.length.get();
    let (windows, vocabulary) = TextWindows::open(args.text.as_deref(), length)?;

    let mut accelerator = Accelerator::builder()
        .device(args.device.map(Into::into))
        .log_with(args.tracking.trackers());
    if args.recompute {
        accelerator = accelerator.units(Units::Recompute);
    }
    if args.shard {
        accelerator = accelerator.units(Units::Shard);
    }
    let accelerator = accelerator.build()?;
    let model = TransformerConfig::new(vocabulary.len(), length)
        .with_width(args.width)
        .with_layers(args.layers)
        .with_tied(args.tied);
    let model = accelerator.init(|device| model.init(device));
    let train = LoaderBuilder::new(TextBatcher)
        .batch_size(args.batch_size.get())
        .shuffle(42)
        .build(windows);
    let parts = (model, AdamWConfig::new().init_fused(), train);
    let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;
    accelerator.print(accelerator.plan(&train, args.epochs));

    let given = serde_json::json!({
        "batch_size": args.batch_size, "length": length, "width": args.width, "layers": args.layers, "lr": args.lr,
    });
    let mut course = args.tracking.course(&accelerator, "train", &given)?;
    for epoch in 0..args.epochs {
        let mut loss = Mean::new();
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let logits = accelerator.forward(&model, |model| model.forward(batch.tokens.clone()));
            let error = cross_entropy(accelerator.to_full(logits), batch.next.clone());
            // The loss is a mean over tokens, so gradients are weighted by tokens.
            let tokens = batch.with_weight(batch.tokens() as f64);
            let gradients = accelerator.backward(error, &model, tokens)?.clip_norm(1.0);
            course.note(gradients.loss());
            if let (Some(value), Some(tokens)) = (gradients.loss(), gradients.samples()) {
                loss.update(value, tokens as usize);
            }
            model = optimizer.step(args.lr, model, gradients);
        }
        accelerator.print(format_args!("epoch {epoch}: {loss} nats a character"));
    }
    let prompt = vocabulary.tokens(&args.prompt);
    if !prompt.is_empty() {
        // On all ranks, since layers may be sharded over them.
        let (model, device) = (model.valid(), accelerator.device().inner());
        // The prompt and what follows it are as long as a window: the model has not learnt more positions.
        let more = length.saturating_sub(prompt.len());
        let tokens = model.continued(&prompt, length, more, &device);
        accelerator.print(vocabulary.text(&tokens));
    }
    accelerator.check_replicas(&model)?;
    // Every rank prints the same loss.
    println!("rank {}: loss {course}", accelerator.rank());
    Ok(accelerator.finish()?)
}
