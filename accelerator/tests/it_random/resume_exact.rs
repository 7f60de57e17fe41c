//! A training interrupted after any step and resumed ends with the bits of an uninterrupted one.

use std::path::Path;

use crate::alone;
use crate::common::checkpoints::train_epochs;
use crate::common::{
    Column, ColumnBatcher, assert_error, columns, distance, flat, folder_in_memory, learn, line,
    loader,
};
use accelerator::data::Loader;
use accelerator::metric::Mean;
use accelerator::optim::Scheduled;
use accelerator::prelude::*;
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

#[derive(Debug, Module)]
struct Net {
    input: Linear,
    norm: BatchNorm,
    drop: Dropout,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            input: LinearConfig::new(1, 8).init(device),
            norm: BatchNormConfig::new(8).init(device),
            drop: DropoutConfig::new(0.3).init(),
            output: LinearConfig::new(8, 1).init(device),
        }
    }

    fn loss(&self, batch: &Column) -> Tensor<1> {
        let hidden = self.norm.forward(self.input.forward(batch.values.clone()));
        let output = self.output.forward(self.drop.forward(relu(hidden)));
        (output - batch.values.clone() * 3.0).powi_scalar(2).mean()
    }
}

fn train_loader(samples: usize) -> Loader<Column> {
    LoaderBuilder::new(ColumnBatcher)
        .batch_size(4)
        .shuffle(42)
        .num_workers(2)
        .build(columns(samples))
}

type Parts = (
    Net,
    PreparedOptimizer<Scheduled>,
    PreparedLoader<Column>,
    PreparedLoader<Column>,
    Object<Vec<f64>>,
);

const EPOCHS: u64 = 2;

/// Runs a program to its end. It resumes from `from` and saves at each step into `into`. Returns the weights with
/// running statistics, the notes (losses of validation and norms of gradients), and the last learning rate.
fn program(
    from: Option<&Path>,
    into: Option<&Path>,
    per_epoch: bool,
) -> (Vec<f32>, Vec<f64>, Option<f64>) {
    let accelerator = Accelerator::builder()
        .accumulation_steps(2)
        .seed(7)
        .build()
        .unwrap();
    let model = Net::new(&accelerator.device());
    let scheduler = ExponentialLrSchedulerConfig::new(0.05, 0.9).init().unwrap();
    let optimizer = AdamWConfig::new().init();
    let valid = LoaderBuilder::new(ColumnBatcher)
        .batch_size(8)
        .build(columns(12));
    let optimizer = match per_epoch {
        true => accelerator.prepare((optimizer, PerEpoch(scheduler))),
        false => accelerator.prepare((optimizer, scheduler)),
    };
    let parts = (model, train_loader(22), valid);
    let (model, train, valid) = accelerator.prepare(parts).unwrap();
    let notes = Object(Vec::new());
    let mut parts: Parts = (model, optimizer.unwrap(), train, valid, notes);
    let mut start = 0;
    if let Some(from) = from {
        let position;
        (parts, position) = accelerator.resume(from, parts).unwrap();
        start = position.epoch();
        assert_eq!(position.step(), parts.1.steps());
    }
    let (mut model, mut optimizer, train, valid, Object(mut notes)) = parts;
    for epoch in start..EPOCHS {
        for batch in train.epoch(epoch) {
            let batch = batch.unwrap();
            let mut gradients = accelerator
                .backward(model.loss(&batch), &model, &batch)
                .unwrap();
            notes.extend(gradients.norm());
            model = optimizer.step(model, gradients.clip_norm(5.0));
            if let Some(into) = into
                && optimizer.outcome() != StepOutcome::Accumulated
            {
                let parts = (&model, &optimizer, &train, &valid, Object(&notes));
                accelerator.save_state(into, parts).unwrap();
            }
        }
        let mut mean = Mean::new();
        for batch in valid.epoch(0) {
            let batch = batch.unwrap();
            let loss = model.valid().loss(&batch).into_scalar::<f64>();
            mean.update(loss, batch.num_samples());
        }
        notes.push(mean.value());
        if let Some(into) = into {
            let parts = (&model, &optimizer, &train, &valid, Object(&notes));
            accelerator.save_state(into, parts).unwrap();
        }
    }
    assert_eq!(optimizer.steps(), 3 * EPOCHS);
    (flat(&model.valid()), notes, optimizer.learning_rate())
}

