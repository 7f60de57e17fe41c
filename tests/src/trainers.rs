//! Trains networks of [`problems`](crate::problems) by arguments.

use std::path::Path;
use std::process::ExitCode;

use accelerator::prelude::*;
use accelerator::train::{Inputs, Trainer, TrainingArguments};
use burn::data::dataset::InMemDataset;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Int, Tensor};

use crate::problems::{Mlp, PictureBatcher, Pictures};

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

pub(crate) fn mlp_loss(model: &Mlp, inputs: &Inputs<'_, Pictures>) -> (Tensor<1>, Outputs) {
    let logits = model.forward(inputs.pictures.clone());
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    let loss = loss.forward(logits.clone(), inputs.targets.clone());
    (loss, (logits, inputs.targets.clone()))
}

pub(crate) fn accuracy((logits, labels): Outputs) -> [(&'static str, f64); 1] {
    let right = logits.argmax(1).flatten::<1>(0, 1).equal(labels);
    [("accuracy", right.float().mean().into_scalar())]
}
