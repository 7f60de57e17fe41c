//! A small training program for schedules of faults. It saves checkpoints, and continues from the last good one when it
//! is restarted.
//!
//! `tests/it/chaos` runs it on this host, and `tests/hosts/schedules` on several.

use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use accelerator_collective::{DType, GroupOptions, Launch, ProcessGroup, ReduceOp};
use accelerator_fault::{Point, fail_point};
use accelerator_manifest::{FileName, Folder, Metadata, Role, VerifyLevel};
use accelerator_plan::{BatchSize, Order, Plan, PlanConfig, PlannedBatch};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A rank of the training.
#[derive(Debug, Parser)]
struct Arguments {
    /// The folder of its checkpoints and its final weights.
    folder: PathBuf,

    /// Seconds for which it waits for other ranks.
    #[arg(long, default_value_t = 60)]
    limit: u64,

    /// Milliseconds for which it pauses before each step, so that faults from outside strike while it runs.
    #[arg(long, default_value_t = 0)]
    pause: u64,

    /// The way in which it breaks the training on purpose.
    #[arg(long)]
    sabotage: Option<Sabotage>,
}

/// A defect that a judge of schedules must notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sabotage {
    /// Every attempt aborts.
    Crash,
    /// A restarted attempt changes one bit of the weights.
    Wrong,
}

/// The steps of a run without faults: 24.
const STEPS: u64 = EPOCHS * SAMPLES / BATCH;

/// The number of steps from one checkpoint to the next.
const SAVE_EVERY: u64 = 4;

const EPOCHS: u64 = 2;
const SAMPLES: u64 = 96;
const BATCH: u64 = 8;
const RATE: f64 = 0.05;
const SEED: u64 = 11;

fn main() -> ExitCode {
    match train(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut text = error.to_string();
            let mut source = error.source();
            while let Some(cause) = source {
                text += &format!(": {cause}");
                source = cause.source();
            }
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}

fn train(arguments: &Arguments) -> Result<()> {
    let launch = Launch::from_env()?;
    if arguments.sabotage == Some(Sabotage::Crash) {
        std::process::abort();
    }
    let limit = Duration::from_secs(arguments.limit);
    let options = GroupOptions::new()
        .with_connect_timeout(limit)
        .with_progress_timeout(limit);
    let group = ProcessGroup::connect(&launch, &options)?;
    let checkpoints = Folder::create(arguments.folder.join("checkpoints"))?;
    let plan = PlanConfig::new(SAMPLES, BatchSize::global(BATCH as usize)?)
        .with_world_size(group.world_size())
        .with_order(Order::Shuffled { seed: SEED })
        .init()?;
    let mut run = resume(&group, &checkpoints)?;
    if group.rank() == 0 {
        println!("begins with step {}", run.step);
    }
    if launch.restart() > 0 && arguments.sabotage == Some(Sabotage::Wrong) {
        // This is the smallest change that a comparison of all bits must notice.
        run.weights[0] = f64::from_bits(run.weights[0].to_bits() ^ 1);
    }
    let pause = Duration::from_millis(arguments.pause);
    while run.epoch < EPOCHS {
        run.epoch(&group, &plan, &checkpoints, pause)?;
        run.epoch += 1;
        run.consumed = 0;
    }
    group.barrier()?;
    if group.rank() == 0 {
        let draft = arguments.folder.join("final.partial");
        fs::write(&draft, bytes(&run.weights))?;
        fs::rename(draft, arguments.folder.join("final.bin"))?;
        println!("ends after step {} of {STEPS}", run.step);
    }
    group.close()?;
    Ok(())
}

/// The state of the training.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Run {
    weights: Vec<f64>,
    step: u64,
    epoch: u64,
    /// The number of samples of the epoch that have been used.
    consumed: u64,
}

impl Run {
    /// Trains the rest of an epoch.
    fn epoch(
        &mut self,
        group: &ProcessGroup,
        plan: &Plan,
        checkpoints: &Folder,
        pause: Duration,
    ) -> Result<()> {
        let rest = plan.epoch(self.epoch).starting_at(self.consumed)?;
        for step in 0..rest.steps(0) {
            thread::sleep(pause);
            // Connection faults are triggered in an operation, not here.
            let _ = fail_point(group.rank(), Point::Step(self.step));
            self.step(group, rest.batch(group.rank(), step))?;
            self.step += 1;
            self.consumed = rest.consumed_after(step);
            if self.step.is_multiple_of(SAVE_EVERY)
                && group.rank() == 0
                && let Err(error) = self.save(group, checkpoints)
            {
                // The previous checkpoint is still there.
                eprintln!("step {}: not saved: {error}", self.step);
            }
        }
        Ok(())
    }

