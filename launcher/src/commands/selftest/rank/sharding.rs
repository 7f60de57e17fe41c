//! Every sample is used exactly once, also when a job goes on with another size.

use accelerator_plan::{BatchSize, EpochPlan, Order, PlanConfig};

use super::{Contribution, Result};

/// Divides epochs of many sizes over ranks.
pub(super) fn check(contribution: Contribution) -> Result<String> {
    let mut shared_out = 0;
    for samples in [0, 1, 7, 1000, 4096] {
        for world_size in [1, 2, 3, 8] {
            for order in [Order::Sequential, Order::Shuffled { seed: 5 }] {
                let epoch = plan(samples, world_size, order)?;
                let mut used = used(&epoch, epoch.steps(0));
                if contribution.is_wrong() {
                    used.extend(used.first().copied());
                }
                let what = format!("{samples} samples on {world_size} ranks");
                each_once(used, samples, &what)?;
                resumed(&epoch, order)?;
                shared_out += 2 * samples;
            }
        }
    }
    Ok(format!(
        "{shared_out} samples shared out, each exactly once"
    ))
}

/// The first half on one number of ranks, the rest on another.
fn resumed(epoch: &EpochPlan, order: Order) -> Result<()> {
    let samples = epoch.plan().samples();
    let steps = epoch.steps(0) / 2;
    let mut all = used(epoch, steps);
    let consumed = match steps {
        0 => 0,
        steps => epoch.consumed_after(steps - 1),
    };
    let ranks = epoch.plan().world_size() % 3 + 1;
    let rest = plan(samples, ranks, order)?.starting_at(consumed)?;
    all.extend(used(&rest, rest.steps(0)));
    each_once(
        all,
        samples,
        &format!("{samples} samples, resumed on {ranks} ranks after {consumed}"),
    )
}

fn plan(samples: u64, world_size: usize, order: Order) -> Result<EpochPlan> {
    let plan = PlanConfig::new(samples, BatchSize::per_rank(8)?)
        .with_world_size(world_size)
        .with_order(order)
        .init()?;
    Ok(plan.epoch(3))
}

/// What all ranks use in the first `steps` steps.
fn used(epoch: &EpochPlan, steps: u64) -> Vec<u64> {
    let ranks = 0..epoch.plan().world_size();
    let batches = ranks.flat_map(|rank| (0..steps).filter_map(move |step| epoch.batch(rank, step)));
    batches
        .filter(|batch| !batch.is_idle())
        .flat_map(|batch| batch.real_indices().to_vec())
        .collect()
}

fn each_once(mut used: Vec<u64>, samples: u64, what: &str) -> Result<()> {
    used.sort_unstable();
    if used.iter().copied().eq(0..samples) {
        return Ok(());
    }
    let at = used
        .iter()
        .zip(0..)
        .find(|(found, expected)| **found != *expected);
    let sample = at.map_or(samples, |(found, expected)| expected.min(*found));
    Err(format!(
        "{what}: expected each sample exactly once, but sample {sample} is missing or twice there"
    )
    .into())
}
