//! Interrupted after any step and resumed, training ends with the bits of a run that was not.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use std::path::Path;
use std::sync::{Mutex, PoisonError};

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
use common::checkpoints::train_epochs;
use common::{Column, ColumnBatcher, columns, flat, line};

/// Burn's CPU generator is one for the whole process, and every batch that is taken seeds it.
static GENERATOR: Mutex<()> = Mutex::new(());

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
    DataLoaderBuilder::new(ColumnBatcher)
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

/// A program from its start to its end, or to the step at which it is cut off. It resumes from
/// `from`, and saves at each step into `into`. Returns the weights with running statistics, and
/// what it noted on the way: losses of validation, and the norm of each step.
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
    let valid = DataLoaderBuilder::new(ColumnBatcher)
        .batch_size(8)
        .build(columns(12));
    let (train, notes) = (train_loader(22), Object(Vec::new()));
    let (model, optimizer, train, valid) = if per_epoch {
        let parts = (model, (optimizer, PerEpoch(scheduler)), train, valid);
        accelerator.prepare(parts).unwrap()
    } else {
        let parts = (model, (optimizer, scheduler), train, valid);
        accelerator.prepare(parts).unwrap()
    };
    let mut parts: Parts = (model, optimizer, train, valid, notes);
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
            mean.update(loss, batch.len());
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
    let _turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    for per_epoch in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let undisturbed = program(None, None, per_epoch);
        let saving = program(None, Some(folder.path()), per_epoch);
        assert_eq!(saving, undisturbed, "saving changes nothing");
        // Three steps and the end of the epoch, twice.
        for number in 1..=8 {
            let from = folder.path().join(format!("checkpoint-{number:06}"));
            let resumed = program(Some(&from), None, per_epoch);
            assert_eq!(resumed, undisturbed, "from checkpoint {number}");
        }
    }
}

/// Two ranks as threads; without dropout, whose generator they would share.
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
    let _turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    // 25 samples in global batches of 8: the last one leaves rank 1 idle.
    for samples in [25, 28] {
        let folder = tempfile::tempdir().unwrap();
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

/// Trains over two epochs, or from a checkpoint to the end; saves once, behind a line of the loop in that batch.
/// The loop asks for each batch by itself, as one does that reads ahead.
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
                    // In the middle of a window, which is no place for a checkpoint.
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
            let loss = common::distance(&model, &batch);
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
    let _turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
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
                let folder = tempfile::tempdir().unwrap();
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
