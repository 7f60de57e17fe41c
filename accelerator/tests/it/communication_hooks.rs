//! Gradients that the program's hooks reduce (C26).

use std::cell::RefCell;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use crate::common::{
    Column, assert_chain, assert_error, columns, connected, devices, distance, flat, learn_ones,
    line, line_and_sgd, linear, of_every_rank,
};
use accelerator::hook::{
    BucketValues, CommunicationHook, GradientBucket, HookError, PowerSgd, Ranks, SavedBy,
};
use accelerator::optim::{Manual, Sharded};
use accelerator::precision::LossScale;
use accelerator::prelude::*;
use accelerator::{AcceleratorBuilder, OverlapState};
use burn::module::{Module, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::activation::{relu, tanh};
use burn::tensor::{DType, Device, Tensor, TensorData};

#[derive(Debug, Module)]
struct Network {
    first: Linear,
    second: Linear,
    last: Linear,
}

impl Network {
    fn new(device: &Device) -> Self {
        Self {
            first: linear(1, 24, device),
            second: linear(24, 24, device),
            last: linear(24, 1, device),
        }
    }

    fn forward(&self, values: Tensor<2>) -> Tensor<2> {
        let hidden = tanh(self.first.forward(values));
        self.last.forward(relu(self.second.forward(hidden)))
    }

    fn loss(&self, batch: &Column) -> Tensor<1> {
        let values = batch.values.clone();
        let wanted = values.clone() * values.clone() * 0.5 - 1.0;
        MseLoss::new().forward(self.forward(values), wanted, Reduction::Mean)
    }
}

const EPOCHS: u64 = 20;

/// Returns the weights that all ranks hold after each of 20 epochs of three steps, in small buckets. The last step of
/// an epoch is smaller.
pub(crate) fn trained(builder: AcceleratorBuilder, ranks: usize) -> Vec<Vec<f32>> {
    let outcomes = builder
        .bucket_size(1024)
        .launch(ranks, |accelerator| {
            let model = Network::new(&accelerator.device());
            let train = LoaderBuilder::new(crate::common::ColumnBatcher)
                .global_batch_size(12)
                .shuffle(3)
                .build(columns(31));
            let (mut model, mut optimizer, train) =
                accelerator.prepare((model, SgdConfig::new().init(), train))?;
            let mut weights = Vec::new();
            for epoch in 0..EPOCHS {
                for batch in train.epoch(epoch) {
                    let batch = batch?;
                    let gradients = accelerator.backward(model.loss(&batch), &model, &batch)?;
                    model = optimizer.step(0.02, model, gradients);
                }
                weights.extend(flat(&model));
            }
            Ok(weights)
        })
        .unwrap();
    let all = of_every_rank(outcomes);
    all.chunks(all.len() / EPOCHS as usize)
        .map(<[f32]>::to_vec)
        .collect()
}

/// Returns the greatest distance between two trajectories, relative to the exact one.
pub(crate) fn farthest(ours: &[Vec<f32>], exact: &[Vec<f32>]) -> f32 {
    let length = |values: &mut dyn Iterator<Item = f32>| values.map(|v| v * v).sum::<f32>().sqrt();
    let off = ours.iter().zip(exact).map(|(ours, exact)| {
        let off = length(&mut ours.iter().zip(exact).map(|(ours, exact)| ours - exact));
        off / length(&mut exact.iter().copied())
    });
    off.fold(0.0, f32::max)
}

#[test]
fn c26_compressed_trajectories_stay_within_a_hundredth_of_the_exact_one() {
    for kind in devices() {
        let builder = || Accelerator::builder().device(kind);
        let power_sgd =
            |rank| builder().communication_hook(move || PowerSgd::new(rank).start_after(3));
        for ranks in [2, 3] {
            let exact = trained(builder(), ranks);
            let ways = [
                ("bf16", builder().compression(Compression::Bf16)),
                ("f16", builder().compression(Compression::F16)),
                ("PowerSGD of rank 1", power_sgd(1)),
                ("PowerSGD of rank 2", power_sgd(2)),
            ];
            for (name, way) in ways {
                let ours = trained(way.clone(), ranks);
                let off = farthest(&ours, &exact);
                assert!(off < 1e-2, "{name}: {off}");
                assert!(off > 0.0, "{name}: nothing was compressed");
                if ranks == 2 && name != "PowerSGD of rank 1" {
                    assert_eq!(trained(way, ranks), ours, "{name}");
                }
            }
        }
    }
}

/// Returns how far the second row of a matrix is from its goal in the end, relative to the initial distance. The first
/// row is pulled back and forth, twice as hard as the second is pulled to its goal.
fn distance_of_the_quiet_row(builder: AcceleratorBuilder) -> f32 {
    let outcomes = builder
        .launch(2, |accelerator| {
            let device = accelerator.device();
            let mut model: Linear = LinearConfig::new(4, 8).with_bias(false).init(&device);
            model.weight = Param::from_data(TensorData::new(vec![0.0_f32; 32], [4, 8]), &device);
            let (mut model, mut optimizer) =
                accelerator.prepare((model, SgdConfig::new().init()))?;
            let goal =
                Tensor::<2>::from_floats([[1.0, 0.0, -1.0, 0.0, 1.0, 0.0, -1.0, 0.0]], &device);
            let pull =
                Tensor::<2>::from_floats([[1.5, 1.5, 1.5, 1.5, -1.5, -1.5, -1.5, -1.5]], &device);
            for step in 0..600 {
                let sign = if step % 2 == 0 { 1.0 } else { -1.0 };
                let weight = model.weight.val();
                let noise = weight.clone().slice([0..1, 0..8]) * pull.clone() * sign;
                let off = weight.slice([1..2, 0..8]) - goal.clone();
                let loss = noise.sum() + (off.clone() * off).sum() * 0.5;
                let gradients = accelerator.backward(loss, &model, 1)?;
                model = optimizer.step(0.02, model, gradients);
            }
            let off = model.weight.val().inner().slice([1..2, 0..8]) - goal.inner();
            Ok(vec![
                (off.clone() * off).sum().sqrt().into_scalar::<f32>() / 2.0,
            ])
        })
        .unwrap();
    of_every_rank(outcomes)[0]
}

#[test]
fn what_is_never_the_largest_arrives_by_error_feedback_only() {
    let hook = || PowerSgd::new(1).start_after(0).min_compression(0.0);
    let builder = Accelerator::builder;
    let exact = distance_of_the_quiet_row(builder());
    let with = distance_of_the_quiet_row(builder().communication_hook(hook));
    let without = builder().communication_hook(move || hook().without_error_feedback());
    let without = distance_of_the_quiet_row(without);
    assert!(exact < 1e-3, "{exact}");
    assert!(with < 0.1, "{with}");
    assert!(without > 0.8, "{without}");
}

/// A hook that keeps nothing, with its name.
struct Hook<F>(&'static str, F);

impl<F> CommunicationHook for Hook<F>
where
    F: FnMut(&mut GradientBucket<'_>, &Ranks<'_>) -> Result<(), HookError> + Send,
{
    fn name(&self) -> String {
        self.0.to_owned()
    }

    fn reduce(
        &mut self,
        bucket: &mut GradientBucket<'_>,
        ranks: &Ranks<'_>,
    ) -> Result<(), HookError> {
        (self.1)(bucket, ranks)
    }
}

/// Reduces as the program itself writes it.
fn all_reduce(bucket: &mut GradientBucket<'_>, ranks: &Ranks<'_>) -> Result<(), HookError> {
    assert!(bucket.number() < bucket.count());
    let lengths = bucket.parameters().iter().map(|parameter| {
        assert!(!parameter.path.is_empty());
        let elements = parameter.shape.iter().product::<usize>();
        assert_eq!(parameter.range.len(), elements);
        elements
    });
    let length: usize = lengths.sum();
    match bucket.values_mut() {
        BucketValues::F32(values) => {
            assert_eq!(values.len(), length);
            ranks.all_reduce(values, ReduceOp::Sum)?;
        }
        BucketValues::F64(values) => {
            assert_eq!(values.len(), length);
            let all = ranks.all_gather(values)?;
            values.fill(0.0);
            for part in all.chunks(length) {
                let pairs = values.iter_mut().zip(part);
                pairs.for_each(|(sum, value)| *sum += value);
            }
        }
    }
    Ok(())
}

/// Adds a hook that reduces so and counts its calls.
fn plain(builder: AcceleratorBuilder) -> (AcceleratorBuilder, Arc<AtomicUsize>) {
    let calls = Arc::<AtomicUsize>::default();
    let counted = calls.clone();
    let make = move || {
        let counted = counted.clone();
        Hook(
            "plain",
            move |bucket: &mut GradientBucket<'_>, ranks: &Ranks<'_>| {
                counted.fetch_add(1, Ordering::Relaxed);
                all_reduce(bucket, ranks)
            },
        )
    };
    (builder.communication_hook(make), calls)
}

#[derive(Debug, Module)]
struct Mixed {
    single: Param<Tensor<2>>,
    double: Param<Tensor<2>>,
    idle: Param<Tensor<1>>,
}

/// Returns the weights in f64 and the gradient norms before clipping of a training in windows of two micro-steps.
fn mixed(builder: AcceleratorBuilder) -> (Vec<f64>, Vec<f64>) {
    let outcomes = builder
        .bucket_size(1024)
        .accumulation_steps(2)
        .launch(2, |accelerator| {
            let device = accelerator.device();
            let param = |dtype, at: f64| {
                let values: Vec<f64> = (0..400).map(|i| (f64::from(i) * 0.37 + at).sin()).collect();
                let data = TensorData::new(values, [20, 20]).convert_dtype(dtype);
                Param::from_tensor(Tensor::<2>::from_data(data, (&device, dtype)))
            };
            let model = Mixed {
                single: param(DType::F32, 0.0),
                double: param(DType::F64, 1.0),
                idle: Param::from_data([1.0_f32, 2.0], &device),
            };
            let (mut model, mut optimizer) =
                accelerator.prepare((model, SgdConfig::new().init()))?;
            let mut norms = Vec::new();
            for step in 0..12 {
                let at = (step * 2 + accelerator.rank()) as f64;
                let off = model.double.val() - 0.1 * at;
                let other = model.single.val() * (0.1 * at) - 1.0;
                let loss =
                    (off.clone() * off).mean().cast(DType::F32) + (other.clone() * other).mean();
                // In some steps, one rank has no samples.
                let weight = (step + accelerator.rank()) % 3;
                let mut gradients = accelerator.backward(loss, &model, weight)?;
                norms.extend(gradients.norm());
                model = optimizer.step(0.5, model, gradients.clip_norm(0.02));
            }
            assert_eq!(norms.len(), 6);
            let weights = model.double.val().into_data().try_to_vec::<f64>().unwrap();
            Ok((weights, norms))
        })
        .unwrap();
    assert_eq!(outcomes[0], outcomes[1]);
    outcomes.into_iter().next().unwrap()
}

#[test]
fn a_plain_all_reduce_by_a_hook_is_what_is_done_without_one() {
    let (weights, norms) = mixed(Accelerator::builder());
    let (hooked, calls) = plain(Accelerator::builder());
    let (ours, our_norms) = mixed(hooked);
    assert!(calls.load(Ordering::Relaxed) >= 2 * 6 * 2, "{calls:?}");
    for (ours, exact) in ours.iter().zip(&weights) {
        assert!(
            (ours - exact).abs() < 1e-12 * exact.abs().max(1.0),
            "{ours} {exact}"
        );
    }
    for (ours, exact) in our_norms.iter().zip(&norms) {
        assert!((ours - exact).abs() < 1e-6 * exact, "{ours} {exact}");
    }
    // A single rank calls no hook.
    let (alone, calls) = plain(Accelerator::builder());
    assert_eq!(trained(alone, 1), trained(Accelerator::builder(), 1));
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

#[test]
fn steps_that_are_not_finite_pass_the_hook_by_on_all_ranks() {
    // The gradient of rank 1 overflows until the scale has fallen far enough.
    let run = |builder: AcceleratorBuilder| {
        let outcomes = builder
            .precision(Precision::F16)
            .loss_scale(LossScale::new().with_initial(65536.0))
            .launch(2, |accelerator| {
                let (mut model, mut optimizer) =
                    accelerator.prepare((line(&accelerator.device()), SgdConfig::new().init()))?;
                let mut skipped = Vec::new();
                for _ in 0..12 {
                    let factor = [1.0, 50.0][accelerator.rank()];
                    let input = Tensor::<2>::ones([1, 1], &accelerator.device());
                    let output = accelerator.forward(&model, |model| {
                        model.forward(accelerator.to_working(input.clone()))
                    });
                    let loss = accelerator.to_full(output).mean() * factor;
                    let gradients = accelerator.backward(loss, &model, 1)?;
                    model = optimizer.step(1e-3, model, gradients);
                    skipped.push(matches!(optimizer.outcome(), StepOutcome::Skipped { .. }));
                }
                Ok((flat(&model), skipped))
            })
            .unwrap();
        assert_eq!(outcomes[0], outcomes[1]);
        outcomes.into_iter().next().unwrap()
    };
    let (hooked, calls) = plain(Accelerator::builder());
    let (ours, exact) = (run(hooked), run(Accelerator::builder()));
    assert_eq!(ours.1, exact.1);
    let skipped = ours.1.iter().filter(|skipped| **skipped).count();
    assert!(skipped > 0 && skipped < 12, "{skipped}");
    assert_eq!(calls.load(Ordering::Relaxed), 2 * (12 - skipped));
    crate::common::assert_close(&ours.0, &exact.0, 1e-6);
}

/// Returns each rank's error if the hook of rank 1 does something else in the third step.
fn errors_of(odd: fn() -> Result<(), HookError>) -> Vec<Error> {
    let reduce = move |bucket: &mut GradientBucket<'_>, ranks: &Ranks<'_>| {
        if bucket.step() == 2 && ranks.rank() == 1 && bucket.number() == 1 {
            odd()?;
        }
        Ok(bucket.all_reduce(ranks)?)
    };
    Accelerator::builder()
        .bucket_size(1024)
        .communication_hook(move || Hook("odd", reduce))
        .launch(2, |accelerator| {
            let model = Network::new(&accelerator.device());
            let (mut model, mut optimizer) =
                accelerator.prepare((model, SgdConfig::new().init()))?;
            for step in 0..5 {
                let input = Tensor::<2>::ones([2, 1], &accelerator.device());
                let loss = model.forward(input).mean();
                match accelerator.backward(loss, &model, 2) {
                    Ok(gradients) => model = optimizer.step(0.1, model, gradients),
                    Err(error) => {
                        assert_eq!(step, 2);
                        // The group has failed on both ranks.
                        assert!(accelerator.wait_for_everyone().is_err());
                        return Ok(error);
                    }
                }
            }
            panic!("no step has failed");
        })
        .unwrap()
}

#[test]
fn a_hook_that_fails_ends_the_step_on_every_rank() {
    let errors = errors_of(|| Err("the codebook is empty".into()));
    assert!(
        errors[1].is_hook() && !errors[1].is_collective(),
        "{:?}",
        errors[1]
    );
    assert!(errors[0].is_peer_lost(), "{:?}", errors[0]);
    assert_eq!(errors[0].culprit().unwrap().rank(), 1);
    for error in &errors {
        let text = format!("{error:?}");
        for part in ["hook `odd`", "bucket 1", "the codebook is empty"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}

#[test]
fn a_hook_that_panics_ends_the_step_on_every_rank() {
    let errors = errors_of(|| panic!("the codebook is empty"));
    assert!(errors[1].is_panic(), "{:?}", errors[1]);
    assert!(errors[0].is_peer_lost(), "{:?}", errors[0]);
    for error in &errors {
        let text = format!("{error:?}");
        assert!(text.contains("the codebook is empty"), "{text}");
    }
}

#[test]
fn a_rank_that_hears_of_a_loss_inside_its_hook_says_so() {
    let errors = errors_of(|| {
        Err(accelerator::launch(2, |accelerator| {
            if accelerator.rank() == 1 {
                accelerator.group().abort("it had enough");
            }
            accelerator.wait_for_everyone()
        })
        .unwrap_err()
        .into())
    });
    // The hook passes the error on unchanged.
    assert!(
        errors[1].is_collective() && !errors[1].is_hook(),
        "{:?}",
        errors[1]
    );
}

#[test]
fn a_hook_with_other_results_on_each_rank_is_found_as_drift() {
    // Each rank keeps its own gradients.
    let reduce = |bucket: &mut GradientBucket<'_>, _: &Ranks<'_>| {
        let mut parameters = bucket.parameters().iter();
        assert!(parameters.all(|parameter| parameter.is_present));
        Ok(())
    };
    let errors = Accelerator::builder()
        .communication_hook(move || Hook("unlike", reduce))
        .check_replicas_every(1)
        .launch(2, |accelerator| {
            let (mut model, mut optimizer) =
                accelerator.prepare((line(&accelerator.device()), SgdConfig::new().init()))?;
            let input = |rank: usize| Tensor::<2>::full([1, 1], rank as f32, &accelerator.device());
            let loss = model.forward(input(accelerator.rank())).mean();
            let gradients = accelerator.backward(loss, &model, 1)?;
            model = optimizer.step(0.1, model, gradients);
            let loss = model.forward(input(1)).mean();
            Ok(accelerator.backward(loss, &model, 1).unwrap_err())
        })
        .unwrap();
    assert!(errors.iter().all(Error::is_drift), "{errors:?}");
}

#[test]
fn ranks_with_different_hooks_are_told_when_they_are_built() {
    let outcomes = connected(
        2,
        |topology| topology,
        |rank, builder| {
            builder
                .communication_hook(move || PowerSgd::new(1 + rank))
                .build()
        },
    );
    for outcome in outcomes {
        let words = [
            "the communication hook (set by `comm",
            "rank 0 has PowerSGD of rank 1 ",
        ];
        assert_error(&outcome.unwrap_err(), Error::is_config, &words);
    }
    // Threads make one hook each, so theirs can differ too.
    let made = AtomicUsize::new(1);
    let error = Accelerator::builder()
        .communication_hook(move || PowerSgd::new(made.fetch_add(1, Ordering::Relaxed)))
        .launch(2, |_| Ok(()))
        .unwrap_err();
    assert!(
        error.is_config() && error.to_string().contains("hook"),
        "{error:?}"
    );
}

#[test]
fn a_hook_takes_the_place_of_compression_and_overlap() {
    let hooked = || Accelerator::builder().communication_hook(|| PowerSgd::new(1));
    let error = hooked().compression(Compression::F16).build().unwrap_err();
    assert!(error.is_config(), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("communication_hook") && text.contains("f16"),
        "{text}"
    );
    hooked()
        .overlap(Overlap::On)
        .launch(2, |accelerator| {
            let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
            for _ in 0..4 {
                model = learn_ones(&accelerator, model, &mut optimizer, 1)?;
            }
            let report = accelerator.overlap_report(&model)?;
            assert_eq!((report.state, report.early_total), (OverlapState::Off, 0));
            Ok(())
        })
        .unwrap();
}

#[test]
fn ranks_whose_windows_differ_are_told_before_a_hook_is_called() {
    let (hooked, calls) = plain(Accelerator::builder());
    let errors = hooked
        .accumulation_steps(2)
        .launch(2, |accelerator| {
            let model = accelerator.prepare(line(&accelerator.device()))?;
            let train = accelerator.prepare(crate::common::loader(8, 1))?;
            for batch in train.epoch(0) {
                let batch = batch?;
                let weight = accelerator::Weight::from(&batch);
                let weight = match accelerator.rank() {
                    0 => weight.trigger_sync(),
                    _ => weight,
                };
                if let Err(error) = accelerator.backward(distance(&model, &batch), &model, weight) {
                    return Ok(error);
                }
            }
            panic!("nothing was noticed");
        })
        .unwrap();
    for error in errors {
        assert!(error.is_misuse(), "{error:?}");
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

/// Trains ranks with PowerSGD, from a checkpoint if `from` has one, and saves each step if `into` is given.
fn interrupted(ranks: usize, rank: usize, from: Option<&Path>, into: Option<&Path>) -> Vec<f32> {
    let outcomes = Accelerator::builder()
        .bucket_size(1024)
        .communication_hook(move || PowerSgd::new(rank).start_after(1))
        .launch(ranks, |accelerator| {
            let model = Network::new(&accelerator.device());
            let train = LoaderBuilder::new(crate::common::ColumnBatcher)
                .global_batch_size(8)
                .shuffle(1)
                .build(columns(20));
            let parts = (model, SgdConfig::new().init(), train);
            let mut parts: (Network, PreparedOptimizer<Manual>, _) = accelerator.prepare(parts)?;
            let mut start = 0;
            if let Some(from) = from {
                let position;
                (parts, position) = accelerator.resume(from, parts)?;
                start = position.epoch();
            }
            let (mut model, mut optimizer, train) = parts;
            for epoch in start..2 {
                for batch in train.epoch(epoch) {
                    let batch = batch?;
                    let gradients = accelerator.backward(model.loss(&batch), &model, &batch)?;
                    model = optimizer.step(0.05, model, gradients);
                    if let Some(into) = into {
                        accelerator.save_state(into, (&model, &optimizer, &train))?;
                    }
                }
            }
            assert_eq!(optimizer.steps(), 6);
            Ok(flat(&model))
        })
        .unwrap();
    of_every_rank(outcomes)
}

#[test]
fn a_resumed_run_repeats_the_bits_and_fits_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let whole = interrupted(2, 1, None, None);
    assert_eq!(interrupted(2, 1, None, Some(folder.path())), whole);
    for number in 1..=6 {
        let from = folder.path().join(format!("checkpoint-{number:06}"));
        // The first step is exact, so there is no state to keep after it.
        for rank in 0..2 {
            let file = from.join(format!("hook-rank-{rank:05}.bin"));
            assert_eq!(file.is_file(), number > 1, "{number}");
        }
        assert_eq!(interrupted(2, 1, Some(&from), None), whole, "{number}");
    }
    let from = folder.path().join("checkpoint-000003");
    // The restored state makes a difference, and so does the rank that it belongs to.
    std::fs::create_dir(folder.path().join("other")).unwrap();
    for (ranks, rank) in [(3, 1), (1, 1), (2, 2)] {
        let ours = interrupted(ranks, rank, Some(&from), None);
        assert_ne!(ours, whole);
        crate::common::assert_close(&ours, &whole, 0.05);
    }
}

/// A hook with functions that save the state of a rank and restore a state.
struct Keeping<S, R> {
    rank: usize,
    save: S,
    restore: R,
}

impl<S, R> CommunicationHook for Keeping<S, R>
where
    S: Fn(usize) -> Result<Vec<u8>, HookError> + Send,
    R: Fn(&[u8], SavedBy) -> Result<(), HookError> + Send,
{
    fn name(&self) -> String {
        "keeping".to_owned()
    }

    fn reduce(
        &mut self,
        bucket: &mut GradientBucket<'_>,
        ranks: &Ranks<'_>,
    ) -> Result<(), HookError> {
        self.rank = ranks.rank();
        Ok(bucket.all_reduce(ranks)?)
    }

    fn save(&self) -> Result<Vec<u8>, HookError> {
        (self.save)(self.rank)
    }

    fn restore(&mut self, state: &[u8], saved_by: SavedBy) -> Result<(), HookError> {
        (self.restore)(state, saved_by)
    }
}

/// Returns a hook that fails to save or to restore on rank 1.
fn forgetful(fails_to_save: bool) -> impl CommunicationHook {
    Keeping {
        rank: 9,
        save: move |rank: usize| -> Result<Vec<u8>, HookError> {
            match (fails_to_save, rank) {
                (true, 1) => Err("the state is gone".into()),
                _ => Ok(vec![rank as u8]),
            }
        },
        restore: |state: &[u8], saved_by: SavedBy| -> Result<(), HookError> {
            match (state, saved_by) {
                ([0], SavedBy::ThisRank) => Ok(()),
                other => Err(format!("{other:?} is forgotten").into()),
            }
        },
    }
}

#[test]
fn state_that_is_not_saved_or_not_restored_is_an_error_on_every_rank() {
    let run = |fails_to_save, folder: &Path| {
        Accelerator::builder()
            .communication_hook(move || forgetful(fails_to_save))
            .launch(2, |accelerator| {
                let (model, mut optimizer) = line_and_sgd(&accelerator)?;
                let model = learn_ones(&accelerator, model, &mut optimizer, 1)?;
                if let Err(error) = accelerator.save_state(folder, &model) {
                    return Ok(error);
                }
                Ok(accelerator.resume(folder, model).unwrap_err())
            })
            .unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    for (fails_to_save, part) in [
        (true, "the state is gone"),
        (false, "([1], ThisRank) is forgotten"),
    ] {
        for error in run(fails_to_save, folder.path()) {
            assert!(error.is_checkpoint(), "{error:?}");
            assert!(format!("{error:?}").contains(part), "{error:?}");
        }
    }
}

#[test]
fn a_sharded_optimizer_steps_by_what_a_hook_has_reduced() {
    let run = |is_sharded: bool| {
        let outcomes = Accelerator::builder()
            .communication_hook(|| PowerSgd::new(1).start_after(2))
            .launch(2, |accelerator| {
                let optimizer = AdamWConfig::new().init();
                let model = Network::new(&accelerator.device());
                let train = crate::common::loader(20, 2);
                let (mut model, mut optimizer, train) = if is_sharded {
                    accelerator.prepare((model, Sharded(optimizer), train))?
                } else {
                    accelerator.prepare((model, optimizer, train))?
                };
                for batch in train.epoch(0) {
                    let batch = batch?;
                    let gradients = accelerator.backward(model.loss(&batch), &model, &batch)?;
                    model = optimizer.step(0.01, model, gradients.clip_norm(0.5));
                }
                Ok(flat(&model))
            })
            .unwrap();
        of_every_rank(outcomes)
    };
    assert_eq!(run(true), run(false));
}

type Notes = Arc<Mutex<Vec<String>>>;

/// Returns a hook that keeps something on rank 1 alone and records the calls.
fn on_rank_one(notes: &Notes) -> impl CommunicationHook + use<> {
    let (saves, restores) = (notes.clone(), notes.clone());
    Keeping {
        rank: 9,
        save: move |rank: usize| -> Result<Vec<u8>, HookError> {
            saves.lock().unwrap().push(format!("rank {rank} saves"));
            Ok(if rank == 1 { vec![7] } else { Vec::new() })
        },
        restore: move |state: &[u8], saved_by: SavedBy| -> Result<(), HookError> {
            let note = format!("{state:?} of {saved_by:?}");
            restores.lock().unwrap().push(note);
            Ok(())
        },
    }
}

#[test]
fn every_rank_gets_its_own_state_back_once_also_where_it_kept_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let run = |ranks: usize, resumes: bool| {
        let notes = Notes::default();
        let noted = notes.clone();
        Accelerator::builder()
            .communication_hook(move || on_rank_one(&noted))
            .launch(ranks, |accelerator| {
                let (model, mut optimizer) = line_and_sgd(&accelerator)?;
                let model = learn_ones(&accelerator, model, &mut optimizer, 1)?;
                // The objects beside the model have no hooks of their own.
                let ema = Ema::new(&model, 0.5);
                let outer = DiLoCoConfig::new(3).init(&accelerator, &model)?;
                if resumes {
                    accelerator.resume(folder.path(), (model, ema, outer))?;
                } else {
                    accelerator.save_state(folder.path(), (&model, &ema, &outer))?;
                }
                Ok(())
            })
            .unwrap();
        let mut notes = std::mem::take(&mut *notes.lock().unwrap());
        notes.sort();
        notes
    };
    assert_eq!(run(2, false), ["rank 0 saves", "rank 1 saves"]);
    assert_eq!(run(2, true), ["[7] of ThisRank", "[] of ThisRank"]);
    assert_eq!(run(3, true), ["[7] of OneForAll"; 3]);
}

thread_local! {
    /// The accelerator and the model that this rank's hook uses.
    static ASKED: RefCell<Option<(Accelerator, Linear)>> = const { RefCell::new(None) };
}

/// Queries all reports of a model from the accelerator within a step, and tries to save the model.
fn ask(folder: &Path, step: u64) -> Result<(), HookError> {
    ASKED.with_borrow(|asked| {
        let (accelerator, model) = asked.as_ref().unwrap();
        let report = accelerator.overlap_report(model)?;
        assert_eq!(report.state, OverlapState::Off);
        // The report is that of the previous step.
        assert_eq!(report.buckets, usize::from(step > 0));
        assert_eq!(accelerator.loss_scale(model)?, None);
        assert!(accelerator.bucket_memory() > 0);
        assert_eq!(accelerator.step_summary().is_some(), step > 0);
        let _ = accelerator.working_copy(model, |_| false);
        assert!(!accelerator.check_trigger()?);
        accelerator.check_replicas(model)?;
        let other = accelerator.prepare(line(&accelerator.device()))?;
        assert_eq!(accelerator.overlap_report(&other)?.buckets, 0);
        for saved in [
            accelerator.save_state(folder, model).map(drop),
            accelerator.save_state_async(folder, model).map(drop),
        ] {
            let words = ["hook `asking` reduces gradients"];
            assert_chain(&saved.unwrap_err(), Error::is_misuse, &words);
        }
        Ok(())
    })
}

#[test]
fn a_hook_may_ask_the_accelerator_and_is_not_kept_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let train = |accelerator: Accelerator| {
        let (mut model, mut optimizer) = line_and_sgd(&accelerator)?;
        for _ in 0..3 {
            ASKED.set(Some((accelerator.clone(), model.clone())));
            model = learn_ones(&accelerator, model, &mut optimizer, 1)?;
        }
        ASKED.set(None);
        assert_eq!(accelerator.overlap_report(&model)?.buckets, 1);
        Ok(())
    };
    let make = move || {
        let path = path.clone();
        let reduce = move |bucket: &mut GradientBucket<'_>, ranks: &Ranks<'_>| {
            ask(&path, bucket.step())?;
            Ok(bucket.all_reduce(ranks)?)
        };
        Hook("asking", reduce)
    };
    let trained = in_time(move || {
        Accelerator::builder()
            .overlap(Overlap::On)
            .step_summary()
            .communication_hook(make)
            .launch(2, train)
    });
    assert_eq!(trained.unwrap(), [(); 2]);
    let mut saved = folder.path().read_dir().unwrap();
    assert!(saved.next().is_none(), "nothing is saved");
}

/// Calls `backward` for the model that this rank's hook uses.
fn backward_of_asked() -> Result<()> {
    ASKED.with_borrow(|asked| {
        let (accelerator, model) = asked.as_ref().unwrap();
        let input = Tensor::<2>::ones([1, 1], &accelerator.device());
        let gradients = accelerator.backward(model.forward(input).mean(), model, 1);
        gradients.map(drop)
    })
}

#[test]
fn a_hook_that_calls_backward_is_refused_on_every_rank() {
    let train = |accelerator: Accelerator| {
        let model = accelerator.prepare(line(&accelerator.device()))?;
        ASKED.set(Some((accelerator.clone(), model.clone())));
        let outcome = backward_of_asked();
        ASKED.set(None);
        Ok(outcome.unwrap_err())
    };
    let nested = |_: &mut GradientBucket<'_>, _: &Ranks<'_>| Ok(backward_of_asked()?);
    let builder = Accelerator::builder().communication_hook(move || Hook("nested", nested));
    for error in in_time(move || builder.launch(2, train)).unwrap() {
        let text = format!("{error:?}");
        assert!(
            text.contains("`backward` was called while another"),
            "{text}"
        );
    }
}

/// Returns the result of `work`, and panics if it deadlocks.
fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (over, done) = mpsc::channel();
    thread::spawn(move || over.send(work()));
    done.recv_timeout(Duration::from_secs(120)).unwrap()
}
