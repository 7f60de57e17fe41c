//! Compares with every trajectory of PyTorch DDP, on both CPU devices, on threads and on processes.

use std::io::Write;
use std::path::Path;

use accelerator::data::Loader;
use accelerator::nn::Units;
use accelerator::prelude::*;
use accelerator_tests::fixtures::{Case, Sharding, Table, Training};
use accelerator_tests::processes::run_ranks;
use accelerator_tests::trajectory::{Trajectory, run};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// The bound for losses: PyTorch's kernels add in another order than Burn's.
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

/// Prints past the test harness, which swallows the output of passing tests.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Compares with every table of Accelerate, read through prepared loaders.
fn sharding(device: BackendKind) {
    let sharding = Sharding::load();
    for case in &sharding.cases {
        let tail = match case.even_batches {
            _ if case.drop_last => TailPolicy::Drop,
            Some(false) => TailPolicy::Uneven,
            // Accelerate's iterable data sets always pad.
            Some(true) | None => TailPolicy::Pad,
        };
        let ranks = Accelerator::builder()
            .device(device)
            .launch(case.world_size, |accelerator| {
                let builder = || {
                    let builder = LoaderBuilder::new(Numbers).tail(tail);
                    if case.split_batches {
                        builder.global_batch_size(case.batch_size)
                    } else {
                        builder.batch_size(case.batch_size)
                    }
                };
                let dataset = || InMemDataset::new((0..case.samples).collect());
                if case.is_empty() {
                    // A training on it would silently end at once.
                    let error = accelerator.prepare(builder().build(dataset())).unwrap_err();
                    assert!(error.is_config(), "{case:?}: {error}");
                    return Ok(Vec::new());
                }
                let dataset = dataset();
                let read = |loader: Loader<Tensor<1, Int>>| {
                    let loader = accelerator.prepare(loader)?;
                    loader
                        .epoch(0)
                        .map(|batch| Ok(batch?.into_inner().into_data().try_to_vec().unwrap()))
                        .collect::<Result<Vec<Vec<i64>>>>()
                };
                if case.even_batches.is_some() {
                    return read(builder().build(dataset));
                }
                // Tables of iterable data sets also hold for streams, both local and dispatched.
                let samples = case.samples;
                let stream = move |_part| (0..samples).map(std::io::Result::Ok);
                let batches = read(builder().build(dataset))?;
                assert_eq!(read(builder().build_stream(stream))?, batches, "{case:?}");
                assert_eq!(
                    read(builder().build_dispatched_stream(stream))?,
                    batches,
                    "{case:?}"
                );
                Ok(batches)
            })
            .unwrap();
        match &case.ranks {
            _ if case.is_empty() => {}
            Table::Batches(batches) => assert_eq!(&ranks, batches, "{case:?}"),
            Table::Samples(samples) => {
                let flat: Vec<Vec<i64>> = ranks.iter().map(|rank| rank.concat()).collect();
                assert_eq!(&flat, samples, "{case:?}");
            }
        }
    }
    say(format_args!(
        "checked {} sharding cases through loaders, {device}",
        sharding.cases.len()
    ));
}

struct Numbers;

impl Batcher<i64, Tensor<1, Int>> for Numbers {
    fn batch(&self, items: Vec<i64>, device: &Device) -> Tensor<1, Int> {
        let shape = [items.len()];
        Tensor::from_data(TensorData::new(items, shape), (device, DType::I64))
    }
}

fn on_threads(device: BackendKind, units: Units) {
    let training = Training::load();
    for case in &training.cases {
        let ranks = Accelerator::builder()
            .device(device)
            .units(units)
            .accumulation_steps(case.accumulate)
            .launch(case.world_size, |accelerator| {
                run(&accelerator, case, training.problem(case))
            })
            .unwrap();
        check(case, &ranks);
    }
    say(format_args!(
        "checked {} trajectories on threads, {device}, units: {units}",
        training.cases.len()
    ));
}

fn on_processes(device: BackendKind) {
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
            .map(|rank| serde_json::from_str(rank.succeeded()).unwrap())
            .collect();
        check(case, &ranks);
    }
    say(format_args!(
        "checked {} trajectories on processes, {device}",
        training.cases.len()
    ));
}

#[test]
fn sharding_vectors_through_loaders_flex() {
    sharding(BackendKind::Flex);
}

#[test]
fn sharding_vectors_through_loaders_ndarray() {
    sharding(BackendKind::NdArray);
}

#[test]
fn training_vectors_on_threads_flex() {
    on_threads(BackendKind::Flex, Units::Plain);
}

#[test]
fn training_vectors_on_threads_ndarray() {
    on_threads(BackendKind::NdArray, Units::Plain);
}

#[test]
fn training_vectors_with_sharded_units() {
    on_threads(BackendKind::Flex, Units::Shard);
}

#[test]
fn training_vectors_on_processes_flex() {
    on_processes(BackendKind::Flex);
}

#[test]
fn training_vectors_on_processes_ndarray() {
    on_processes(BackendKind::NdArray);
}
