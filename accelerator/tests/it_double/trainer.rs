//! Tests of the trainer beyond the recorded trainings of Hugging Face's. A line `w x + b` is fitted to `y = 2x + 3`,
//! from w = 0.5, b = 0 in batches of 4.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use accelerator::prelude::{LoaderBuilder, LocalSgdConfig, LocalTraining as _};
use accelerator::train::{
    CallbackContext, Inputs, IntervalStrategy, LrSchedulerType, OptimizerName, ResumeFrom,
    SaveStrategy, TrainOutput, TrainSamplingStrategy, Trainer, TrainerBuilder, TrainerCallback,
    TrainerControl, TrainingArguments,
};
use accelerator::{Accelerator, AcceleratorBuilder, Error, Result};

use crate::common::{assert_contains, assert_error};

#[derive(Clone)]
struct Points;

#[derive(Clone, Debug)]
struct PointBatch {
    x: Tensor<2>,
    y: Tensor<2>,
}

impl Batcher<(f64, f64), PointBatch> for Points {
    fn batch(&self, items: Vec<(f64, f64)>, device: &Device) -> PointBatch {
        let column = |values: Vec<f64>| {
            let shape = [values.len(), 1];
            Tensor::from_data(
                TensorData::new(values, shape),
                (device, burn::tensor::DType::F64),
            )
        };
        PointBatch {
            x: column(items.iter().map(|item| item.0).collect()),
            y: column(items.iter().map(|item| item.1).collect()),
        }
    }
}

fn points(count: usize) -> InMemDataset<(f64, f64)> {
    let x = |i: usize| i as f64 / count as f64;
    InMemDataset::new((0..count).map(|i| (x(i), 2.0 * x(i) + 3.0)).collect())
}

fn line(device: &Device) -> Linear {
    let mut line = LinearConfig::new(1, 1).init(device);
    let data = |value: f64, shape: &[usize]| TensorData::new(vec![value], shape.to_vec());
    let of = burn::tensor::DType::F64;
    line.weight = Param::from_tensor(Tensor::from_data(data(0.5, &[1, 1]), (device, of)));
    line.bias = Some(Param::from_tensor(Tensor::from_data(
        data(0.0, &[1]),
        (device, of),
    )));
    line
}

fn square_error(line: &Linear, inputs: &Inputs<'_, PointBatch>) -> (Tensor<1>, Tensor<2>) {
    let outputs = line.forward(inputs.x.clone());
    let loss = (outputs.clone() - inputs.y.clone()).powi_scalar(2).mean();
    (loss, outputs)
}

type LineBuilder<F> = TrainerBuilder<F, Linear, (f64, f64), PointBatch, Tensor<2>>;
type LineTrainer = Trainer<Linear, (f64, f64), PointBatch, Tensor<2>>;

fn arguments() -> TrainingArguments {
    TrainingArguments {
        learning_rate: 0.1,
        num_train_epochs: 1.0,
        optim: OptimizerName::Sgd,
        per_device_eval_batch_size: 4,
        per_device_train_batch_size: 4,
        save_strategy: SaveStrategy::No,
        train_sampling_strategy: TrainSamplingStrategy::Sequential,
        disable_tqdm: true,
        ..TrainingArguments::default()
    }
}

fn builder(
    accelerator: &Accelerator,
    arguments: &TrainingArguments,
    count: usize,
) -> LineBuilder<impl FnOnce(&Device) -> Linear> {
    Trainer::builder(arguments.clone(), line, Points, square_error)
        .accelerator(accelerator.clone())
        .train_dataset(points(count))
        .eval_dataset(points(8))
}

fn double(arguments: &TrainingArguments) -> AcceleratorBuilder {
    arguments.accelerator().dtype(FloatDType::F64)
}

/// Returns the accelerator of a single rank in f64.
fn alone(arguments: &TrainingArguments) -> Accelerator {
    double(arguments).build().unwrap()
}

/// Trains in f64 on a single rank.
fn train(arguments: &TrainingArguments, count: usize) -> (LineTrainer, TrainOutput) {
    let accelerator = alone(arguments);
    let mut trainer = builder(&accelerator, arguments, count).build().unwrap();
    let output = trainer.train().unwrap();
    (trainer, output)
}

