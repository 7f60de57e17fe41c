//! The code of `docs/quicktour.md`, compiled: each of its blocks is in a function here, which a test in
//! `documents.rs` looks for.

#![allow(
    clippy::shadow_unrelated,
    clippy::unwrap_used,
    dead_code,
    unused_variables,
    unused_assignments,
    unused_mut,
    reason = "the functions are blocks of a document, and only compiled"
)]

use accelerator::metric::{Accuracy, Mean};
use accelerator::optim::Scheduled;
use accelerator::prelude::*;
use accelerator_examples::{Cnn, DigitBatch, DigitBatcher as MyBatcher, Digits, cross_entropy};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::sequential::{SequentialLrScheduler, SequentialLrSchedulerConfig};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};

type Manual = PreparedOptimizer<accelerator::optim::Manual>;

fn devices() -> Result<()> {
    let accelerator = Accelerator::builder()
        .device(BackendKind::Flex)
        .seed(42)
        .build()?;
    let device = accelerator.device();
    Ok(())
}

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let hidden = LinearConfig::new(4, 32).init(device);
        let output = LinearConfig::new(32, 3).init(device);
        Self { hidden, output }
    }

    fn loss(&self, batch: &Flowers) -> Tensor<1> {
        let logits = self
            .output
            .forward(relu(self.hidden.forward(batch.sizes.clone())));
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits, batch.species.clone())
    }
}

#[derive(Clone)]
struct Flower {
    sizes: [f32; 4],
    species: i64,
}

struct Flowers {
    sizes: Tensor<2>,
    species: Tensor<1, Int>,
}

struct FlowerBatcher;

impl Batcher<Flower, Flowers> for FlowerBatcher {
    fn batch(&self, flowers: Vec<Flower>, device: &Device) -> Flowers {
        let sizes: Vec<f32> = flowers.iter().flat_map(|flower| flower.sizes).collect();
        let species: Vec<i64> = flowers.iter().map(|flower| flower.species).collect();
        let count = flowers.len();
        Flowers {
            sizes: Tensor::from_data(TensorData::new(sizes, [count, 4]), device),
            species: Tensor::from_data(TensorData::new(species, [count]), device),
        }
    }
}

fn own_parts(accelerator: &Accelerator, flowers: Vec<Flower>, batch: Batch<Flowers>) -> Result<()> {
    let model = Net::new(&accelerator.device());
    let train = LoaderBuilder::new(FlowerBatcher)
        .batch_size(32)
        .shuffle(42)
        .build(InMemDataset::new(flowers));

    let gradients = accelerator.backward(model.loss(&batch), &model, &batch)?;
    Ok(())
}

fn loaders(dataset: Digits) {
    let train = LoaderBuilder::new(MyBatcher)
        .batch_size(32)
        .shuffle(42)
        .num_workers(2)
        .build(dataset);
}

fn loss(model: &Cnn, batch: &DigitBatch) -> Tensor<1> {
    cross_entropy(model.forward(batch.images.clone()), batch.targets.clone())
}

fn training(
    accelerator: &Accelerator,
    train: &PreparedLoader<DigitBatch>,
    mut model: Cnn,
    mut optimizer: Manual,
    epoch: u64,
) -> Result<()> {
    for batch in train.epoch(epoch) {
        let batch = batch?;
        let gradients = accelerator.backward(loss(&model, &batch), &model, &batch)?;
        model = optimizer.step(1e-3, model, gradients);
    }
    Ok(())
}

fn schedules(
    accelerator: &Accelerator,
    (model, schedule, train): (
        Cnn,
        SequentialLrScheduler,
        accelerator::data::Loader<DigitBatch>,
    ),
    gradients: AveragedGradients,
) -> Result<()> {
    let parts = (model, (AdamWConfig::new().init(), schedule), train);
    let (mut model, mut optimizer, train) = accelerator.prepare(parts)?;

    model = optimizer.step(model, gradients);
    Ok(())
}

fn schedules_of_a_plan(
    accelerator: &Accelerator,
    (model, train, valid): (
        Cnn,
        accelerator::data::Loader<DigitBatch>,
        accelerator::data::Loader<DigitBatch>,
    ),
    epochs: u64,
) -> Result<()> {
    let ((mut model, mut optimizer, train), position) = accelerator.prepare_and_resume(
        "checkpoints/a",
        epochs,
        (model, AdamWConfig::new().init(), train),
        |steps| CosineAnnealingLrSchedulerConfig::new(1e-3, steps).init(),
    )?;
    let valid = accelerator.prepare(valid)?;
    let _: PreparedOptimizer<Scheduled> = optimizer;
    Ok(())
}

