//! Against Hugging Face's Trainer, transformers 5.23.0, executed in f64: the cases of a line `w x + b` that is fitted to
//! `y = 2x + 3`, with w = 0.5, b = 0 and sequential batches of 4.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use accelerator::train::{
    CallbackContext, Inputs, IntervalStrategy, LossOutput, LrSchedulerKwargs, LrSchedulerType,
    OptimizerName, ResumeFrom, SaveStrategy, TrainOutput, TrainSamplingStrategy, Trainer,
    TrainerBuilder, TrainerCallback, TrainerControl, TrainingArguments,
};
use accelerator::{Accelerator, Error, Result};

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

/// Trains in f64, on one rank.
fn train(arguments: &TrainingArguments, count: usize) -> (LineTrainer, TrainOutput) {
    let accelerator = arguments
        .accelerator()
        .dtype(FloatDType::F64)
        .build()
        .unwrap();
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
        .filter_map(|entry| Some((entry.step, entry.figures.value(name)?)))
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

fn numbered(values: &[f64]) -> Vec<(u64, f64)> {
    (1..).zip(values.iter().copied()).collect()
}

#[test]
fn an_epoch_with_logs() {
    let (trainer, output) = train(
        &TrainingArguments {
            logging_steps: 2.0,
            ..arguments()
        },
        20,
    );
    assert_close(&logged(&trainer, "loss"), &[(2, 10.33117), (4, 13.219533)]);
    assert_close(&logged(&trainer, "grad_norm")[..1], &[(2, 6.86967)]);
    assert_close(&logged(&trainer, "learning_rate"), &[(2, 0.08), (4, 0.04)]);
    assert_eq!(output.global_step, 5);
    assert!(
        (output.training_loss - 12.591016).abs() < 1e-5,
        "{output:?}"
    );
    assert_weight(&trainer, 0.5903288343515272);
}

#[test]
fn accumulation_with_a_short_last_window() {
    let (trainer, _) = train(
        &TrainingArguments {
            gradient_accumulation_steps: 2,
            logging_steps: 1.0,
            num_train_epochs: 2.0,
            ..arguments()
        },
        20,
    );
    let losses = [
        10.673438, 14.120273, 16.733274, 9.168664, 12.472072, 15.222049,
    ];
    assert_close(&logged(&trainer, "loss"), &numbered(&losses));
    let epochs: Vec<_> = trainer
        .state()
        .log_history
        .iter()
        .map(|x| x.epoch)
        .collect();
    assert_eq!(epochs[..6], [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]);
    assert_weight(&trainer, 0.6401836327597237);
}

#[test]
fn a_tail_that_is_dropped() {
    let (trainer, output) = train(
        &TrainingArguments {
            dataloader_drop_last: true,
            gradient_accumulation_steps: 2,
            logging_steps: 1.0,
            ..arguments()
        },
        22,
    );
    assert_eq!(output.global_step, 3);
    assert_close(
        &logged(&trainer, "loss"),
        &numbered(&[10.513171, 13.543811, 15.988788]),
    );
    assert_weight(&trainer, 0.5680467828226652);
}

#[test]
fn a_number_of_updates_with_evaluations_and_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let (trainer, output) = train(
        &TrainingArguments {
            eval_steps: Some(3.0),
            eval_strategy: IntervalStrategy::Steps,
            logging_steps: 3.0,
            max_steps: 7,
            output_dir: folder.path().into(),
            save_steps: 4.0,
            save_strategy: SaveStrategy::Steps,
            ..arguments()
        },
        20,
    );
    assert_eq!((output.global_step, trainer.state().epoch), (7, 1.4));
    let evaluated = [(3, 11.61229), (6, 10.700348), (7, 10.599487)];
    assert_close(&logged(&trainer, "eval_loss"), &evaluated);
    assert_eq!(checkpoints(folder.path()), [4, 7]);
    assert_weight(&trainer, 0.6274178869400652);
}