fn weight(trainer: &LineTrainer) -> f64 {
    trainer
        .model()
        .weight
        .val()
        .into_data()
        .iter::<f64>()
        .next()
        .unwrap()
}

fn logged(trainer: &LineTrainer, name: &str) -> Vec<(u64, f64)> {
    let history = trainer.state().log_history.iter();
    history
        .filter_map(|entry| Some((entry.step, entry.metrics.value(name)?)))
        .collect()
}

#[track_caller]
fn assert_close(found: &[(u64, f64)], expected: &[(u64, f64)]) {
    let steps = |pairs: &[(u64, f64)]| pairs.iter().map(|pair| pair.0).collect::<Vec<_>>();
    assert_eq!(steps(found), steps(expected), "{found:?}");
    for (found, expected) in found.iter().zip(expected) {
        let difference = (found.1 - expected.1).abs();
        assert!(
            difference <= 1e-6 * expected.1.abs().max(1.0),
            "{found:?}, not {expected:?}"
        );
    }
}

#[track_caller]
fn assert_weight(trainer: &LineTrainer, expected: f64) {
    let found = weight(trainer);
    assert!((found - expected).abs() < 1e-12, "{found}, not {expected}");
}

/// Returns a metric that takes its values from a table.
fn told(values: &'static [f64]) -> impl Fn(Tensor<2>) -> [(&'static str, f64); 1] {
    let count = Arc::new(Mutex::new(0));
    move |_| {
        let mut count = count.lock().unwrap();
        // The first call is the check for the metric's name.
        *count += 1;
        [("acc", values[(*count - 2_i32).max(0) as usize])]
    }
}

#[test]
fn the_best_checkpoint_is_kept_and_loaded() {
    for (limit, kept) in [(2, vec![2, 6]), (1, vec![2, 6])] {
        let folder = tempfile::tempdir().unwrap();
        let arguments = TrainingArguments {
            eval_steps: Some(1.0),
            eval_strategy: IntervalStrategy::Steps,
            load_best_model_at_end: true,
            metric_for_best_model: Some("acc".to_owned()),
            output_dir: folder.path().into(),
            save_steps: 1.0,
            save_strategy: SaveStrategy::Steps,
            save_total_limit: Some(limit),
            ..arguments()
        };
        let accelerator = alone(&arguments);
        let mut trainer = builder(&accelerator, &arguments, 24)
            .compute_metrics(told(&[0.1, 0.5, 0.3, 0.2, 0.4, 0.45]))
            .build()
            .unwrap();
        trainer.train().unwrap();
        let state = trainer.state();
        assert_eq!(
            (state.best_metric, state.best_global_step),
            (Some(0.5), Some(2))
        );
        assert_eq!(checkpoints(folder.path()), kept, "limit {limit}");
        assert_weight(&trainer, 0.5250342238704195);
    }
}

/// Trains with an evaluation after every second update, whose metrics are `values`.
fn train_with_metrics(
    arguments: &TrainingArguments,
    values: &'static [f64],
    callback: At,
) -> LineTrainer {
    let accelerator = alone(arguments);
    let mut trainer = builder(&accelerator, arguments, 40)
        .compute_metrics(told(values))
        .callback(callback)
        .build()
        .unwrap();
    trainer.train().unwrap();
    trainer
}

fn best_of(trainer: &LineTrainer) -> (Option<f64>, Option<u64>, Option<u64>) {
    let state = trainer.state();
    let checkpoint = state.best_model_checkpoint.as_ref();
    let step = checkpoint.map(|path| {
        let checkpoint = accelerator_manifest::Checkpoint::at(path).unwrap();
        checkpoint.manifest().unwrap().metadata.step
    });
    (state.best_metric, state.best_global_step, step)
}

