//! A training operator whose trainer starts processes, with mishaps.

use std::path::Path;
use std::time::Duration;

use accelerator::prelude::*;
use accelerator::train::{
    Metrics, OperatorTrainer, OperatorWorker, Registered, RegisteredModel, Setup, StepInfo,
    TrainingOperator,
};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

/// The mishap of a training; an error or a panic comes in the third batch of rank 1.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Mishap {
    Error,
    None,
    Panic,
    /// Each batch takes a while, on every rank.
    Slow,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Config {
    pub samples: usize,
    pub mishap: Mishap,
}

struct LineOperator;

pub(crate) type Points = Tensor<2>;

impl TrainingOperator for LineOperator {
    type Config = Config;
    type Models = RegisteredModel<Linear, Points>;

    fn setup(setup: &Setup<Self>, config: &Config) -> Result<Registered<Self>> {
        println!("set up {}", setup.accelerator().rank());
        let optimizer = (SgdConfig::new().init(), ConstantLr::new(RATE));
        let model = setup
            .register(line, optimizer)?
            .with_criterion(|line, points| distance(line, points));
        let data = setup.register_data(loader(config.samples), loader(7))?;
        Ok(Registered::new(Self, model, data))
    }

    fn train_batch(
        &mut self,
        worker: &mut OperatorWorker<Self>,
        batch: &Batch<Points>,
        info: &StepInfo,
    ) -> Result<Metrics> {
        if worker.config.mishap == Mishap::Slow {
            std::thread::sleep(Duration::from_millis(20));
            if info.global_step == 2 {
                println!("training {} in {}", worker.world_rank(), std::process::id());
            }
        }
        if (worker.world_rank(), info.global_step) == (1, 2) {
            match worker.config.mishap {
                Mishap::Error => return Err(Error::other("no labels here")),
                Mishap::Panic => panic!("no batch here"),
                Mishap::None | Mishap::Slow => {}
            }
        }
        let OperatorWorker {
            accelerator,
            models,
            ..
        } = worker;
        let loss = models.loss(accelerator, batch)?;
        let train_loss = loss.clone().into_scalar::<f64>();
        let gradients = accelerator.backward(loss, models.model(), batch)?;
        models.step(gradients.clip_norm(CLIP));
        Ok(Metrics::from_iter([("train_loss", train_loss)]))
    }
}

/// The result of a training.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
pub struct Outcome {
    pub train: Vec<Metrics>,
    pub val: Metrics,
    /// The bits of weight and bias.
    pub weights: Vec<u32>,
}

/// Trains two epochs on `num_workers` workers. If possible, a new trainer loads what the first one saved and trains the
/// second epoch.
pub fn train(num_workers: usize, folder: &Path) -> Result<Outcome> {
    let config = Config {
        samples: 22,
        mishap: Mishap::None,
    };
    let mut trainer = trainer(num_workers, config)?;
    let mut train = vec![trainer.train(1)?];
    let refused = trainer.save(folder);
    assert!(
        refused.unwrap_err().is_misuse(),
        "within an accumulation window"
    );
    train.push(trainer.train(1)?);
    train.push(trainer.train(None)?);
    let val = trainer.validate()?;
    trainer.save(folder)?;
    // A rank of a launcher can join its job only once.
    if std::env::var_os("RANK").is_none() {
        trainer.shutdown()?;
        trainer = self::trainer(num_workers, config)?;
    }
    trainer.load(folder)?;
    train.push(trainer.train(None)?);
    let saved = trainer.save(folder)?;
    let loaded = match trainer.worker() {
        Some(worker) => worker.models.model().clone(),
        None => {
            let accelerator = Accelerator::new()?;
            accelerator.load_model(line(&accelerator.device()), saved)?
        }
    };
    trainer.shutdown()?;
    Ok(Outcome {
        train,
        val,
        weights: weights(&loaded),
    })
}

/// Trains the same weights with a loop, on the ranks of this job.
pub fn by_hand() -> Result<Vec<u32>> {
    let accelerator = builder().build()?;
    let optimizer = (SgdConfig::new().init(), ConstantLr::new(RATE));
    let model = line(&accelerator.device());
    let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer, loader(22)))?;
    for epoch in 0..2 {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let gradients = accelerator.backward(distance(&model, &batch), &model, &batch)?;
            model = optimizer.step(model, gradients.clip_norm(CLIP));
        }
    }
    accelerator.finish()?;
    Ok(weights(&model))
}

/// Returns the error of a training with a mishap, and checks that the trainer cannot be used any more.
pub fn fail(mishap: Mishap) -> Result<String> {
    let config = Config {
        samples: 100_000,
        mishap,
    };
    let mut trainer = trainer(2, config)?;
    let error = trainer.train(None).unwrap_err();
    assert!(trainer.train(None).unwrap_err().is_misuse());
    Ok(error.to_string())
}

fn trainer(num_workers: usize, config: Config) -> Result<OperatorTrainer<LineOperator>> {
    OperatorTrainer::with_accelerator(builder(), num_workers, config)
}

const RATE: f64 = 0.1;
const CLIP: f64 = 0.5;

fn builder() -> accelerator::AcceleratorBuilder {
    Accelerator::builder()
        .device(BackendKind::Flex)
        .accumulation_steps(2)
}

pub(crate) fn line(device: &Device) -> Linear {
    LinearConfig::new(1, 1)
        .with_initializer(burn::nn::Initializer::Constant { value: 0.5 })
        .init(device)
}

pub(crate) fn distance(line: &Linear, points: &Points) -> Tensor<1> {
    let error = line.forward(points.clone()) - (points.clone() * 2.0 + 3.0);
    (error.clone() * error).mean()
}

pub(crate) fn loader(samples: usize) -> accelerator::data::Loader<Points> {
    let points = (0..samples).map(|i| (i % 22) as f32 / 22.0).collect();
    LoaderBuilder::from_fn(|items: Vec<f32>, device| {
        let rows = items.len();
        Tensor::from_data(TensorData::new(items, [rows, 1]), device)
    })
    .batch_size(4)
    .shuffle(3)
    .build(InMemDataset::new(points))
}

fn weights(line: &Linear) -> Vec<u32> {
    let weight = line.weight.val().into_data();
    let bias = line.bias.as_ref().unwrap().val().into_data();
    let values = weight.iter::<f32>().chain(bias.iter::<f32>());
    values.map(f32::to_bits).collect()
}
