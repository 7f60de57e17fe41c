//! Every trajectory that PyTorch DDP produced, on both CPU devices, on threads and on processes.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

use std::path::Path;

use accelerator::{Accelerator, DeviceKind};
use accelerator_tests::fixtures::{Case, Training};
use accelerator_tests::processes::run_ranks;
use accelerator_tests::trajectory::{Trajectory, run};

/// PyTorch's kernels add in another order than Burn's.
const LOSS: f64 = 1e-4;
const NORM: f64 = 1e-4;
const WEIGHT: f64 = 1e-5;

fn check(case: &Case, ranks: &[Trajectory]) {
    assert_eq!(ranks.len(), case.world_size);
    for trajectory in ranks {
        let (loss, norm, weight) = trajectory.distance(case);
        assert!(
            loss < LOSS && norm < NORM && weight < WEIGHT,
            "differs from PyTorch by {loss:.1e} in a loss, {norm:.1e} in a norm, {weight:.1e} in \
             a weight: {case:?}"
        );
        assert_eq!(
            trajectory.last.flat(),
            ranks[0].last.flat(),
            "all ranks hold the same bits"
        );
    }
}

fn on_threads(device: DeviceKind) {
    let training = Training::load();
    for case in &training.cases {
        let ranks = Accelerator::builder()
            .device(device)
            .accumulation_steps(case.accumulate)
            .launch(case.world_size, |accelerator| {
                run(&accelerator, case, training.problem(case))
            })
            .unwrap();
        check(case, &ranks);
    }
    println!(
        "{} trajectories checked on threads, {device}",
        training.cases.len()
    );
}

fn on_processes(device: DeviceKind) {
    let training = Training::load();
    let program = Path::new(env!("CARGO_BIN_EXE_rank"));
    for (number, case) in training.cases.iter().enumerate() {
        let (device, number) = (device.to_string(), number.to_string());
        let ended = run_ranks(
            program,
            &["trajectory", &device, &number],
            case.world_size,
            |_, _| {},
        );
        let ranks: Vec<Trajectory> = ended
            .iter()
            .map(|rank| {
                assert!(rank.status.success(), "{}", rank.stderr);
                serde_json::from_str(&rank.stdout).unwrap()
            })
            .collect();
        check(case, &ranks);
    }
    println!(
        "{} trajectories checked on processes, {device}",
        training.cases.len()
    );
}

#[test]
fn training_vectors_on_threads_flex() {
    on_threads(DeviceKind::Flex);
}

#[test]
fn training_vectors_on_threads_ndarray() {
    on_threads(DeviceKind::NdArray);
}

#[test]
fn training_vectors_on_processes_flex() {
    on_processes(DeviceKind::Flex);
}

#[test]
fn training_vectors_on_processes_ndarray() {
    on_processes(DeviceKind::NdArray);
}