fn by_metric(folder: &Path) -> TrainingArguments {
    TrainingArguments {
        eval_steps: Some(2.0),
        eval_strategy: IntervalStrategy::Steps,
        load_best_model_at_end: true,
        lr_scheduler_type: LrSchedulerType::Constant,
        metric_for_best_model: Some("acc".to_owned()),
        output_dir: folder.into(),
        save_steps: 2.0,
        save_strategy: SaveStrategy::Steps,
        ..arguments()
    }
}

/// A callback that does something after an update.
struct At(u64, fn(&mut TrainerControl) -> Result<()>);

impl<M> TrainerCallback<M> for At {
    fn on_step_end(
        &mut self,
        at: &CallbackContext<'_, M>,
        control: &mut TrainerControl,
    ) -> Result<()> {
        match at.state.global_step == self.0 {
            true => (self.1)(control),
            false => Ok(()),
        }
    }
}

const IDLE: At = At(u64::MAX, |_| Ok(()));

/// Saves after that update, whatever the strategy.
fn save_at(update: u64) -> At {
    At(update, |control| {
        control.should_save = true;
        Ok(())
    })
}

fn stop_at(update: u64) -> At {
    At(update, |control| {
        control.should_training_stop = true;
        Ok(())
    })
}

fn fail_at(update: u64) -> At {
    At(update, |_| Err(Error::other("killed")))
}

#[test]
fn an_evaluation_between_saves_is_not_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = TrainingArguments {
        save_steps: 4.0,
        save_total_limit: Some(2),
        ..by_metric(folder.path())
    };
    let trainer = train_with_metrics(&arguments, &[0.9, 0.5, 0.8, 0.6, 0.4], IDLE);
    assert_eq!(best_of(&trainer), (Some(0.6), Some(8), Some(8)));
    assert_eq!(checkpoints(folder.path()), [8, 10]);
    let elsewhere = tempfile::tempdir().unwrap();
    let until_8 = TrainingArguments {
        max_steps: 8,
        ..by_metric(elsewhere.path())
    };
    let until_8 = train_with_metrics(&until_8, &[0.1, 0.2, 0.3, 0.4], IDLE);
    assert_eq!(weight(&trainer).to_bits(), weight(&until_8).to_bits());
}

/// The epoch is evaluated after its last update was saved.
#[test]
fn an_evaluation_of_an_update_that_was_saved_before_counts() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = TrainingArguments {
        eval_steps: None,
        eval_strategy: IntervalStrategy::Epoch,
        load_best_model_at_end: false,
        num_train_epochs: 3.0,
        save_steps: 5.0,
        save_total_limit: Some(2),
        ..by_metric(folder.path())
    };
    let trainer = train_with_metrics(&arguments, &[0.9, 0.5, 0.8], IDLE);
    assert_eq!(best_of(&trainer), (Some(0.9), Some(10), Some(10)));
    assert_eq!(checkpoints(folder.path()), [10, 30]);
}

#[test]
fn a_best_without_a_checkpoint_does_not_outdo_those_with_one() {
    let folder = tempfile::tempdir().unwrap();
    let without = TrainingArguments {
        load_best_model_at_end: false,
        max_steps: 4,
        save_strategy: SaveStrategy::No,
        ..by_metric(folder.path())
    };
    let trainer = train_with_metrics(&without, &[0.9, 0.1], save_at(3));
    assert_eq!(best_of(&trainer), (Some(0.9), Some(2), None));
    let with = TrainingArguments {
        resume_from_checkpoint: ResumeFrom::Newest,
        ..by_metric(folder.path())
    };
    let trainer = train_with_metrics(&with, &[0.3, 0.4, 0.2, 0.1], IDLE);
    assert_eq!(best_of(&trainer), (Some(0.4), Some(6), Some(6)));
}