#[test]
fn c17_a_run_resumed_after_any_step_ends_with_the_same_bits() {
    let _alone = alone();
    for per_epoch in [false, true] {
        let folder = folder_in_memory();
        let undisturbed = program(None, None, per_epoch);
        let saving = program(None, Some(folder.path()), per_epoch);
        assert_eq!(saving, undisturbed, "saving changes nothing");
        // There are three steps and the end of the epoch, twice.
        for number in 1..=8 {
            let from = folder.path().join(format!("checkpoint-{number:06}"));
            let resumed = program(Some(&from), None, per_epoch);
            assert_eq!(resumed, undisturbed, "from checkpoint {number}");
        }
    }
}

/// Trains two ranks as threads, without dropout, whose generator they would share.
fn ranks(from: Option<&Path>, into: Option<&Path>, samples: usize) -> Vec<f32> {
    let outcomes = Accelerator::builder()
        .accumulation_steps(2)
        .launch(2, |accelerator| {
            let device = accelerator.device();
            let optimizer = SgdConfig::new()
                .with_momentum(Some(burn::optim::momentum::MomentumConfig::new()))
                .init();
            let parts = (line(&device), optimizer, train_loader(samples));
            let parts = accelerator.prepare(parts)?;
            let (model, optimizer, _) = train_epochs(&accelerator, parts, EPOCHS, from, into)?;
            Ok((flat(&model), optimizer.steps()))
        })
        .unwrap();
    assert_eq!(outcomes[0], outcomes[1]);
    assert_eq!(outcomes[0].1, 2 * EPOCHS);
    outcomes[0].0.clone()
}

#[test]
fn c17_two_ranks_resumed_after_any_step_end_with_the_same_bits() {
    let _alone = alone();
    // With 25 samples in global batches of 8, the last batch leaves rank 1 idle.
    for samples in [25, 28] {
        let folder = folder_in_memory();
        let undisturbed = ranks(None, None, samples);
        assert_eq!(ranks(None, Some(folder.path()), samples), undisturbed);
        for number in 1..=4 {
            let from = folder.path().join(format!("checkpoint-{number:06}"));
            assert_eq!(ranks(Some(&from), None, samples), undisturbed, "{number}");
        }
    }
}

/// A line of a loop over batches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Line {
    Batch,
    Loss,
    Backward,
    Clip,
    Step,
}

const LINES: [Line; 5] = [
    Line::Batch,
    Line::Loss,
    Line::Backward,
    Line::Clip,
    Line::Step,
];

/// Trains over two epochs, or from a checkpoint to the end, and saves once, after a line of the loop in that batch. The
/// loop fetches each batch early, as one that reads ahead does.
fn save_at(
    accelerator: &Accelerator,
    from: Option<&Path>,
    save: Option<(&Path, Line, usize)>,
) -> accelerator::Result<(Vec<f32>, u64)> {
    let scheduler = ExponentialLrSchedulerConfig::new(0.05, 0.9).init().unwrap();
    let optimizer = (AdamWConfig::new().init(), scheduler);
    let parts = (line(&accelerator.device()), optimizer, train_loader(44));
    let mut parts = accelerator.prepare(parts)?;
    let mut start = 0;
    if let Some(from) = from {
        let position;
        (parts, position) = accelerator.resume(from, parts)?;
        start = position.epoch();
        assert_eq!(position.step(), parts.1.steps());
    }
    let (mut model, mut optimizer, train) = parts;
    let mut number = 0;
    for epoch in start..EPOCHS {
        let mut batches = train.epoch(epoch);
        let mut next = batches.next().transpose()?;
        while let Some(batch) = next {
            let at = |line, model: &Linear, optimizer: &PreparedOptimizer<Scheduled>| match save {
                Some((into, asked, asked_number)) if (line, number) == (asked, asked_number) => {
                    let saved = accelerator.save_state(into, (model, optimizer, &train));
                    // A checkpoint in the middle of a window is refused.
                    let refused = |error: &Error| {
                        error.is_misuse() && error.to_string().contains("between optimizer steps")
                    };
                    match saved {
                        Err(error) if refused(&error) => Ok(()),
                        saved => saved.map(drop),
                    }
                }
                _ => Ok(()),
            };
            at(Line::Batch, &model, &optimizer)?;
            let loss = distance(&model, &batch);
            at(Line::Loss, &model, &optimizer)?;
            let gradients = accelerator.backward(loss, &model, &batch)?;
            // The end of the epoch may be seen before its last step.
            next = batches.next().transpose()?;
            at(Line::Backward, &model, &optimizer)?;
            let gradients = gradients.clip_norm(5.0);
            at(Line::Clip, &model, &optimizer)?;
            model = optimizer.step(model, gradients);
            at(Line::Step, &model, &optimizer)?;
            number += 1;
        }
    }
    Ok((flat(&model), optimizer.steps()))
}

