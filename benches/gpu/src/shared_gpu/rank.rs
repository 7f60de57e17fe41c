use std::error::Error;
use std::path::PathBuf;

use accelerator::prelude::*;
use accelerator_benches::Samples;
use accelerator_examples::DeviceName;
use burn::optim::SgdConfig;

use super::Sending;
use crate::model::{Kind, Model};
use crate::setting::Size;

const SEED: u64 = 42;

/// The settings of `rank`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RankArgs {
    #[arg(long, value_enum)]
    device: DeviceName,
    #[arg(long, value_enum)]
    model: Kind,
    #[arg(long, value_enum)]
    size: Size,
    #[arg(long, value_enum)]
    sending: Sending,
    #[arg(long)]
    global_batch: Option<usize>,
    /// The number of batches of a rank in a step
    #[arg(long)]
    micro_batches: usize,
    #[arg(long)]
    steps: usize,
    #[arg(long)]
    rate: f64,
    #[arg(long)]
    bucket_size: usize,
    /// The file for the untrained model
    #[arg(long)]
    initial: PathBuf,
    /// The file for the trained model
    #[arg(long)]
    save: PathBuf,
    /// The file for the time breakdown of the steps, over all ranks
    #[arg(long)]
    summary: PathBuf,
}

/// Trains as a rank of this process's job.
pub(crate) fn run(args: &RankArgs) -> Result<(), Box<dyn Error>> {
    let accelerator = Accelerator::builder()
        .device(BackendKind::from(args.device))
        .bucket_size(args.bucket_size)
        .accumulation_steps(args.micro_batches)
        .overlap(match args.sending {
            Sending::After => Overlap::Off,
            Sending::Within => Overlap::On,
        })
        .step_summary()
        .build()?;
    let device = accelerator.device();
    let model = Model::new(args.model, args.size);
    let global_batch = args.global_batch.unwrap_or(model.batch_size() / 2);
    device.seed(SEED);
    let loader = LoaderBuilder::new(model.samples().batcher())
        .global_batch_size(global_batch / args.micro_batches)
        .build(Samples::dataset(global_batch * args.steps));
    let parts = (model.init(&device), SgdConfig::new().init(), loader);
    let (mut net, mut optimizer, loader) = accelerator.prepare(parts)?;
    accelerator.save_model(&net, &args.initial)?;
    for batch in loader.epoch(0) {
        let batch = batch?;
        let loss = net.loss(net.logits(&batch, |images| images), &batch);
        let gradients = accelerator.backward(loss, &net, &batch)?;
        net = optimizer.step(args.rate, net, gradients);
    }
    if optimizer.steps() != args.steps as u64 {
        return Err(format!("expected {} steps, found {}", args.steps, optimizer.steps()).into());
    }
    accelerator.save_model(&net, &args.save)?;
    let summary = accelerator
        .mean_step_summary()?
        .ok_or("there was no step to sum up")?;
    if accelerator.is_main_process() {
        std::fs::write(&args.summary, serde_json::to_vec(&summary)?)?;
        let report = accelerator.overlap_report(&net)?;
        eprintln!(
            "{} rank(s), {:?}: {report:?}",
            accelerator.world_size(),
            args.sending
        );
    }
    Ok(accelerator.finish()?)
}