#[test]
fn checkpoints_without_frozen_parameters_resume_and_have_the_best_model() {
    let run = |save_without_frozen: bool| {
        let folder = tempfile::tempdir().unwrap();
        let mut arguments = TrainingArguments {
            max_steps: 4,
            save_without_frozen,
            ..by_metric(folder.path())
        };
        let mut trained = Vec::new();
        for (updates, values) in [(4, &[0.1, 0.5][..]), (8, &[0.9, 0.2])] {
            let frozen = |device: &Device| {
                let mut line = line(device);
                line.bias = line.bias.map(|bias| bias.set_require_grad(false));
                line
            };
            arguments.max_steps = updates;
            let mut trainer = Trainer::builder(arguments.clone(), frozen, Points, square_error)
                .accelerator(alone(&arguments))
                .train_dataset(points(40))
                .eval_dataset(points(8))
                .compute_metrics(told(values))
                .build()
                .unwrap();
            trainer.train().unwrap();
            trained.push(weight(&trainer).to_bits());
            arguments.resume_from_checkpoint = ResumeFrom::Newest;
        }
        let model = folder.path().join("checkpoint-000004/model.safetensors");
        let bytes = std::fs::read(model).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        (trained, file.tensor("bias").is_ok())
    };
    let (whole, left_out) = (run(false), run(true));
    assert_eq!((whole.1, left_out.1), (true, false));
    assert_eq!(whole.0, left_out.0);
}

#[cfg(unix)]
#[test]
fn the_best_checkpoint_stays_where_its_folder_is_spelt_otherwise_or_moved() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("out");
    let first = TrainingArguments {
        max_steps: 6,
        save_total_limit: Some(2),
        ..by_metric(&folder)
    };
    let trainer = train_with_metrics(&first, &[0.1, 0.9, 0.2], IDLE);
    assert_eq!(checkpoints(&folder), [4, 6]);
    let best = weight(&trainer);

    let link = outer.path().join("link");
    std::os::unix::fs::symlink(&folder, &link).unwrap();
    let moved = outer.path().join("moved");
    for (updates, path) in [(8, &link), (10, &moved), (12, &moved.join("../moved"))] {
        if updates == 10 {
            std::fs::rename(&folder, &moved).unwrap();
        }
        let next = TrainingArguments {
            max_steps: updates,
            output_dir: path.clone(),
            resume_from_checkpoint: ResumeFrom::Newest,
            ..first.clone()
        };
        let trainer = train_with_metrics(&next, &[0.3, 0.3], IDLE);
        assert_eq!(best_of(&trainer), (Some(0.9), Some(4), Some(4)));
        assert_eq!(checkpoints(path), [4, updates as u64]);
        assert_eq!(weight(&trainer).to_bits(), best.to_bits());
    }
}

/// Copies a checkpoint as earlier versions saved it: its state names the previous best checkpoint although it is itself
/// the best.
fn as_saved_before(checkpoint: &Path, best: &Path, folder: &Path) {
    let checkpoint = accelerator_manifest::Checkpoint::at(checkpoint).unwrap();
    let manifest = checkpoint.manifest().unwrap();
    let folder = accelerator_manifest::Folder::create(folder).unwrap();
    let mut draft = folder.begin(0).unwrap();
    for (name, entry) in &manifest.files {
        let mut bytes = checkpoint.read(name).unwrap();
        if name.as_str().starts_with("object") {
            let mut state: ciborium::Value = ciborium::from_reader(&bytes[..]).unwrap();
            let fields = state.as_map_mut().unwrap();
            fields.retain(|(name, _)| name.as_text() != Some("best_is_beside"));
            let is_path = |name: &ciborium::Value| name.as_text() == Some("best_model_checkpoint");
            let path = fields.iter_mut().find(|(name, _)| is_path(name)).unwrap();
            path.1 = best.to_str().unwrap().into();
            bytes.clear();
            ciborium::into_writer(&state, &mut bytes).unwrap();
        }
        draft.write_bytes(name, entry.role, &bytes).unwrap();
    }
    draft.commit(manifest.metadata.clone()).unwrap();
}