#[test]
fn a_fraction_of_an_epoch() {
    let (trainer, _) = train(
        &TrainingArguments {
            eval_strategy: IntervalStrategy::Epoch,
            logging_strategy: IntervalStrategy::Epoch,
            num_train_epochs: 1.5,
            ..arguments()
        },
        20,
    );
    assert_close(
        &logged(&trainer, "eval_loss"),
        &[(5, 10.766524), (8, 10.252871)],
    );
    let steps: Vec<_> = logged(&trainer, "loss").iter().map(|x| x.0).collect();
    assert_eq!(steps, [5, 8]);
    assert_eq!(trainer.state().epoch, 1.6);
    assert_weight(&trainer, 0.6460486367022191);
}

#[test]
fn schedules() {
    let warm = |steps| TrainingArguments {
        logging_steps: 1.0,
        warmup_steps: steps,
        ..arguments()
    };
    let cases = [
        (TrainingArguments { ..warm(3.0) }, 0.7044884941828967),
        (
            TrainingArguments {
                lr_scheduler_type: LrSchedulerType::Cosine,
                ..warm(0.25)
            },
            0.69998178022391,
        ),
        (
            TrainingArguments {
                lr_scheduler_type: LrSchedulerType::ConstantWithWarmup,
                ..warm(4.0)
            },
            0.8722285306547563,
        ),
        (
            TrainingArguments {
                lr_scheduler_kwargs: LrSchedulerKwargs {
                    lr_end: Some(0.01),
                    power: Some(2.0),
                    ..LrSchedulerKwargs::default()
                },
                lr_scheduler_type: LrSchedulerType::Polynomial,
                ..warm(2.0)
            },
            0.6496919411035109,
        ),
    ];
    let mut rates = Vec::new();
    for (arguments, expected) in cases {
        let (trainer, output) = train(&arguments, 40);
        assert_eq!(output.global_step, 10);
        assert_weight(&trainer, expected);
        rates.push(logged(&trainer, "learning_rate"));
    }
    let linear = [0.0, 0.0333333, 0.0666667, 0.1, 0.0857143];
    assert_close(&rates[0][..5], &numbered(&linear));
    let cosine = [
        0.1, 0.0950484, 0.0811745, 0.061126, 0.038874, 0.0188255, 0.00495156,
    ];
    assert_close(&rates[1][3..], &(4..).zip(cosine).collect::<Vec<_>>());
    assert_close(
        &rates[2][..6],
        &numbered(&[0.0, 0.025, 0.05, 0.075, 0.1, 0.1]),
    );
    let polynomial = [
        0.0, 0.05, 0.1, 0.0789062, 0.060625, 0.0451563, 0.0325, 0.0226563, 0.015625, 0.0114062,
    ];
    assert_close(&rates[3], &numbered(&polynomial));
}

#[test]
fn the_first_update_is_logged_where_that_is_asked_for() {
    let (trainer, _) = train(
        &TrainingArguments {
            logging_first_step: true,
            logging_steps: 100.0,
            warmup_steps: 3.0,
            ..arguments()
        },
        40,
    );
    assert_eq!(logged(&trainer, "learning_rate"), [(1, 0.0)]);
    assert_eq!(logged(&trainer, "loss").len(), 1);
}

