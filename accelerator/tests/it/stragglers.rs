//! A rank that the others wait for is named.

use std::thread::sleep;
use std::time::Duration;

use accelerator::AcceleratorBuilder;
use accelerator::prelude::*;
use accelerator::timeline::Straggler;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::tensor::Tensor;

/// Trains for `steps` steps on three ranks, each of which works as long as `work` says; returns what each knows.
fn trained(
    builder: AcceleratorBuilder,
    steps: u64,
    work: impl Fn(usize, u64) -> Duration + Send + Sync,
) -> Vec<Vec<Straggler>> {
    builder
        .launch(3, |accelerator| {
            let device = accelerator.device();
            let model: Linear = LinearConfig::new(4, 1).init(&device);
            let (mut model, mut optimizer) =
                accelerator.prepare((model, SgdConfig::new().init()))?;
            for step in 0..steps {
                sleep(work(accelerator.rank(), step));
                let loss = model.forward(Tensor::<2>::ones([2, 4], &device)).mean();
                let gradients = accelerator.backward(loss, &model, 2)?;
                model = optimizer.step(0.01, model, gradients);
                // The wait of the others is no work of theirs, wherever it is.
                accelerator.wait_for_everyone()?;
            }
            let summary = accelerator.step_summary();
            let stragglers = accelerator.stragglers();
            assert!(summary.is_none_or(|summary| summary.stragglers == stragglers));
            Ok(stragglers)
        })
        .unwrap()
}

#[test]
fn a_slow_rank_is_named_within_fifty_steps() {
    let work = |rank, _| Duration::from_millis(if rank == 1 { 60 } else { 5 });
    let seen = trained(Accelerator::builder().step_summary(), 50, work);
    assert!(seen.iter().all(|rank| *rank == seen[0]), "{seen:?}");
    // A busy machine may hold up another rank, too, but not in each of the intervals.
    let slowest = &seen[0][0];
    assert_eq!((slowest.rank, slowest.is_chronic()), (1, true), "{seen:?}");
    assert_eq!((slowest.slow_intervals, slowest.intervals), (3, 3));
    assert!(slowest.ratio > 1.5 && slowest.busy > 0.06, "{slowest:?}");
    let text = slowest.to_string();
    assert!(
        text.starts_with("rank 1 was slow in 3 of 3 intervals (chronic): "),
        "{text}"
    );
}

#[test]
fn a_rank_that_is_late_once_in_each_interval_is_not() {
    // Far more than the others' work of the whole run, but not in the median.
    let work = |rank, step| match (rank, step) {
        (2, 5 | 25) => Duration::from_secs(1),
        _ => Duration::from_millis(20),
    };
    let seen = trained(Accelerator::builder(), 34, work);
    let slow = seen[0].iter().find(|straggler| straggler.rank == 2);
    assert!(slow.is_none_or(|slow| slow.ratio < 3.0), "{seen:?}");
}