#[test]
fn a_checkpoint_of_a_version_before_is_the_best_if_its_update_is() {
    let outer = tempfile::tempdir().unwrap();
    let (folder, old) = (outer.path().join("new"), outer.path().join("old"));
    let first = TrainingArguments {
        max_steps: 4,
        ..by_metric(&folder)
    };
    let best = weight(&train_with_metrics(&first, &[0.1, 0.9], IDLE));
    let [before, newest] = ["checkpoint-000001", "checkpoint-000002"].map(|x| folder.join(x));
    as_saved_before(&newest, &before, &old);
    let next = TrainingArguments {
        max_steps: 6,
        output_dir: old.clone(),
        resume_from_checkpoint: ResumeFrom::Newest,
        ..first
    };
    let trainer = train_with_metrics(&next, &[0.3], IDLE);
    assert_eq!(best_of(&trainer), (Some(0.9), Some(4), Some(4)));
    assert_eq!(weight(&trainer).to_bits(), best.to_bits());
}

/// Training continues in another folder, while the best checkpoint is in the first.
#[test]
fn a_best_checkpoint_of_another_folder_is_loaded_from_there() {
    let outer = tempfile::tempdir().unwrap();
    let first = TrainingArguments {
        max_steps: 6,
        ..by_metric(&outer.path().join("first"))
    };
    let best = weight(&train_with_metrics(&first, &[0.9, 0.1, 0.2], IDLE));
    let newest = outer.path().join("first/checkpoint-000003");
    let second = TrainingArguments {
        max_steps: 14,
        output_dir: outer.path().join("second"),
        resume_from_checkpoint: ResumeFrom::Path(newest),
        save_total_limit: Some(1),
        ..first.clone()
    };
    for from in [second.resume_from_checkpoint.clone(), ResumeFrom::Newest] {
        let next = TrainingArguments {
            resume_from_checkpoint: from,
            ..second.clone()
        };
        let trainer = train_with_metrics(&next, &[0.3, 0.3, 0.3, 0.3], IDLE);
        assert_eq!(best_of(&trainer), (Some(0.9), Some(2), Some(2)));
        assert_eq!(weight(&trainer).to_bits(), best.to_bits());
        assert_eq!(checkpoints(&second.output_dir), [14]);
    }
}

#[test]
fn the_evaluation_on_start_is_compared_with_nothing() {
    for save_strategy in [SaveStrategy::Steps, SaveStrategy::Best] {
        let folder = tempfile::tempdir().unwrap();
        let arguments = TrainingArguments {
            early_stopping_patience: Some(2),
            eval_on_start: true,
            max_steps: 8,
            save_strategy,
            ..by_metric(folder.path())
        };
        let trainer = train_with_metrics(&arguments, &[0.9, 0.1, 0.2, 0.8, 0.3], IDLE);
        assert_eq!(best_of(&trainer), (Some(0.8), Some(6), Some(6)));
        let evaluated: Vec<_> = logged(&trainer, "eval_acc");
        assert_eq!(
            evaluated,
            [(0, 0.9), (2, 0.1), (4, 0.2), (6, 0.8), (8, 0.3)]
        );
    }
}

/// Training stops within an epoch of five updates, at its end, or at the end of all.
#[test]
fn a_training_that_stopped_within_an_epoch_continues_it() {
    for update in [3, 5, 10] {
        let folder = tempfile::tempdir().unwrap();
        let mut arguments = TrainingArguments {
            eval_strategy: IntervalStrategy::Epoch,
            num_train_epochs: 2.0,
            output_dir: folder.path().into(),
            save_strategy: SaveStrategy::Epoch,
            train_sampling_strategy: TrainSamplingStrategy::Random,
            ..arguments()
        };
        let (undisturbed, _) = train(
            &TrainingArguments {
                save_strategy: SaveStrategy::No,
                ..arguments.clone()
            },
            20,
        );
        let stopping = |arguments: &TrainingArguments| {
            let accelerator = alone(arguments);
            builder(&accelerator, arguments, 20)
                .callback(stop_at(update))
                .build()
                .unwrap()
        };
        // Training resumes in the same process and in another one.
        let mut stopped = stopping(&arguments);
        assert_eq!(stopped.train().unwrap().global_step, update);
        assert_eq!(checkpoints(folder.path()).last(), Some(&update));
        arguments.resume_from_checkpoint = ResumeFrom::Newest;
        let (resumed, output) = train(&arguments, 20);
        assert_eq!(output.global_step, 10, "{update}");
        assert_eq!(weight(&resumed).to_bits(), weight(&undisturbed).to_bits());

        let again = TrainingArguments {
            output_dir: folder.path().join("again"),
            resume_from_checkpoint: ResumeFrom::No,
            ..arguments.clone()
        };
        let mut stopped = stopping(&again);
        stopped.train().unwrap();
        stopped.train().unwrap();
        assert_eq!(weight(&stopped).to_bits(), weight(&undisturbed).to_bits());

        let mut expected = vec![5, 10];
        if update == 3 {
            // The evaluation where it stopped counts too.
            expected.insert(0, 3);
        }
        for trainer in [&resumed, &stopped] {
            let evaluated = logged(trainer, "eval_loss");
            let steps: Vec<_> = evaluated.iter().map(|entry| entry.0).collect();
            assert_eq!(steps, expected, "{update}");
        }
    }
}

