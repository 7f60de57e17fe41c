//! Trains networks of [`problems`](crate::problems) by arguments.

use std::path::Path;
use std::process::ExitCode;

use accelerator::prelude::*;
use accelerator::train::{
    Inputs, LrSchedulerType, OptimizerName, SaveStrategy, Trainer, TrainingArguments,
};
use burn::data::dataset::InMemDataset;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Int, Tensor};

use crate::problems::{
    Cnn, Mlp, Outcome, PictureBatcher, Pictures, Setting, flat, with_fixed_weights,
};

/// Logits and labels.
type Outputs = (Tensor<2>, Tensor<1, Int>);

/// Trains by a file of arguments, with dropout, a metric, and evaluations on samples that ranks cannot share evenly.
/// Pushes the result into a folder.
pub fn train(file: &Path, pushed: &Path) -> Result<ExitCode> {
    let arguments = TrainingArguments::from_file(file)?;
    let accelerator = arguments.accelerator().device(BackendKind::Flex).build()?;
    let model = |device: &_| Mlp::new(device, 16, 0.2);
    let mut trainer = Trainer::builder(arguments, model, PictureBatcher, mlp_loss)
        .accelerator(accelerator)
        .train_dataset(InMemDataset::new((0..97).collect()))
        .eval_dataset(InMemDataset::new((97..120).collect()))
        .compute_metrics(accuracy)
        .build()?;
    trainer.train()?;
    trainer.push(pushed)?;
    let restarts = trainer.accelerator().restarts();
    trainer
        .accelerator()
        .print(format_args!("after {restarts} restarts"));
    trainer.finish()
}

/// Trains the CNN of [`problems::train`](crate::problems::train) by arguments, with SGD and norm clipping.
pub fn fit_cnn(accelerator: &Accelerator, setting: &Setting) -> Result<Outcome> {
    let arguments = TrainingArguments {
        data_seed: Some(3),
        gradient_accumulation_steps: accelerator.accumulation_steps(),
        learning_rate: 0.02,
        logging_steps: 1.0,
        lr_scheduler_type: LrSchedulerType::Constant,
        num_train_epochs: setting.epochs as f64,
        optim: OptimizerName::Sgd,
        per_device_train_batch_size: setting.global_batch / accelerator.world_size(),
        save_strategy: SaveStrategy::No,
        ..TrainingArguments::default()
    };
    let model = |device: &_| with_fixed_weights(Cnn::new(device));
    let mut trainer = Trainer::builder(arguments, model, PictureBatcher, cnn_loss)
        .accelerator(accelerator.clone())
        .train_dataset(InMemDataset::new((0..setting.samples).collect()))
        .build()?;
    let output = trainer.train()?;
    let mut parameters = Vec::new();
    flat(trainer.model(), &mut parameters);
    let history = trainer.state().log_history.iter();
    let outcome = Outcome {
        losses: history
            .filter_map(|entry| entry.metrics.value("loss"))
            .collect(),
        parameters,
        steps: output.global_step,
        idle: 0,
    };
    trainer.finish()?;
    Ok(outcome)
}

fn cnn_loss(model: &Cnn, inputs: &Inputs<'_, Pictures>) -> (Tensor<1>, Outputs) {
    loss(model.forward(inputs.pictures.clone()), inputs)
}

pub(crate) fn mlp_loss(model: &Mlp, inputs: &Inputs<'_, Pictures>) -> (Tensor<1>, Outputs) {
    loss(model.forward(inputs.pictures.clone()), inputs)
}

fn loss(logits: Tensor<2>, inputs: &Inputs<'_, Pictures>) -> (Tensor<1>, Outputs) {
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    let loss = loss.forward(logits.clone(), inputs.targets.clone());
    (loss, (logits, inputs.targets.clone()))
}

pub(crate) fn accuracy((logits, labels): Outputs) -> [(&'static str, f64); 1] {
    let right = logits.argmax(1).flatten::<1>(0, 1).equal(labels);
    [("accuracy", right.float().mean().into_scalar())]
}
