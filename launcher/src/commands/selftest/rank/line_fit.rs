//! Several ranks train to the weights that one rank trains to.

use accelerator_collective::{ProcessGroup, ReduceOp};
use accelerator_plan::{BatchSize, EpochPlan, PlanConfig};

use super::{Contribution, Result};

/// Fits a line by least squares, by gradient descent: once with the gradients of all ranks added
/// up, and once on this rank alone with all samples.
pub(super) fn check(group: &ProcessGroup, contribution: Contribution) -> Result<String> {
    let together = fit(group.world_size(), |epoch, line| {
        let mut sum = share(epoch, group.rank(), line);
        if contribution.is_wrong() {
            sum[0] *= 1.01;
        }
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum)
    })?;
    let alone = fit(1, |epoch, line| Ok(share(epoch, 0, line)))?;
    let difference = (0..2)
        .map(|index| (together[index] - alone[index]).abs())
        .fold(0.0, f64::max);
    // Also false where it is not a number.
    if difference <= TOLERANCE && (alone[0] - SLOPE).abs() < 0.1 {
        let ranks = group.world_size();
        return Ok(format!(
            "{ranks} ranks learn what one does, to {difference:.0e}"
        ));
    }
    Err(format!(
        "expected y = {SLOPE} x + {OFFSET}, more or less; {} ranks found {together:?}, one {alone:?}",
        group.world_size()
    )
    .into())
}

const SLOPE: f64 = 3.0;
const OFFSET: f64 = -2.0;
const TOLERANCE: f64 = 1e-9;
const FIT_SAMPLES: u64 = 200;
const FIT_EPOCHS: u64 = 100;
const FIT_RATE: f64 = 0.1;

/// Slope and offset, after some epochs of steps along the gradient that `gradient` adds up.
fn fit(
    world_size: usize,
    gradient: impl Fn(&(EpochPlan, u64), [f64; 2]) -> Result<[f64; 3]>,
) -> Result<[f64; 2]> {
    let plan = PlanConfig::new(FIT_SAMPLES, BatchSize::global(50)?)
        .with_world_size(world_size)
        .init()?;
    let mut line = [0.0; 2];
    for epoch in 0..FIT_EPOCHS {
        let epoch = plan.epoch(epoch);
        for step in 0..epoch.steps(0) {
            let sum = gradient(&(epoch.clone(), step), line)?;
            for index in 0..2 {
                line[index] -= FIT_RATE * sum[index] / sum[2];
            }
        }
    }
    Ok(line)
}

/// The gradient over one rank's samples of a step, added up, and how many they are.
fn share((epoch, step): &(EpochPlan, u64), rank: usize, line: [f64; 2]) -> [f64; 3] {
    let mut sum = [0.0; 3];
    let Some(batch) = epoch.batch(rank, *step).filter(|batch| !batch.is_idle()) else {
        return sum;
    };
    for index in batch.real_indices() {
        let (x, y) = sample(*index);
        let error = line[0] * x + line[1] - y;
        sum[0] += error * x;
        sum[1] += error;
        sum[2] += 1.0;
    }
    sum
}

/// A point near the line.
fn sample(index: u64) -> (f64, f64) {
    let x = (index * 37 % 101) as f64 / 50.0 - 1.0;
    let noise = (index * 61 % 17) as f64 / 170.0 - 0.05;
    (x, SLOPE * x + OFFSET + noise)
}