#[test]
fn an_early_stop() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = TrainingArguments {
        early_stopping_patience: Some(2),
        eval_steps: Some(1.0),
        eval_strategy: IntervalStrategy::Steps,
        metric_for_best_model: Some("acc".to_owned()),
        output_dir: folder.path().into(),
        save_steps: 1.0,
        save_strategy: SaveStrategy::Steps,
        ..arguments()
    };
    for continues in [false, true] {
        let values = &[0.1, 0.5, 0.5, 0.6, 0.59, 0.58, 0.9, 0.9, 0.9, 0.9];
        let trainer = train_with_metrics(&arguments, values, IDLE);
        let state = trainer.state();
        assert_eq!(state.global_step, 6, "continuing: {continues}");
        assert_eq!(
            (state.best_metric, state.best_global_step),
            (Some(0.6), Some(4))
        );
        arguments.resume_from_checkpoint = ResumeFrom::Newest;
    }
}

#[test]
fn a_training_continues_where_it_was() {
    for kill_at in 1..=14 {
        let folder = tempfile::tempdir().unwrap();
        let mut arguments = TrainingArguments {
            eval_steps: Some(5.0),
            eval_strategy: IntervalStrategy::Steps,
            logging_steps: 4.0,
            num_train_epochs: 3.0,
            output_dir: folder.path().into(),
            save_steps: 1.0,
            save_strategy: SaveStrategy::Steps,
            train_sampling_strategy: TrainSamplingStrategy::Random,
            ..arguments()
        };
        let (undisturbed, _) = train(&arguments, 20);

        std::fs::remove_dir_all(folder.path()).unwrap();
        let mut killed = builder(&alone(&arguments), &arguments, 20)
            .callback(fail_at(kill_at))
            .build()
            .unwrap();
        assert!(killed.train().unwrap_err().is_other());
        arguments.resume_from_checkpoint = ResumeFrom::Newest;
        let accelerator = alone(&arguments);
        let resumed = builder(&accelerator, &arguments, 20).build();
        let mut resumed = match (resumed, kill_at) {
            (Err(error), 1) => {
                assert_contains(&error.to_string(), &["there is no checkpoint"]);
                continue;
            }
            (resumed, _) => resumed.unwrap(),
        };
        assert_eq!(resumed.state().global_step, kill_at - 1);
        resumed.train().unwrap();
        assert_eq!(weight(&resumed).to_bits(), weight(&undisturbed).to_bits());
        for name in ["loss", "eval_loss", "learning_rate", "train_loss"] {
            assert_eq!(
                logged(&resumed, name),
                logged(&undisturbed, name),
                "{name} {kill_at}"
            );
        }
    }
}

#[test]
fn a_training_that_begins_leaves_the_checkpoints_of_another_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = TrainingArguments {
        output_dir: folder.path().into(),
        resume_from_checkpoint: ResumeFrom::Auto,
        save_strategy: SaveStrategy::Epoch,
        ..arguments()
    };
    // There is no checkpoint yet.
    train(&arguments, 20);
    let accelerator = alone(&arguments);
    arguments.resume_from_checkpoint = ResumeFrom::No;
    let refused = builder(&accelerator, &arguments, 20).build().unwrap_err();
    assert_error(
        &refused,
        Error::is_config,
        &["checkpoints of another training"],
    );
    assert_eq!(checkpoints(folder.path()), [5]);
    arguments.num_train_epochs = 2.0;
    arguments.resume_from_checkpoint = ResumeFrom::Auto;
    let (_, output) = train(&arguments, 20);
    assert_eq!(output.global_step, 10);
}