#[test]
fn a_checkpoint_is_exact_behind_every_line_of_a_loop() {
    let _alone = alone();
    for (ranks, accumulation) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        let run = |from: Option<&Path>, save: Option<(&Path, Line, usize)>| {
            let ranks = Accelerator::builder()
                .accumulation_steps(accumulation)
                .seed(7)
                .launch(ranks, |accelerator| save_at(&accelerator, from, save));
            ranks.unwrap().remove(0)
        };
        let undisturbed = run(None, None);
        let batches = 44_usize.div_ceil(4 * ranks);
        for line in LINES {
            for number in 0..2 * batches {
                let folder = folder_in_memory();
                let saved = run(None, Some((folder.path(), line, number)));
                assert_eq!(saved, undisturbed);
                let is_refused = folder.path().read_dir().unwrap().next().is_none();
                let done = match line {
                    Line::Batch | Line::Loss => number % batches,
                    Line::Backward | Line::Clip | Line::Step => number % batches + 1,
                };
                let in_window = done % accumulation > 0 && done < batches;
                assert_eq!(is_refused, in_window, "{line:?} of batch {number}");
                if is_refused {
                    continue;
                }
                let resumed = run(Some(folder.path()), None);
                assert_eq!(
                    resumed, undisturbed,
                    "saved behind {line:?} of batch {number}, {ranks} ranks, windows of {accumulation}"
                );
            }
        }
    }
}

/// A line of a loop in which a generator trains against a critic.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum GanLine {
    Batch,
    CriticBackward,
    CriticStep,
    Backward,
    Step,
}

const GAN_LINES: [GanLine; 5] = [
    GanLine::Batch,
    GanLine::CriticBackward,
    GanLine::CriticStep,
    GanLine::Backward,
    GanLine::Step,
];

/// A training of two models against each other.
#[derive(Clone, Copy, Debug)]
struct Gan {
    accumulation: usize,
    /// The generator trains with one batch in `every`.
    every: u64,
    ranks: usize,
}

const GAN: Gan = Gan {
    accumulation: 1,
    every: 1,
    ranks: 1,
};

/// The weights of both models, their numbers of steps, and whether a checkpoint was refused.
#[derive(Clone, Debug, PartialEq)]
struct GanOutcome {
    weights: [Vec<f32>; 2],
    steps: [u64; 2],
    refused: bool,
}

impl Gan {
    /// Trains over two epochs, or from a checkpoint to the end, and saves once, after a line of the loop in the batch
    /// of that epoch and step.
    fn run(self, from: Option<&Path>, save: Option<(&Path, GanLine, (u64, u64))>) -> GanOutcome {
        let ranks = Accelerator::builder()
            .accumulation_steps(self.accumulation)
            .seed(7)
            .launch(self.ranks, |accelerator| {
                self.train(&accelerator, from, save)
            });
        ranks.unwrap().remove(0)
    }

    fn train(
        self,
        accelerator: &Accelerator,
        from: Option<&Path>,
        save: Option<(&Path, GanLine, (u64, u64))>,
    ) -> accelerator::Result<GanOutcome> {
        let device = accelerator.device();
        let adam = || AdamWConfig::new().init();
        let models = (line(&device), line(&device));
        let mut parts =
            accelerator.prepare((models.0, models.1, adam(), adam(), train_loader(44)))?;
        let mut start = 0;
        if let Some(from) = from {
            let position;
            (parts, position) = accelerator.resume(from, parts)?;
            start = position.epoch();
        }
        let (mut generator, mut critic, mut making, mut judging, train) = parts;
        let mut refused = false;
        for epoch in start..EPOCHS {
            for batch in train.epoch(epoch) {
                let batch = batch?;
                let place = (epoch, batch.step());
                macro_rules! at {
                    ($line:expr) => {
                        if let Some((into, asked, there)) = save
                            && ($line, place) == (asked, there)
                        {
                            let parts = (&generator, &critic, &making, &judging, &train);
                            if let Err(error) = accelerator.save_state(into, parts) {
                                let text = error.to_string();
                                assert!(text.contains("between optimizer steps"), "{error:?}");
                                refused = error.is_misuse();
                            }
                        }
                    };
                }
                at!(GanLine::Batch);
                let loss = distance(&critic, &batch);
                let gradients = accelerator.backward(loss, &critic, &batch)?;
                at!(GanLine::CriticBackward);
                critic = judging.step(0.05, critic, gradients);
                at!(GanLine::CriticStep);
                if batch.step() % self.every == self.every - 1 {
                    let judged = critic.forward(batch.values.clone()).detach();
                    let loss = (generator.forward(batch.values.clone()) - judged).powi_scalar(2);
                    let gradients = accelerator.backward(loss.mean(), &generator, &batch)?;
                    at!(GanLine::Backward);
                    generator = making.step(0.05, generator, gradients);
                    at!(GanLine::Step);
                }
            }
        }
        Ok(GanOutcome {
            weights: [flat(&generator), flat(&critic)],
            steps: [making.steps(), judging.steps()],
            refused,
        })
    }
}

