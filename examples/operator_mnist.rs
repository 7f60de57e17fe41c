//! Trains a small CNN to read handwritten digits on workers that the program itself starts, without a loop: a training
//! operator in the manner of Ray SGD.
//!
//! ```text
//! cargo run --release --example operator_mnist -- --num-workers 2 --epochs 3
//! ```

use std::path::PathBuf;

use accelerator::prelude::*;
use accelerator::train::{OperatorTrainer, Registered, RegisteredModel, Setup, TrainingOperator};
use accelerator_examples::{Cnn, CnnConfig, DigitBatch, DigitBatcher, Split, cross_entropy};
use burn::lr_scheduler::constant::ConstantLr;
use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use clap::Parser;
use serde::{Deserialize, Serialize};

struct MnistOperator;

impl TrainingOperator for MnistOperator {
    type Config = Config;
    type Models = RegisteredModel<Cnn, DigitBatch>;

    fn setup(setup: &Setup<Self>, config: &Config) -> Result<Registered<Self>> {
        let digits = Split::open(config.data_dir.as_deref(), Some(config.limit));
        let digits = digits.map_err(Error::other)?;
        let loader = |digits| {
            let loader = LoaderBuilder::new(DigitBatcher).shuffle(42);
            loader.batch_size(config.batch_size).build(digits)
        };
        let momentum = MomentumConfig::new().with_momentum(config.momentum);
        let optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
        let model = setup
            .register(
                |device| CnnConfig::new().init(device),
                (optimizer, ConstantLr::new(config.lr)),
            )?
            .with_criterion(|model, batch| {
                let logits = model.forward(batch.images.clone());
                let loss = cross_entropy(logits.clone(), batch.targets.clone());
                (loss, (logits, batch.targets.clone()))
            });
        let data = setup.register_data(loader(digits.train), loader(digits.validation))?;
        Ok(Registered::new(Self, model, data))
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let mut trainer = OperatorTrainer::<MnistOperator>::new(args.num_workers, args.config)?;
    for _ in 0..args.epochs {
        let metrics = trainer.train(None)?;
        let val_metrics = trainer.validate()?;
        trainer.print(format_args!("{metrics} {val_metrics}"));
    }
    trainer.shutdown()
}

/// Train a small convolutional network to read handwritten digits on several processes
#[derive(Debug, Parser)]
struct Args {
    /// The number of processes to train on
    #[arg(long, default_value_t = 2, value_name = "N")]
    num_workers: usize,

    /// The number of passes over the training samples
    #[arg(long, default_value_t = 3, value_name = "N")]
    epochs: u64,

    #[command(flatten)]
    config: Config,
}

#[derive(Debug, clap::Args, Deserialize, Serialize)]
struct Config {
    /// The number of samples in a batch of each process
    #[arg(long, default_value_t = 16, value_name = "N")]
    batch_size: usize,

    /// The learning rate
    #[arg(long, default_value_t = 0.02, value_name = "RATE")]
    lr: f64,

    /// The momentum of the optimizer
    #[arg(long, default_value_t = 0.9, value_name = "M")]
    momentum: f64,

    /// The folder with MNIST's files, or others in that format; without it, digits are drawn
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// Train on at most this many samples
    #[arg(long, default_value_t = 3200, value_name = "N")]
    limit: usize,
}