#[test]
fn a_best_checkpoint_that_is_gone_fails_before_the_first_update() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = TrainingArguments {
        eval_strategy: IntervalStrategy::Epoch,
        // The first checkpoint is the best.
        greater_is_better: Some(true),
        load_best_model_at_end: true,
        num_train_epochs: 2.0,
        output_dir: folder.path().into(),
        save_strategy: SaveStrategy::Epoch,
        ..arguments()
    };
    let (trainer, _) = train(&arguments, 20);
    let best = trainer.state().best_model_checkpoint.clone().unwrap();
    assert_eq!(trainer.state().best_global_step, Some(5));
    std::fs::remove_dir_all(best).unwrap();
    arguments.resume_from_checkpoint = ResumeFrom::Newest;
    let accelerator = alone(&arguments);
    let error = builder(&accelerator, &arguments, 20).build().unwrap_err();
    assert_contains(&error.to_string(), &["load_best_model_at_end"]);
}

/// Ranks step on their own, and logs, evaluations and checkpoints describe their average.
#[test]
fn local_sgd_has_the_bits_of_a_loop_by_hand() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = TrainingArguments {
        eval_strategy: IntervalStrategy::Epoch,
        local_sgd_steps: Some(2),
        logging_strategy: IntervalStrategy::Epoch,
        lr_scheduler_type: LrSchedulerType::Constant,
        num_train_epochs: 2.0,
        output_dir: folder.path().into(),
        save_strategy: SaveStrategy::Epoch,
        ..arguments()
    };
    // An epoch has three steps, the last one with two samples, and an average ends it.
    let by_hand = double(&arguments).launch(2, |accelerator| {
        let model = accelerator.init(line);
        let train = LoaderBuilder::new(Points).batch_size(4).build(points(18));
        let optimizer = burn::optim::SgdConfig::new().init();
        let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
        let mut local = LocalSgdConfig::new(2).init(&accelerator, &model)?;
        for epoch in 0..2 {
            for batch in train.epoch(epoch) {
                let batch = batch?;
                let outputs = model.forward(batch.x.clone());
                let loss = (outputs - batch.y.clone()).powi_scalar(2).mean();
                let gradients = local.backward(loss, &model, &batch)?.clip_norm(1.0);
                model = optimizer.step(0.1, model, gradients);
                local.step(&mut model)?;
            }
            local.average(&mut model)?;
        }
        Ok(model.weight.val().into_data())
    });
    let by_arguments = double(&arguments).launch(2, |accelerator| {
        let mut trainer = builder(&accelerator, &arguments, 18).build()?;
        let output = trainer.train()?;
        assert_eq!(output.global_step, 6);
        let losses = [logged(&trainer, "loss"), logged(&trainer, "eval_loss")];
        Ok((trainer.model().weight.val().into_data(), losses))
    });
    let (by_hand, by_arguments) = (by_hand.unwrap(), by_arguments.unwrap());
    assert_eq!(by_arguments[0], by_arguments[1]);
    assert_eq!(by_arguments[0].0, by_hand[0]);
    let [losses, evaluated] = &by_arguments[0].1;
    assert!(
        losses[1].1 < losses[0].1 && evaluated[1].1 < evaluated[0].1,
        "{losses:?} {evaluated:?}"
    );
    assert_eq!(checkpoints(folder.path()), [3, 6]);
}