#[test]
fn two_models_resume_exactly_from_every_line_of_a_loop_or_their_checkpoint_is_refused() {
    let _alone = alone();
    let each = |ranks, accumulation| Gan {
        accumulation,
        ranks,
        ..GAN
    };
    let now_and_then = Gan { every: 3, ..GAN };
    for gan in [each(1, 1), each(1, 2), each(2, 1), each(2, 2), now_and_then] {
        let undisturbed = gan.run(None, None);
        let batches = 44_u64.div_ceil(4 * gan.ranks as u64);
        let mut saved = 0;
        for line in GAN_LINES {
            for (epoch, step) in
                (0..EPOCHS).flat_map(|epoch| (0..batches).map(move |step| (epoch, step)))
            {
                let trains = step % gan.every == gan.every - 1;
                if !trains && matches!(line, GanLine::Backward | GanLine::Step) {
                    continue;
                }
                let folder = folder_in_memory();
                let place = (epoch, step);
                let outcome = gan.run(None, Some((folder.path(), line, place)));
                let told = format!("behind {line:?} of batch {place:?}, {gan:?}");
                assert_eq!(outcome.weights, undisturbed.weights, "{told}");
                let is_between = trains && matches!(line, GanLine::CriticStep | GanLine::Backward);
                if gan.accumulation == 1 && !is_between {
                    assert!(!outcome.refused, "refused {told}");
                }
                // The interval of the generator's steps is known after two of them, and, if that is not every batch,
                // from its first step of each epoch on.
                let before = step / gan.every;
                let is_known =
                    epoch * (batches / gan.every) + before >= 2 && (gan.every == 1 || before > 0);
                if outcome.refused || (line == GanLine::CriticStep && !is_known) {
                    continue;
                }
                saved += 1;
                assert_eq!(
                    gan.run(Some(folder.path()), None),
                    undisturbed,
                    "saved {told}"
                );
            }
        }
        assert!(saved > batches, "{saved} checkpoints of {gan:?}");
    }
}

/// The loader's checkpoint includes what is known of the models that train on it.
#[test]
fn a_resumed_training_of_two_models_refuses_a_checkpoint_between_them_at_once() {
    let _alone = alone();
    let folder = folder_in_memory();
    GAN.run(None, Some((folder.path(), GanLine::Step, (0, 4))));
    let other = folder_in_memory();
    let save = Some((other.path(), GanLine::CriticStep, (0, 5)));
    assert!(GAN.run(Some(folder.path()), save).refused);
    assert!(other.path().read_dir().unwrap().next().is_none());
}

/// A model that is no longer trained does not delay checkpoints.
#[test]
fn a_model_that_stops_training_hinders_no_checkpoint_of_the_epochs_behind() {
    let _alone = alone();
    let folder = folder_in_memory();
    let accelerator = Accelerator::new().unwrap();
    let device = accelerator.device();
    let sgd = || SgdConfig::new().init();
    let parts = (line(&device), line(&device), sgd(), sgd(), train_loader(24));
    let (mut first, mut second, mut one, mut two, train) = accelerator.prepare(parts).unwrap();
    for epoch in 0..3 {
        for batch in train.epoch(epoch) {
            let batch = batch.unwrap();
            first = learn(&accelerator, first, &mut one, 0.05, &batch).unwrap();
            if epoch == 0 || (epoch == 2 && batch.step() % 2 == 0) {
                second = learn(&accelerator, second, &mut two, 0.05, &batch).unwrap();
            }
            // In the first batch without it, its step might still come.
            if (epoch, batch.step()) != (1, 0) {
                let parts = (&first, &second, &one, &two, &train);
                accelerator.save_state(folder.path(), parts).unwrap();
            }
        }
    }
}

