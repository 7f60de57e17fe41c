//! Compares the losses of a training in half precision with those of the same training in f32.

use std::error::Error;

use accelerator::prelude::*;
use accelerator_examples::{Cnn, CnnConfig, DeviceName, DigitBatcher, Score, Split, cross_entropy};
use burn::module::Module;
use burn::optim::AdamWConfig;
use serde::Serialize;

use crate::outcome::{Outcome, skip_unsupported};
use crate::setting::{self, Computing};

/// The number of successive steps whose losses are averaged before curves are compared.
const WINDOW: usize = 10;
const SEED: u64 = 42;

/// The settings of `loss-curves`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// The kind of device
    #[arg(long, value_enum)]
    device: DeviceName,
    /// The precisions to compare with f32
    #[arg(long, value_enum, value_delimiter = ',', default_value = "bf16,f16")]
    precision: Vec<Computing>,
    /// The number of drawn digits to train on
    #[arg(long, default_value_t = 9600)]
    digits: usize,
    /// The samples in a batch
    #[arg(long, default_value_t = 64)]
    batch_size: usize,
    /// The number of passes over the digits
    #[arg(long, default_value_t = 2)]
    epochs: u64,
    /// The most by which the mean loss of the last quarter, and the accuracy, may be worse than in f32
    #[arg(long, default_value_t = 0.03)]
    tolerance: f64,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Curves {
    measure: &'static str,
    device: String,
    model: &'static str,
    batch_size: usize,
    /// The number of steps that a point of a curve averages.
    window: usize,
    tolerance: f64,
    f32: Training,
    half: Vec<Comparison>,
    passed: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Comparison {
    precision: Computing,
    #[serde(flatten)]
    outcome: Outcome<Half>,
}

#[derive(Clone, Debug, Serialize)]
struct Half {
    #[serde(flatten)]
    training: Training,
    /// The largest distance of a point of the curve from that of f32.
    largest_distance: f64,
    /// The excess of the mean loss of the last quarter of the steps over that of f32.
    end_worse: f64,
    /// The deficit of the accuracy from that of f32.
    accuracy_worse: f64,
    within_tolerance: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Training {
    steps: usize,
    /// The steps skipped because a gradient was not finite.
    skipped_steps: usize,
    /// The loss scale at the end.
    loss_scale: Option<f64>,
    /// The share of right answers on digits that were not trained on.
    accuracy: f64,
    /// The mean loss of the last quarter of the steps.
    end_loss: f64,
    /// The means of the loss over windows of steps.
    curve: Vec<f64>,
}

/// Trains once in each precision.
pub(crate) fn run(args: &Args) -> Result<Curves, Box<dyn Error>> {
    let split = Split::draw(args.digits);
    let whole = train(args, Computing::F32, &split)?;
    let mut half = Vec::new();
    for &precision in &args.precision {
        let trained = skip_unsupported(train(args, precision, &split))?;
        half.push(Comparison {
            precision,
            outcome: match trained {
                Outcome::Measured(training) => {
                    Outcome::Measured(Half::of(training, &whole, args.tolerance))
                }
                Outcome::Skipped { skipped } => Outcome::Skipped { skipped },
            },
        });
    }
    let passed = half
        .iter()
        .filter_map(|half| half.outcome.measured())
        .all(|half| half.within_tolerance);
    Ok(Curves {
        measure: "loss_curves",
        device: args.device.to_string(),
        model: "cnn",
        batch_size: args.batch_size,
        window: WINDOW,
        tolerance: args.tolerance,
        f32: whole,
        half,
        passed,
    })
}

impl Curves {
    /// Returns an error if a curve is not within tolerance.
    pub(crate) fn check(&self) -> Result<(), Box<dyn Error>> {
        if self.passed {
            return Ok(());
        }
        Err("a training in half precision is worse than in f32 by more than the tolerance".into())
    }
}

impl Half {
    fn of(training: Training, whole: &Training, tolerance: f64) -> Self {
        let distances = training.curve.iter().zip(&whole.curve);
        let distances = distances.map(|(half, whole)| (half - whole).abs());
        let end_worse = training.end_loss - whole.end_loss;
        let accuracy_worse = whole.accuracy - training.accuracy;
        Self {
            largest_distance: distances.fold(0.0, f64::max),
            // False for NaN.
            within_tolerance: end_worse <= tolerance && accuracy_worse <= tolerance,
            end_worse,
            accuracy_worse,
            training,
        }
    }
}

fn train(args: &Args, computing: Computing, split: &Split) -> Result<Training, Box<dyn Error>> {
    let accelerator = setting::open(args.device, computing, SEED)?;
    let device = accelerator.device();
    device.seed(SEED);
    let model = CnnConfig::new().with_dropout(0.0).init(&device);
    let train = LoaderBuilder::new(DigitBatcher)
        .batch_size(args.batch_size)
        .shuffle(SEED)
        .build(split.train.clone());
    let test = LoaderBuilder::new(DigitBatcher)
        .batch_size(250)
        .build(split.test.clone());
    let optimizer = AdamWConfig::new().init();
    let (mut model, mut optimizer, train, test) =
        accelerator.prepare((model, optimizer, train, test))?;
    let mut losses = Vec::new();
    let mut skipped_steps = 0;
    for epoch in 0..args.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = accelerator.forward(&model, |model: &Cnn| {
                let logits = model.forward(accelerator.to_working(batch.images.clone()));
                cross_entropy(accelerator.to_full(logits), batch.targets.clone())
            });
            let gradients = accelerator.backward(loss, &model, &batch)?;
            // `None` if the step is skipped.
            losses.push(gradients.loss());
            model = optimizer.step(1e-3, model, gradients);
            if let StepOutcome::Skipped { .. } = optimizer.outcome() {
                skipped_steps += 1;
            }
        }
    }
    let mut score = Score::new();
    let tested = model.valid();
    for batch in test.epoch(0) {
        let batch = batch?;
        let logits = tested.forward(batch.images.clone());
        score.update(logits, batch.targets.clone(), batch.real());
    }
    let loss_scale = accelerator.loss_scale(&model)?;
    accelerator.finish()?;
    let quarter = losses.len() - losses.len() / 4;
    Ok(Training {
        steps: losses.len(),
        skipped_steps,
        loss_scale,
        accuracy: score.accuracy(),
        end_loss: mean(&losses[quarter..]),
        curve: losses.chunks(WINDOW).map(mean).collect(),
    })
}

/// Returns the mean of the known numbers; NaN if there are none.
fn mean(numbers: &[Option<f64>]) -> f64 {
    let known = numbers.iter().flatten();
    known.clone().sum::<f64>() / known.count() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn training(end_loss: f64, accuracy: f64) -> Training {
        Training {
            steps: 20,
            skipped_steps: 0,
            loss_scale: None,
            accuracy,
            end_loss,
            curve: vec![2.0, end_loss],
        }
    }

    #[test]
    fn what_is_worse_or_not_a_number_is_noticed() {
        let whole = training(0.5, 0.9);
        let within = |end_loss, accuracy| {
            Half::of(training(end_loss, accuracy), &whole, 0.03).within_tolerance
        };
        assert!(within(0.52, 0.89) && within(0.4, 0.95));
        assert!(!within(0.54, 0.9) && !within(0.5, 0.86) && !within(f64::NAN, 0.9));
    }
}
