//! Runs searches whose trials are trainers.

use std::path::Path;

use accelerator::prelude::*;
use accelerator::train::{
    IntervalStrategy, OperatorTrainable, Registered, RegisteredModel, Setup, Trainer,
    TrainingArguments, TrainingOperator, TuneCallback,
};
use accelerator::tune::{
    AshaPromotion, BoxError, Display, Mode, Objective, Search, SearchOrder, Space, Stop,
    TrialSession, loguniform,
};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::nn::Linear;
use burn::optim::SgdConfig;
use serde::{Deserialize, Serialize};

use crate::operator::{Points, distance, line, loader};
use crate::problems::{Mlp, PictureBatcher};
use crate::trainers::{accuracy, mlp_loss};

/// Runs a search with trials of the given kind, and with the given scheduler.
pub fn run(trials: &str, scheduler: &str, folder: &Path) -> Result<()> {
    let metric = match trials {
        "operators" => "val_loss",
        _ => "eval_loss",
    };
    let mut search = Search::new(trials, Objective::new(metric, Mode::Min))
        .space(Space::new([("lr", loguniform(1e-3, 0.3))]))
        .num_samples(4)
        .order(SearchOrder::Ordered { workers: 2 })
        .stop(Stop::new().iterations(4))
        .display(Display::Quiet)
        .folder(folder);
    if scheduler == "promotion" {
        search = search.scheduler(AshaPromotion {
            max_t: 4,
            reduction_factor: 2,
            ..AshaPromotion::default()
        });
    }
    let results = match trials {
        "operators" => search.run::<OperatorTrainable<LineOfRate>>(),
        _ => search.run_fn(train),
    };
    let results = results.map_err(Error::other)?;
    let ends = results.dataframe();
    ends.to_csv(folder.join("ends.csv")).map_err(Error::other)
}

#[derive(Debug, Deserialize, Serialize)]
struct Rate {
    lr: f64,
}

struct LineOfRate;

impl TrainingOperator for LineOfRate {
    type Config = Rate;
    type Models = RegisteredModel<Linear, Points>;

    fn setup(setup: &Setup<Self>, config: &Rate) -> Result<Registered<Self>> {
        let optimizer = (SgdConfig::new().init(), ConstantLr::new(config.lr));
        let model = setup
            .register(line, optimizer)?
            .with_criterion(|line, points| (distance(line, points), ()));
        let data = setup.register_data(loader(22), loader(7))?;
        Ok(Registered::new(Self, model, data))
    }
}

/// Trains for four epochs, with an evaluation in each. The evaluation of the untrained model is not an iteration.
fn train(session: &mut TrialSession, config: &accelerator::tune::Config) -> Result<(), BoxError> {
    let callback = TuneCallback::new(session);
    let arguments = TrainingArguments {
        data_seed: Some(3),
        eval_on_start: true,
        eval_strategy: IntervalStrategy::Epoch,
        learning_rate: config.parse("lr")?,
        num_train_epochs: 4.0,
        output_dir: session.folder().join("trainer"),
        per_device_train_batch_size: 8,
        resume_from_checkpoint: callback.resume_from()?,
        save_steps: 3.0,
        ..TrainingArguments::default()
    };
    let accelerator = arguments.accelerator().device(BackendKind::Flex).build()?;
    let mut trainer = Trainer::builder(
        arguments,
        |device: &_| Mlp::new(device, 16, 0.2),
        PictureBatcher,
        mlp_loss,
    )
    .accelerator(accelerator)
    .train_dataset(InMemDataset::new((0..48).collect()))
    .eval_dataset(InMemDataset::new((48..60).collect()))
    .compute_metrics(accuracy)
    .callback(callback)
    .build()?;
    trainer.train()?;
    trainer.finish()?;
    Ok(())
}