/// Trains with numbers of samples instead of batches as weights. Returns the number of steps and the batches that were
/// seen.
fn bare_counts(
    folder: &Path,
    resume: bool,
    save: impl Fn(u64, u64) -> bool,
) -> accelerator::Result<(u64, Vec<(u64, u64)>)> {
    let accelerator = Accelerator::new()?;
    let model = line(&accelerator.device());
    let sgd = SgdConfig::new().init();
    let mut parts = accelerator.prepare((model, sgd, loader(8, 2), loader(32, 4)))?;
    let mut start = 0;
    if resume {
        let position;
        (parts, position) = accelerator.resume(folder, parts)?;
        start = position.epoch();
    }
    let (mut model, mut optimizer, valid, train) = parts;
    let mut seen = Vec::new();
    for epoch in start..4 {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            seen.push((epoch, batch.step()));
            // Evaluation happens in mid-epoch too.
            if batch.step() == 1 {
                valid
                    .epoch(0)
                    .try_for_each(|batch| batch.map(|batch| assert!(batch.real() > 0)))?;
            }
            let loss = distance(&model, &batch);
            let gradients = accelerator.backward(loss, &model, batch.real())?;
            if save(epoch, 2 * batch.step()) {
                accelerator.save_state(folder, (&model, &optimizer, &valid, &train))?;
            }
            model = optimizer.step(0.01, model, gradients);
            if save(epoch, 2 * batch.step() + 1) {
                accelerator.save_state(folder, (&model, &optimizer, &valid, &train))?;
                break;
            }
        }
        for batch in valid.epoch(0) {
            batch?.real();
        }
    }
    Ok((optimizer.steps(), seen))
}

#[test]
fn with_bare_counts_a_checkpoint_before_the_step_is_refused() {
    let _alone = alone();
    let folder = folder_in_memory();
    let refused = bare_counts(folder.path(), false, |epoch, line| (epoch, line) == (1, 6));
    let refused = refused.unwrap_err();
    let words = ["between optimizer steps", "pass the batch"];
    assert_error(&refused, Error::is_misuse, &words);
}

#[test]
fn with_bare_counts_the_place_is_that_of_the_loader_that_is_read_on() {
    let _alone = alone();
    for epoch in 0..4 {
        let folder = folder_in_memory();
        bare_counts(folder.path(), false, |at, line| (at, line) == (epoch, 7)).unwrap();
        let (steps, seen) = bare_counts(folder.path(), true, |_, _| false).unwrap();
        assert_eq!(
            (steps, seen.first()),
            (32, Some(&(epoch, 4))),
            "saved in {epoch}"
        );
    }
}

/// A program may inspect the gradient's norm over held-out samples.
#[test]
fn gradients_without_a_step_do_not_make_a_loader_the_one_that_is_trained_on() {
    let _alone = alone();
    let folder = folder_in_memory();
    let run = |resume: bool| -> accelerator::Result<u64> {
        let accelerator = Accelerator::new()?;
        let model = line(&accelerator.device());
        let sgd = SgdConfig::new().init();
        let mut parts = accelerator.prepare((model, sgd, loader(8, 2), loader(32, 2)))?;
        let mut start = 0;
        if resume {
            let position;
            (parts, position) = accelerator.resume(folder.path(), parts)?;
            start = position.epoch();
        }
        let (mut model, mut optimizer, valid, train) = parts;
        for epoch in start..3 {
            for batch in train.epoch(epoch) {
                model = learn(&accelerator, model, &mut optimizer, 0.01, &batch?)?;
            }
            for batch in valid.epoch(0) {
                let batch = batch?;
                let loss = distance(&model, &batch);
                let mut gradients = accelerator.backward(loss, &model, &batch)?;
                assert!(gradients.norm().is_some());
            }
            if epoch == 1 && !resume {
                accelerator.save_state(folder.path(), (&model, &optimizer, &valid, &train))?;
                break;
            }
        }
        Ok(optimizer.steps())
    };
    assert_eq!(run(false).unwrap(), 32);
    assert_eq!(run(true).unwrap(), 48);
}