fn warm_up(
    accelerator: &Accelerator,
    (model, train): (Cnn, accelerator::data::Loader<DigitBatch>),
) -> Result<()> {
    let parts = (model, AdamWConfig::new().init(), train);
    accelerator.prepare_and_resume("checkpoints/a", 3, parts, |steps| {
        let parts = vec![
            LrSchedulerConfig::Linear(LinearLrSchedulerConfig::new(1e-6, 1e-3, 100)),
            LrSchedulerConfig::Cosine(CosineAnnealingLrSchedulerConfig::new(1e-3, steps - 100)),
        ];
        SequentialLrSchedulerConfig::new(parts, vec![100]).init()
    })?;
    Ok(())
}

fn accumulation() -> Result<()> {
    let accelerator = Accelerator::builder().accumulation_steps(4).build()?;
    let accelerator = Accelerator::builder().global_batch(256, 32).build()?;
    Ok(())
}

fn clipping(
    accelerator: &Accelerator,
    (model, loss, batch): (Cnn, Tensor<1>, Batch<DigitBatch>),
) -> Result<()> {
    let gradients = accelerator.backward(loss, &model, &batch)?.clip_norm(1.0);
    Ok(())
}

fn half_precision(model: Cnn, batch: Batch<DigitBatch>) -> Result<()> {
    let accelerator = Accelerator::builder().precision(Precision::Bf16).build()?;

    let loss = accelerator.forward(&model, |model| {
        let logits = model.forward(accelerator.to_working(batch.images.clone()));
        cross_entropy(accelerator.to_full(logits), batch.targets.clone())
    });
    Ok(())
}

fn evaluation(
    accelerator: &Accelerator,
    (model, valid): (Cnn, PreparedLoader<DigitBatch>),
    (step, epoch): (u64, u64),
) -> Result<()> {
    let trained = accelerator.valid(&model)?;
    let (mut loss, mut accuracy) = (Mean::new(), Accuracy::new());
    for batch in valid.eval() {
        let batch = batch?;
        let logits = trained.forward(batch.images.clone());
        loss.update_with(
            cross_entropy(logits.clone(), batch.targets.clone()),
            batch.real(),
        );
        accuracy.update(logits, batch.targets.clone(), batch.real());
    }
    let (loss, accuracy) = accelerator.reduce_metric((loss, accuracy))?;
    accelerator.log(
        "valid",
        [("loss", loss.value()), ("accuracy", accuracy.value())],
        step,
        epoch as f64,
    );
    Ok(())
}

fn evaluation_only(
    accelerator: &Accelerator,
    valid: accelerator::data::Loader<DigitBatch>,
) -> Result<()> {
    let device = accelerator.device();
    let model = accelerator.load_model(Net::new(&device), "model.safetensors")?;
    let valid = accelerator.prepare(valid)?;
    let trained = accelerator.valid(&model)?;
    Ok(())
}

fn gathering(accelerator: &Accelerator, logits: Tensor<2>, batch: Batch<DigitBatch>) -> Result<()> {
    let answers = accelerator.gather_for_metrics(logits.argmax(1), &batch)?;
    Ok(())
}

fn checkpoints(
    accelerator: &Accelerator,
    (model, optimizer, train): (Cnn, ModuleOptimizer, accelerator::data::Loader<DigitBatch>),
    epochs: u64,
) -> Result<()> {
    let checkpoints = Checkpoints::new("checkpoints/a").with_total_limit(3);
    let parts = accelerator.prepare((model, optimizer, train))?;
    let ((mut model, mut optimizer, train), position) = accelerator.resume(&checkpoints, parts)?;
    let mut saved = position.step();
    for epoch in position.epoch()..epochs {
        for batch in train.epoch(epoch) {
            let stepped = matches!(optimizer.outcome(), StepOutcome::Stepped { .. });
            if stepped && optimizer.steps().is_multiple_of(100) {
                accelerator.save_state(&checkpoints, (&model, &optimizer, &train))?;
                saved = optimizer.steps();
            }
        }
    }
    if optimizer.steps() > saved {
        accelerator.save_state(&checkpoints, (&model, &optimizer, &train))?;
    }
    Ok(())
}

fn tracking(accelerator: Accelerator, (loss, step, epoch): (f64, u64, u64)) -> Result<()> {
    let hyperparameters = std::collections::BTreeMap::from([("lr", 1e-3)]);
    accelerator.init_trackers("mnist", &hyperparameters)?;
    accelerator.log("train", [("loss", loss)], step, epoch as f64);
    accelerator.finish()?;
    Ok(())
}

#[test]
fn ranks() -> Result<()> {
    let ranks = accelerator::launch(2, |accelerator| Ok(accelerator.rank()))?;
    assert_eq!(ranks, [0, 1]);
    Ok(())
}
