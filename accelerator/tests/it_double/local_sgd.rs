//! Compares local training with the papers' algorithms, written by hand in f64.

use std::sync::atomic::Ordering;

use crate::common::{counted, distance, learner, loader};
use crate::values;
use accelerator::AcceleratorBuilder;
use accelerator::local::Weighting;
use accelerator::prelude::*;
use burn::nn::Linear;
use burn::tensor::FloatDType;

const RATE: f64 = 0.1;
const EPOCHS: u64 = 2;
/// Two ranks have 9 full steps and one in which rank 1 is idle. Three ranks have 6 full steps and one in which ranks 1
/// and 2 are idle.
const SAMPLES: usize = 37;

#[derive(Clone)]
enum Config {
    DiLoCo(DiLoCoConfig),
    Sgd(LocalSgdConfig),
}

fn doubles() -> AcceleratorBuilder {
    Accelerator::builder().dtype(FloatDType::F64)
}

/// The record of a rank's training.
#[derive(Default)]
struct Told {
    /// The samples of this rank in each step.
    seen: Vec<Vec<usize>>,
    /// The outcome of each step, the model after it, and the number of operations.
    steps: Vec<(LocalOutcome, Vec<f64>, usize)>,
    /// The final model, and the number of operations of `finish`.
    end: (Vec<f64>, usize),
}

fn train(ranks: usize, config: &Config) -> Vec<Told> {
    match config {
        Config::DiLoCo(config) => train_with(ranks, |ours, model| config.init(ours, model)),
        Config::Sgd(config) => train_with(ranks, |ours, model| config.init(ours, model)),
    }
}

fn train_with<L: LocalTraining<Linear>>(
    ranks: usize,
    init: impl Fn(&Accelerator, &Linear) -> Result<L> + Send + Sync,
) -> Vec<Told> {
    doubles()
        .launch(ranks, |accelerator| {
            let (mut model, mut optimizer, train) = learner(&accelerator, loader(SAMPLES, 2))?;
            let mut local = init(&accelerator, &model)?;
            let count = counted(&accelerator);
            let operations = || count.load(Ordering::Relaxed);
            let mut told = Told::default();
            for epoch in 0..EPOCHS {
                for batch in train.epoch(epoch) {
                    let batch = batch?;
                    let before = operations();
                    let loss = distance(&model, &batch);
                    let gradients = local.backward(loss, &model, &batch)?;
                    model = optimizer.step(RATE, model, gradients);
                    let idle = optimizer.outcome() == StepOutcome::Idle;
                    assert_eq!(idle, batch.is_idle());
                    let outcome = local.step(&mut model)?;
                    let numbers = if idle { vec![] } else { batch.numbers.clone() };
                    told.seen.push(numbers);
                    told.steps
                        .push((outcome, values(&model), operations() - before));
                }
            }
            assert_eq!(optimizer.steps(), told.steps.len() as u64);
            let before = operations();
            local.finish(&mut model)?;
            told.end = (values(&model), operations() - before);
            Ok(told)
        })
        .unwrap()
}

/// Trains by hand. Returns the models of all ranks after each step, and the final model.
fn by_hand(
    told: &[Told],
    period: usize,
    weighting: Weighting,
    outer: Option<(f64, f64)>,
) -> (Vec<Vec<[f64; 2]>>, [f64; 2]) {
    let ranks = told.len();
    let mut models = vec![[0.5, 0.25]; ranks];
    let (mut theta, mut velocity) = (models[0], [0.0; 2]);
    let mut samples = vec![0.0; ranks];
    let mut after = Vec::new();
    let count = told[0].steps.len();
    for step in 0..count {
        for (rank, [weight, bias]) in models.iter_mut().enumerate() {
            let seen = &told[rank].seen[step];
            let mut sums = [0.0; 2];
            for &number in seen {
                let x = f64::from(number as f32 / 10.0 - 1.0);
                let error = *weight * x + *bias - (3.0 * x - 1.0);
                sums[0] += 2.0 * error * x;
                sums[1] += 2.0 * error;
            }
            if !seen.is_empty() {
                *weight -= RATE * sums[0] / seen.len() as f64;
                *bias -= RATE * sums[1] / seen.len() as f64;
            }
            samples[rank] += seen.len() as f64;
        }
        let in_step = models.clone();
        if (step + 1) % period == 0 || step + 1 == count {
            if weighting == Weighting::Equal {
                samples.fill(1.0);
            }
            let total: f64 = samples.iter().sum();
            for at in 0..2 {
                let pairs = models.iter().zip(&samples);
                let mean = pairs.map(|(model, n)| model[at] * n).sum::<f64>() / total;
                match outer {
                    None => theta[at] = mean,
                    Some((rate, momentum)) => {
                        let gradient = theta[at] - mean;
                        velocity[at] = momentum * velocity[at] + gradient;
                        theta[at] -= rate * (gradient + momentum * velocity[at]);
                    }
                }
            }
            models.fill(theta);
            samples.fill(0.0);
        }
        // `finish` averages the rest after the last step.
        after.push(match (step + 1) % period {
            0 => models.clone(),
            _ => in_step,
        });
    }
    (after, theta)
}