    fn step(&mut self, group: &ProcessGroup, batch: Option<PlannedBatch>) -> Result<()> {
        let mut gradient = vec![0.0; SIZE];
        let mut control = [0.0, 0.0];
        if let Some(batch) = batch.filter(|batch| !batch.is_idle()) {
            for index in batch.real_indices() {
                control[0] += learn(&self.weights, *index, &mut gradient);
                control[1] += 1.0;
            }
        }
        let mut outer = group.buffer(DType::F64, SIZE - INNER);
        outer
            .as_mut_slice::<f64>()?
            .copy_from_slice(&gradient[INNER..]);
        let outer = group.start_all_reduce(outer, ReduceOp::Sum)?;
        group.all_reduce(&mut gradient[..INNER], ReduceOp::Sum)?;
        group.all_reduce(&mut control, ReduceOp::Sum)?;
        gradient[INNER..].copy_from_slice(outer.wait()?.as_slice::<f64>()?);
        for (weight, gradient) in self.weights.iter_mut().zip(gradient) {
            *weight -= RATE * gradient / control[1];
        }
        Ok(())
    }

    fn save(&self, group: &ProcessGroup, checkpoints: &Folder) -> Result<()> {
        let mut draft = checkpoints.begin(group.rank())?;
        println!("saves checkpoint {}", draft.number());
        draft.write_bytes(&weights_file()?, Role::Model, &bytes(&self.weights))?;
        let world_size = NonZeroUsize::new(group.world_size());
        let mut metadata = Metadata {
            step: self.step,
            epoch: self.epoch,
            ..Metadata::new(world_size.unwrap_or(NonZeroUsize::MIN))
        };
        metadata
            .extra
            .insert("consumed".into(), self.consumed.into());
        draft.commit(metadata)?;
        // The compiler evaluates this: two is not zero.
        let keep = const { NonZeroUsize::new(2).unwrap() };
        checkpoints.prune(keep, VerifyLevel::Sizes, &[])?;
        Ok(())
    }
}

/// Returns the state from which all ranks continue. Rank 0 finds the checkpoint and broadcasts it.
fn resume(group: &ProcessGroup, checkpoints: &Folder) -> Result<Run> {
    let run = match group.rank() {
        0 => Some(match checkpoints.latest_good()?.found {
            Some(checkpoint) => {
                let metadata = &checkpoint.manifest()?.metadata;
                let consumed = metadata.extra.get("consumed").and_then(|x| x.as_u64());
                Run {
                    weights: checkpoint
                        .read(&weights_file()?)?
                        .chunks_exact(8)
                        .map(|x| f64::from_le_bytes(x.try_into().unwrap_or_default()))
                        .collect(),
                    step: metadata.step,
                    epoch: metadata.epoch,
                    consumed: consumed.ok_or("the checkpoint does not say how far it is")?,
                }
            }
            None => Run {
                weights: (0..SIZE as u64).map(|index| noise(index) / 2.0).collect(),
                step: 0,
                epoch: 0,
                consumed: 0,
            },
        }),
        _ => None,
    };
    Ok(group.broadcast_object(run.as_ref(), 0)?)
}

fn weights_file() -> Result<FileName> {
    Ok("weights.bin".parse()?)
}

fn bytes(weights: &[f64]) -> Vec<u8> {
    weights.iter().flat_map(|x| x.to_le_bytes()).collect()
}

// The model is a network with one hidden layer.
const INPUTS: usize = 4;
const HIDDEN: usize = 8;
/// The weights and offsets of the hidden layer.
const INNER: usize = HIDDEN * (INPUTS + 1);
const SIZE: usize = INNER + HIDDEN + 1;

/// Adds the gradient of one sample and returns its loss.
fn learn(weights: &[f64], sample: u64, gradient: &mut [f64]) -> f64 {
    let input: [f64; INPUTS] = std::array::from_fn(|x| noise(sample * 64 + x as u64));
    let target = input[0] * input[1] - input[2] + input[3] * 0.5;
    let row = INPUTS + 1;
    let hidden: [f64; HIDDEN] = std::array::from_fn(|unit| {
        let weights = &weights[unit * row..][..row];
        let sum: f64 = input.iter().zip(weights).map(|(x, w)| x * w).sum();
        (sum + weights[INPUTS]).tanh()
    });
    let output: f64 = hidden
        .iter()
        .zip(&weights[INNER..])
        .map(|(x, w)| x * w)
        .sum();
    let error = output + weights[SIZE - 1] - target;
    gradient[SIZE - 1] += error;
    for unit in 0..HIDDEN {
        gradient[INNER + unit] += error * hidden[unit];
        let inner = error * weights[INNER + unit] * (1.0 - hidden[unit] * hidden[unit]);
        for x in 0..INPUTS {
            gradient[unit * row + x] += inner * input[x];
        }
        gradient[unit * row + INPUTS] += inner;
    }
    error * error / 2.0
}

/// Returns a pseudorandom number between -1 and 1.
fn noise(index: u64) -> f64 {
    accelerator_plan::mix(&[SEED, index]) as f64 / u64::MAX as f64 * 2.0 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_those_of_the_loss() {
        let weights: Vec<f64> = (0..SIZE as u64).map(noise).collect();
        let mut gradient = vec![0.0; SIZE];
        learn(&weights, 5, &mut gradient);
        for index in 0..SIZE {
            let loss = |shift: f64| {
                let mut weights = weights.clone();
                weights[index] += shift;
                learn(&weights, 5, &mut vec![0.0; SIZE])
            };
            let slope = (loss(1e-6) - loss(-1e-6)) / 2e-6;
            assert!((slope - gradient[index]).abs() < 1e-6, "weight {index}");
        }
    }
}