#[test]
fn intervals_are_shares_below_one() {
    let folder = tempfile::tempdir().unwrap();
    let (trainer, _) = train(
        &TrainingArguments {
            eval_steps: Some(0.25),
            eval_strategy: IntervalStrategy::Steps,
            logging_steps: 0.1,
            num_train_epochs: 2.0,
            output_dir: folder.path().into(),
            save_steps: 0.5,
            save_strategy: SaveStrategy::Steps,
            ..arguments()
        },
        40,
    );
    let steps = |name| {
        logged(&trainer, name)
            .iter()
            .map(|x| x.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(steps("loss"), [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]);
    assert_eq!(steps("eval_loss"), [5, 10, 15, 20]);
    assert_eq!(checkpoints(folder.path()), [10, 20]);
    assert_weight(&trainer, 0.8666721630844448);
}

#[test]
fn norms_and_clipping() {
    for (limit, norms, expected) in [
        (0.5, [6.68791, 9.68203], 0.5239023851124752),
        (0.0, [6.68791, 8.0067], 0.8575225830078125),
    ] {
        let (trainer, _) = train(
            &TrainingArguments {
                logging_steps: 1.0,
                max_grad_norm: limit,
                ..arguments()
            },
            8,
        );
        assert_close(&logged(&trainer, "grad_norm"), &numbered(&norms));
        assert_weight(&trainer, expected);
    }
}

/// Gives an evaluation the metric of a table.
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
        let accelerator = arguments
            .accelerator()
            .dtype(FloatDType::F64)
            .build()
            .unwrap();
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
    for goes_on in [false, true] {
        let accelerator = arguments
            .accelerator()
            .dtype(FloatDType::F64)
            .build()
            .unwrap();
        let mut trainer = builder(&accelerator, &arguments, 40)
            .compute_metrics(told(&[0.1, 0.5, 0.5, 0.6, 0.59, 0.58, 0.9, 0.9, 0.9, 0.9]))
            .build()
            .unwrap();
        let output = trainer.train().unwrap();
        let state = trainer.state();
        assert_eq!(output.global_step, 6, "going on: {goes_on}");
        assert_eq!(
            (state.best_metric, state.best_global_step),
            (Some(0.6), Some(4))
        );
        arguments.resume_from_checkpoint = ResumeFrom::Newest;
    }
}

#[test]
fn a_training_goes_on_where_it_was() {
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
        let accelerator = || {
            arguments
                .accelerator()
                .dtype(FloatDType::F64)
                .build()
                .unwrap()
        };
        let mut undisturbed = builder(&accelerator(), &arguments, 20).build().unwrap();
        undisturbed.train().unwrap();

        std::fs::remove_dir_all(folder.path()).unwrap();
        let mut killed = builder(&accelerator(), &arguments, 20)
            .callback(FailAt(kill_at))
            .build()
            .unwrap();
        assert!(killed.train().unwrap_err().is_other());
        arguments.resume_from_checkpoint = ResumeFrom::Newest;
        let accelerator = arguments
            .accelerator()
            .dtype(FloatDType::F64)
            .build()
            .unwrap();
        let resumed = builder(&accelerator, &arguments, 20).build();
        let mut resumed = match (resumed, kill_at) {
            (Err(error), 1) => {
                assert!(
                    error.to_string().contains("there is no checkpoint"),
                    "{error}"
                );
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

struct FailAt(u64);

impl<M> TrainerCallback<M> for FailAt {
    fn on_step_end(&mut self, at: &CallbackContext<'_, M>, _: &mut TrainerControl) -> Result<()> {
        match at.state.global_step == self.0 {
            true => Err(Error::other("killed")),
            false => Ok(()),
        }
    }
}

/// Hugging Face ends on samples that it repeats, and its evaluation counts them.
#[test]
fn two_ranks_are_exact() {
    let arguments = TrainingArguments {
        eval_strategy: IntervalStrategy::Epoch,
        gradient_accumulation_steps: 2,
        logging_steps: 1.0,
        per_device_eval_batch_size: 2,
        ..arguments()
    };
    let ranks = arguments
        .accelerator()
        .dtype(FloatDType::F64)
        .launch(2, |accelerator| {
            let mut trainer = Trainer::builder(arguments.clone(), line, Points, square_error)
                .accelerator(accelerator)
                .train_dataset(points(22))
                .eval_dataset(points(7))
                .build()?;
            trainer.train()?;
            let loss = logged(&trainer, "loss");
            Ok((
                weight(&trainer),
                loss,
                logged(&trainer, "eval_loss"),
                logged(&trainer, "learning_rate"),
            ))
        });
    for (weight, losses, evaluated, rates) in ranks.unwrap() {
        assert_close(&losses, &numbered(&[12.428461, 17.142662]));
        assert_close(&rates, &numbered(&[0.1, 0.05]));
        assert_close(&evaluated, &[(2, 12.293663)]);
        assert!((weight - 0.5660717739768786).abs() < 1e-12, "{weight}");
    }
}

#[test]
fn a_training_goes_on_at_another_number_of_ranks() {
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
    let undisturbed = first
        .accelerator()
        .dtype(FloatDType::F64)
        .launch(2, |accelerator| {
            let mut trainer = builder(&accelerator, &first, 20)
                .callback(FailAt(6))
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
    // As on one rank all the time.
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

/// Windows of batches with 1, 1 and 2 tokens, and 4.
#[test]
fn losses_over_tokens() {
    let arguments = TrainingArguments {
        gradient_accumulation_steps: 3,
        logging_steps: 1.0,
        lr_scheduler_type: LrSchedulerType::Constant,
        max_grad_norm: 0.0,
        max_steps: 1,
        per_device_train_batch_size: 1,
        ..arguments()
    };
    let accelerator = arguments
        .accelerator()
        .dtype(FloatDType::F64)
        .build()
        .unwrap();
    // The label of each batch, and how many tokens have it.
    let batches = InMemDataset::new(vec![(1.0, 1.0), (1.0, 1.0), (2.0, 2.0)]);
    let mean_of_tokens = |line: &Linear, inputs: &Inputs<'_, PointBatch>| {
        let w = line.weight.val().sum();
        let label = inputs.x.clone().sum();
        let tokens = inputs.y.clone().sum().into_scalar::<f64>() as usize;
        LossOutput::new((w - label).powi_scalar(2)).over(tokens)
    };
    let mut trainer = Trainer::builder(arguments, line, Points, mean_of_tokens)
        .accelerator(accelerator)
        .train_dataset(batches)
        .build()
        .unwrap();
    trainer.train().unwrap();
    // Of four tokens: (2 · 0.5² + 2 · 1.5²) / 4, with the gradient -2 (0.5 + 0.5 + 2 · 1.5) / 4.
    let entry = &trainer.state().log_history[0].figures;
    assert_eq!(
        (entry.value("loss"), entry.value("grad_norm")),
        (Some(1.25), Some(2.0))
    );
}

#[test]
fn an_evaluation_is_delayed_and_comes_at_the_start() {
    let by_steps = TrainingArguments {
        eval_delay: 3.0,
        eval_steps: Some(2.0),
        eval_strategy: IntervalStrategy::Steps,
        ..arguments()
    };
    let (trainer, _) = train(&by_steps, 20);
    let steps = |trainer: &LineTrainer| {
        logged(trainer, "eval_loss")
            .iter()
            .map(|x| x.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(steps(&trainer), [4, 5]);
    let at_start = TrainingArguments {
        eval_on_start: true,
        eval_strategy: IntervalStrategy::Epoch,
        ..arguments()
    };
    let (trainer, _) = train(&at_start, 20);
    assert_eq!(steps(&trainer), [0, 5]);
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
    let predicted = arguments()
        .accelerator()
        .dtype(FloatDType::F64)
        .launch(2, |accelerator| {
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
    let accelerator = arguments
        .accelerator()
        .dtype(FloatDType::F64)
        .build()
        .unwrap();
    let error = builder(&accelerator, &arguments, 20)
        .compute_metrics(|_| [("accuracy", 1.0)])
        .build()
        .unwrap_err();
    assert!(error.is_config());
    assert!(
        error
            .to_string()
            .contains("did you mean \"eval_accuracy\"?"),
        "{error}"
    );
}

#[test]
fn ranks_with_other_arguments_are_told() {
    let errors = arguments()
        .accelerator()
        .dtype(FloatDType::F64)
        .launch(2, |accelerator| {
            let arguments = TrainingArguments {
                learning_rate: [0.1, 0.2][accelerator.rank()],
                ..arguments()
            };
            let built = builder(&accelerator, &arguments, 20).build();
            Ok(built.unwrap_err().to_string())
        });
    for error in errors.unwrap() {
        assert!(error.contains("the arguments of a trainer"), "{error}");
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