fn assert_near(ours: &[f64], theirs: &[f64]) {
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert!((ours - theirs).abs() <= 1e-12, "{ours} is not {theirs}");
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Compares a training with the one by hand, and checks when it averages and what it sends.
fn check(ranks: usize, period: usize, config: &Config, weighting: Weighting) -> Vec<f64> {
    let outer = match config {
        Config::DiLoCo(_) => Some((0.6, 0.8)),
        Config::Sgd(_) => None,
    };
    let told = train(ranks, config);
    let (after, end) = by_hand(&told, period, weighting, outer);
    let idle = |told: &Told| told.seen.iter().filter(|seen| seen.is_empty()).count();
    assert_eq!(idle(&told[ranks - 1]), if ranks > 1 { 2 } else { 0 });
    for (rank, told) in told.iter().enumerate() {
        for (step, (outcome, model, operations)) in told.steps.iter().enumerate() {
            assert_near(model, &after[step][rank]);
            let full = (step + 1).is_multiple_of(period);
            assert_eq!(*outcome == LocalOutcome::Averaged, full, "step {step}");
            // An average sends the samples of each rank, and one bucket.
            let sent = match (full, ranks, outer) {
                (false, ..) | (true, 1, None) => 0,
                (true, 1, Some(_)) => 1,
                (true, ..) => 2,
            };
            assert_eq!(*operations, sent, "step {step}");
        }
        assert_near(&told.end.0, &end);
    }
    for (step, (outcome, model, _)) in told[0].steps.iter().enumerate() {
        let same = |told: &Told| bits(&told.steps[step].1) == bits(model);
        let all = told.iter().all(same);
        assert_eq!(all, ranks == 1 || *outcome == LocalOutcome::Averaged);
    }
    assert!(
        told.iter()
            .all(|rank| bits(&rank.end.0) == bits(&told[0].end.0))
    );
    told.into_iter().next().unwrap().end.0
}

#[test]
fn local_sgd_is_what_is_written_by_hand() {
    for ranks in [1, 2, 3] {
        for weighting in [Weighting::Samples, Weighting::Equal] {
            let config = LocalSgdConfig::new(4).with_weighting(weighting);
            check(ranks, 4, &Config::Sgd(config), weighting);
        }
    }
}

#[test]
fn diloco_is_what_is_written_by_hand() {
    for ranks in [1, 2, 3] {
        for weighting in [Weighting::Samples, Weighting::Equal] {
            let config = DiLoCoConfig::new(4)
                .with_weighting(weighting)
                .with_outer_rate(0.6)
                .with_outer_momentum(0.8);
            check(ranks, 4, &Config::DiLoCo(config), weighting);
        }
    }
}

#[test]
fn diloco_without_momentum_at_rate_one_is_local_sgd() {
    let plain = DiLoCoConfig::new(3)
        .with_outer_rate(1.0)
        .with_outer_momentum(0.0);
    let diloco = train(3, &Config::DiLoCo(plain));
    let sgd = train(3, &Config::Sgd(LocalSgdConfig::new(3)));
    for (diloco, sgd) in diloco.iter().zip(&sgd) {
        for (diloco, sgd) in diloco.steps.iter().zip(&sgd.steps) {
            assert_near(&diloco.1, &sgd.1);
        }
        assert_near(&diloco.end.0, &sgd.end.0);
    }
    let defaults = train(3, &Config::DiLoCo(DiLoCoConfig::new(3)));
    assert!((defaults[0].end.0[0] - sgd[0].end.0[0]).abs() > 1e-3);
}

/// Trains with or without local training, with accumulation and a ragged tail.
fn synchronous(ranks: usize, accumulation: usize, config: Option<&LocalSgdConfig>) -> Vec<f64> {
    let ends = doubles()
        .accumulation_steps(accumulation)
        .launch(ranks, |accelerator| {
            let (mut model, mut optimizer, train) = learner(&accelerator, loader(SAMPLES, 2))?;
            let mut local = config
                .map(|config| config.init(&accelerator, &model))
                .transpose()?;
            for epoch in 0..EPOCHS {
                for batch in train.epoch(epoch) {
                    let batch = batch?;
                    let loss = distance(&model, &batch);
                    let gradients = match &mut local {
                        Some(local) => local.backward(loss, &model, &batch)?,
                        None => accelerator.backward(loss, &model, &batch)?,
                    };
                    model = optimizer.step(RATE, model, gradients);
                    if let Some(local) = &mut local {
                        local.step(&mut model)?;
                    }
                }
            }
            if let Some(local) = local {
                local.finish(&mut model)?;
            }
            Ok((values(&model), optimizer.steps()))
        })
        .unwrap();
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    ends.into_iter().next().unwrap().0
}

#[test]
fn rounds_of_one_step_are_synchronous_training() {
    for accumulation in [1, 2] {
        for ranks in [2, 3] {
            let wanted = synchronous(ranks, accumulation, None);
            let config = LocalSgdConfig::new(1);
            let found = synchronous(ranks, accumulation, Some(&config));
            assert_near(&found, &wanted);
            // An idle rank with the weight of the others holds the step back.
            let equal = config.with_weighting(Weighting::Equal);
            let held_back = synchronous(ranks, accumulation, Some(&equal));
            assert!((held_back[0] - wanted[0]).abs() > 1e-9);
        }
    }
}

#[test]
fn one_rank_alone_has_the_bits_of_plain_training() {
    for accumulation in [1, 2] {
        let plain = synchronous(1, accumulation, None);
        let local = synchronous(1, accumulation, Some(&LocalSgdConfig::new(4)));
        assert_eq!(bits(&local), bits(&plain));
    }
}