#[test]
fn a_training_continues_at_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let first = TrainingArguments {
        logging_steps: 1.0,
        max_steps: 8,
        output_dir: folder.path().into(),
        per_device_train_batch_size: 2,
        save_steps: 4.0,
        save_strategy: SaveStrategy::Steps,
        ..arguments()
    };
    let undisturbed = double(&first).launch(2, |accelerator| {
        let mut trainer = builder(&accelerator, &first, 20)
            .callback(fail_at(6))
            .build()?;
        trainer.train().unwrap_err();
        Ok(logged(&trainer, "loss"))
    });
    assert_eq!(undisturbed.unwrap()[0].len(), 5);
    let (alone, output) = train(
        &TrainingArguments {
            resume_from_checkpoint: ResumeFrom::Newest,
            ..first.clone()
        },
        20,
    );
    assert_eq!((output.global_step, alone.state().epoch), (8, 1.6));
    // The result is that of one rank all the time.
    let (whole, _) = train(
        &TrainingArguments {
            output_dir: folder.path().join("whole"),
            per_device_train_batch_size: 4,
            ..first
        },
        20,
    );
    assert_close(&logged(&alone, "loss"), &logged(&whole, "loss"));
    assert_weight(&alone, weight(&whole));
}

#[test]
fn no_update_trains_nothing() {
    let (trainer, output) = train(
        &TrainingArguments {
            max_steps: 0,
            ..arguments()
        },
        20,
    );
    assert_eq!((output.global_step, weight(&trainer)), (0, 0.5));
}

#[test]
fn predictions_come_in_the_order_of_the_data_set() {
    let predicted = double(&arguments()).launch(2, |accelerator| {
        let trainer = builder(&accelerator, &arguments(), 20).build()?;
        let output = trainer.predict(points(7))?;
        let predictions = output
            .predictions
            .map(|x| x.into_data().iter::<f64>().collect::<Vec<_>>());
        Ok((predictions, output.metrics.value("test_loss")))
    });
    let expected: Vec<_> = (0..7).map(|i| 0.5 * f64::from(i) / 7.0).collect();
    for (predictions, loss) in predicted.unwrap() {
        assert_eq!(predictions, Some(expected.clone()));
        assert!(loss.is_some());
    }
}

#[test]
fn a_metric_that_is_not_there_fails_before_the_first_update() {
    let arguments = TrainingArguments {
        eval_strategy: IntervalStrategy::Epoch,
        metric_for_best_model: Some("acuracy".to_owned()),
        ..arguments()
    };
    let accelerator = alone(&arguments);
    let error = builder(&accelerator, &arguments, 20)
        .compute_metrics(|_| [("accuracy", 1.0)])
        .build()
        .unwrap_err();
    let words = ["did you mean \"eval_accuracy\"?"];
    assert_error(&error, Error::is_config, &words);
}

#[test]
fn ranks_with_other_arguments_are_told() {
    let errors = double(&arguments()).launch(2, |accelerator| {
        let arguments = TrainingArguments {
            learning_rate: [0.1, 0.2][accelerator.rank()],
            ..arguments()
        };
        let built = builder(&accelerator, &arguments, 20).build();
        Ok(built.unwrap_err().to_string())
    });
    for error in errors.unwrap() {
        assert_contains(&error, &["`learning_rate` differs between ranks"]);
    }
}

#[test]
fn averaged_weights_are_evaluated_and_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut arguments = TrainingArguments {
        ema_decay: Some(0.5),
        eval_strategy: IntervalStrategy::Epoch,
        load_best_model_at_end: true,
        num_train_epochs: 2.0,
        output_dir: folder.path().into(),
        save_strategy: SaveStrategy::Epoch,
        ..arguments()
    };
    let (trainer, _) = train(&arguments, 20);
    let averaged = trainer.averaged_model().unwrap().weight.val().into_data();
    assert_ne!(averaged, trainer.model().weight.val().into_data());
    arguments.resume_from_checkpoint = ResumeFrom::Newest;
    let (resumed, _) = train(&arguments, 20);
    assert_eq!(
        resumed.averaged_model().unwrap().weight.val().into_data(),
        averaged
    );
}

fn checkpoints(folder: &Path) -> Vec<u64> {
    let folder = accelerator_manifest::Folder::open(folder).unwrap();
    let checkpoints = folder.checkpoints().unwrap();
    let step = |x: &accelerator_manifest::Checkpoint| x.manifest().unwrap().metadata.step;
    checkpoints.iter().map(step).collect()
}
