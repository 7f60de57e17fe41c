//! Trains a case with our trainer.

use std::path::Path;
use std::sync::{Arc, Mutex};

use accelerator::Result;
use accelerator::train::{
    CallbackContext, Inputs, ResumeFrom, Trainer, TrainerCallback, TrainerControl, TrainerState,
    TrainingArguments,
};
use burn::data::dataset::InMemDataset;
use burn::tensor::Device;
use serde_json::json;

use super::fixture::{Case, Fixture};
use super::models::{Collator, Model, Outputs, Rows, Weights, accuracy, weights_of, with_weights};

/// The logging intervals: those of the case, or each step.
#[derive(Clone, Copy, Eq, PartialEq)]
pub enum Logs {
    AsGiven,
    EachStep,
}

/// The state of a rank at the end.
pub struct Trained {
    pub arguments: TrainingArguments,
    pub state: TrainerState,
    pub weights: Weights,
    /// The steps after which checkpoints were saved. `checkpoints` has those that are left.
    pub saved: Vec<u64>,
    pub checkpoints: Vec<u64>,
}

/// Trains a case on its ranks, and returns the second run if the case resumes.
pub fn train<M: Model>(fixture: &Fixture, case: &Case, logs: Logs) -> Vec<Trained> {
    let folder = tempfile::tempdir().unwrap();
    let each = json!({ "logging_strategy": "steps", "logging_steps": 1 });
    let each = (logs == Logs::EachStep).then(|| each.as_object().unwrap());
    let more: Vec<_> = each.into_iter().collect();
    if logs == Logs::AsGiven {
        println!("== {}", case.name);
    }
    let trained = once::<M>(fixture, case, &case.arguments(folder.path(), &more));
    let Some(resume) = &case.resume else {
        return trained;
    };
    let from = checkpoints(folder.path());
    let from = from.iter().find(|(step, _)| *step == resume.from).unwrap();
    let more: Vec<_> = [&resume.arguments].into_iter().chain(each).collect();
    let mut arguments = case.arguments(folder.path(), &more);
    arguments.resume_from_checkpoint = ResumeFrom::Path(from.1.clone());
    once::<M>(fixture, case, &arguments)
}

fn once<M: Model>(fixture: &Fixture, case: &Case, arguments: &TrainingArguments) -> Vec<Trained> {
    let accelerators = arguments.accelerator().dtype(case.dtype());
    let trained = accelerators.launch(case.world_size, |accelerator| {
        let (weights, of_case) = (fixture.weights(case), case.clone());
        let model = |device: &Device| with_weights(M::new(device), &weights, case.dtype().into());
        let loss = move |model: &M, rows: &Inputs<'_, Rows>| model.loss(rows, &of_case);
        let saves = Saves::default();
        let mut builder = Trainer::builder(
            arguments.clone(),
            model,
            Collator(case.dtype().into()),
            loss,
        )
        .accelerator(accelerator)
        .train_dataset(InMemDataset::new(fixture.train(case)))
        .callback(saves.clone());
        if case.eval > 0 {
            builder = builder.eval_dataset(InMemDataset::new(fixture.eval(case)));
        }
        if let Some(name) = &case.metric {
            builder = builder.compute_metrics(metric(name, &case.metric_values));
        }
        let mut trainer = builder.build()?;
        trainer.train()?;
        let saved = saves.0.lock().unwrap().clone();
        Ok(Trained {
            arguments: arguments.clone(),
            state: trainer.state().clone(),
            weights: weights_of(trainer.model()),
            saved,
            checkpoints: Vec::new(),
        })
    });
    let mut trained = trained.unwrap();
    for trained in &mut trained {
        let checkpoints = checkpoints(&arguments.output_dir);
        trained.checkpoints = checkpoints.into_iter().map(|(step, _)| step).collect();
    }
    trained
}

/// Returns a metric: the accuracy or, if there are `values`, one of them per call. The trainer calls it once before
/// training to learn the names of metrics, which uses up no value.
fn metric(name: &str, values: &[f64]) -> impl Fn(Outputs) -> [(String, f64); 1] + use<> {
    let name = name.to_owned();
    let is_accuracy = values.is_empty();
    let values: Vec<_> = values.iter().take(1).chain(values).copied().collect();
    let values = Mutex::new(values.into_iter());
    move |outputs| {
        let value = match is_accuracy {
            true => accuracy(outputs),
            false => values.lock().unwrap().next().unwrap(),
        };
        [(name.clone(), value)]
    }
}

fn checkpoints(folder: &Path) -> Vec<(u64, std::path::PathBuf)> {
    let Ok(folder) = accelerator_manifest::Folder::open(folder) else {
        return Vec::new();
    };
    let checkpoints = folder.checkpoints().unwrap();
    let described = |x: &accelerator_manifest::Checkpoint| {
        let step = x.manifest().unwrap().metadata.step;
        (step, x.path().to_owned())
    };
    checkpoints.iter().map(described).collect()
}

#[derive(Clone, Default)]
struct Saves(Arc<Mutex<Vec<u64>>>);

impl<M> TrainerCallback<M> for Saves {
    fn on_save(
        &mut self,
        at: &CallbackContext<'_, M>,
        _: &accelerator::checkpoint::Saved,
        _: &mut TrainerControl,
    ) -> Result<()> {
        self.0.lock().unwrap().push(at.state.global_step);
        Ok(())
    }
}
