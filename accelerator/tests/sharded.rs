//! Optimizers whose state is sharded over the ranks do what unsharded ones do.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use std::cell::Cell;
use std::path::Path;

use accelerator::optim::{InitFused, Scheduled, Sharded};
use accelerator::precision::LossScale;
use accelerator::prelude::*;
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::step::StepLrSchedulerConfig;
use burn::module::{Module, ModuleMapper, Param, ParamGroup, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, GradientsParams, LambConfig, ModuleOptimizer,
    MuonConfig, Optimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::activation::tanh;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use common::{Column, ColumnBatcher, columns, loader};

/// A net whose `wide` is cut among up to four ranks. The other parameters belong to one rank each.
#[derive(Debug, Module)]
struct Net {
    first: Linear,
    frozen: Linear,
    wide: Linear,
    unused: Linear,
    last: Linear,
}

impl Net {
    fn new(device: &Device, dtype: DType) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let net = Self {
            first: linear(1, 50),
            frozen: linear(50, 60),
            wide: linear(60, 300),
            unused: linear(2, 3),
            last: linear(300, 1),
        };
        let net = net.map(&mut Fixed { at: 0, dtype });
        net.freeze_group(ParamGroup::from_predicate("frozen"))
    }

    fn loss(&self, batch: &Column, dtype: DType) -> Tensor<1> {
        let x = batch.values.clone().cast(float(dtype));
        let y = tanh(self.first.forward(x.clone()));
        let y = tanh(self.wide.forward(tanh(self.frozen.forward(y))));
        (self.last.forward(y) - x * 3.0 + 1.0).powi_scalar(2).mean()
    }
}

/// Sets weights that do not depend on the generator, which threads share.
struct Fixed {
    at: usize,
    dtype: DType,
}

impl ModuleMapper for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, old, mapper) = param.consume();
        let count: usize = old.dims().iter().product();
        let values: Vec<f64> = (0..count)
            .map(|at| f64::from(((self.at + at) as f32 * 12.9898).sin()) * 0.3)
            .collect();
        self.at += count;
        let data = TensorData::new(values, old.dims()).convert_dtype(self.dtype);
        let new = Tensor::<D>::from_data(data, (&old.device(), self.dtype));
        Param::from_mapped_value(id, new.set_require_grad(true), mapper)
    }
}

fn float(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Sharded,
    Whole,
}

const BOTH: [State; 2] = [State::Whole, State::Sharded];

#[derive(Clone, Copy)]
struct Case {
    accumulate: usize,
    clip: Option<f64>,
    device: BackendKind,
    dtype: DType,
    make: Make,
    schedule: Schedule,
}

#[derive(Clone, Copy)]
enum Schedule {
    /// Uses a rate of its own for `wide`.
    Groups,
    PerEpoch,
    PerStep,
}

const CASE: Case = Case {
    accumulate: 1,
    clip: None,
    device: BackendKind::Flex,
    dtype: DType::F32,
    make: adamw,
    schedule: Schedule::PerStep,
};

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.05).init()
}

type Make = fn() -> ModuleOptimizer;
type Resumed = accelerator::Result<Vec<Vec<f64>>>;
type Parts = (Net, PreparedOptimizer<Scheduled>, PreparedLoader<Column>);

impl Case {
    fn scheduler(self) -> ModuleLrScheduler {
        let steps = StepLrSchedulerConfig::new(0.02, 2)
            .with_gamma(0.5)
            .init()
            .unwrap();
        match self.schedule {
            Schedule::Groups => ModuleLrScheduler::new(0.02_f64)
                .with_group(ParamGroup::from_predicate("wide"), 0.003_f64),
            Schedule::PerEpoch | Schedule::PerStep => steps,
        }
    }

    fn builder(self) -> accelerator::AcceleratorBuilder {
        let builder = Accelerator::builder()
            .accumulation_steps(self.accumulate)
            .device(self.device)
            // The size makes several buckets.
            .bucket_size(20_000);
        match self.device {
            BackendKind::Flex => builder,
            _ => builder.dtype(float(self.dtype)),
        }
    }

    fn prepare(self, accelerator: &Accelerator, state: State) -> accelerator::Result<Parts> {
        RANK.set(accelerator.rank());
        let model = Net::new(&accelerator.device(), self.dtype);
        // With 10 samples in global batches of 4, one of three ranks is idle in the last step.
        let train = LoaderBuilder::new(ColumnBatcher)
            .global_batch_size(4)
            .build(columns(10));
        let (optimizer, scheduler) = ((self.make)(), self.scheduler());
        match (state, self.schedule) {
            (State::Whole, Schedule::PerEpoch) => {
                accelerator.prepare((model, (optimizer, PerEpoch(scheduler)), train))
            }
            (State::Whole, _) => accelerator.prepare((model, (optimizer, scheduler), train)),
            (State::Sharded, Schedule::PerEpoch) => {
                accelerator.prepare((model, (Sharded(optimizer), PerEpoch(scheduler)), train))
            }
            (State::Sharded, _) => {
                accelerator.prepare((model, (Sharded(optimizer), scheduler), train))
            }
        }
    }

    /// Trains for some epochs and returns the model's values after each step.
    fn train(
        self,
        accelerator: &Accelerator,
        parts: Parts,
        epochs: core::ops::Range<u64>,
    ) -> accelerator::Result<(Parts, Vec<Vec<f64>>)> {
        let (mut model, mut optimizer, train) = parts;
        let mut values = Vec::new();
        for epoch in epochs {
            for batch in train.epoch(epoch) {
                let batch = batch?;
                let loss = model.loss(&batch, self.dtype);
                let mut gradients = accelerator.backward(loss, &model, &batch)?;
                if let Some(max) = self.clip {
                    gradients = gradients.clip_norm(max);
                }
                model = optimizer.step(model, gradients);
                values.push(flat(&model));
            }
        }
        Ok(((model, optimizer, train), values))
    }

    fn run(self, ranks: usize, state: State) -> Vec<Vec<f64>> {
        let outcomes = self.builder().launch(ranks, |accelerator| {
            let parts = self.prepare(&accelerator, state)?;
            let (parts, values) = self.train(&accelerator, parts, 0..2)?;
            assert!(matches!(parts.1.outcome(), StepOutcome::Stepped { .. }));
            assert_eq!(parts.1.steps(), if self.accumulate == 1 { 6 } else { 4 });
            Ok(values)
        });
        of_every_rank(outcomes.unwrap())
    }

    /// Trains for the first epoch and saves.
    fn save(self, folder: &Path, ranks: usize, state: State) {
        let saved = self.builder().launch(ranks, |accelerator| {
            let parts = self.prepare(&accelerator, state)?;
            let ((model, optimizer, train), _) = self.train(&accelerator, parts, 0..1)?;
            accelerator.save_state(folder, (&model, &optimizer, &train))
        });
        saved.unwrap();
    }

    /// Resumes from a checkpoint and trains for the second epoch.
    fn resume(self, folder: &Path, ranks: usize, state: State) -> Vec<Resumed> {
        let outcomes = self.builder().launch(ranks, |accelerator| {
            let parts = self.prepare(&accelerator, state)?;
            let (parts, position) = match accelerator.resume(folder, parts) {
                Ok(resumed) => resumed,
                Err(error) => return Ok(Err(error)),
            };
            assert_eq!((position.epoch(), position.step()), (1, 3));
            let (_, values) = self.train(&accelerator, parts, 1..2)?;
            Ok(Ok(values))
        });
        outcomes.unwrap()
    }

    fn check(self, name: &str) {
        for ranks in [1, 2, 3] {
            let whole = self.run(ranks, State::Whole);
            assert_ne!(whole.first(), whole.last(), "{name}: nothing was learnt");
            let finite = |values: &Vec<f64>| values.iter().all(|value| value.is_finite());
            assert!(whole.iter().all(finite), "{name}");
            assert!(
                self.run(ranks, State::Sharded) == whole,
                "{name}, {ranks} ranks"
            );
        }
    }
}

/// Returns the values of the ranks, which must be equal.
fn of_every_rank(outcomes: Vec<Vec<Vec<f64>>>) -> Vec<Vec<f64>> {
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
    outcomes.into_iter().next().unwrap()
}

fn flat(model: &Net) -> Vec<f64> {
    let mut values = Vec::new();
    for linear in [
        &model.first,
        &model.frozen,
        &model.wide,
        &model.unused,
        &model.last,
    ] {
        values.extend(linear.weight.val().into_data().iter::<f64>());
        let bias = linear.bias.as_ref().unwrap();
        values.extend(bias.val().into_data().iter::<f64>());
    }
    values
}

#[test]
fn every_optimizer_learns_the_same_bits() {
    let optimizers: [(&str, Make); 10] = [
        ("adagrad", || AdaGradConfig::new().init()),
        ("adam", || AdamConfig::new().with_amsgrad(true).init()),
        ("adamw", adamw),
        ("clipped by tensor", || {
            let clipping = GradientClippingConfig::Norm(0.01);
            AdamWConfig::new().with_grad_clipping(Some(clipping)).init()
        }),
        ("fused adamw", || {
            AdamWConfig::new().with_weight_decay(0.05).init_fused()
        }),
        ("fused sgd", || SgdConfig::new().init_fused()),
        ("lamb", || LambConfig::new().init()),
        ("muon and sgd", || {
            let wide = ParamGroup::from_predicate("wide.weight");
            SgdConfig::new()
                .init()
                .with_group(wide, MuonConfig::new().build(), None)
        }),
        ("momentum", || {
            SgdConfig::new()
                .with_momentum(Some(MomentumConfig::new().with_nesterov(true)))
                .init()
        }),
        ("rmsprop", || RmsPropConfig::new().init()),
    ];
    for (name, make) in optimizers {
        Case { make, ..CASE }.check(name);
    }
}

thread_local! {
    static RANK: Cell<usize> = const { Cell::new(0) };
}

/// Gradient descent that rounds differently on one rank, as another processor might, for tensors of the size of the
/// sample that an optimizer is judged by.
#[derive(Clone)]
struct Rounding {
    rank: usize,
}

impl Optimizer for Rounding {
    type State<const D: usize> = ();

    fn step<const D: usize>(
        &self,
        rate: f64,
        tensor: Tensor<D>,
        gradient: Tensor<D>,
        _state: Option<()>,
    ) -> (Tensor<D>, Option<()>) {
        let is_odd = RANK.get() == self.rank && tensor.shape().num_elements() == 48;
        let stepped = tensor - gradient.mul_scalar(rate);
        let rounded = if is_odd { stepped + 1e-6 } else { stepped };
        (rounded, Some(()))
    }

    fn to_device<const D: usize>(_state: (), _device: &Device) {}
}

#[test]
fn ranks_whose_processors_round_differently_cut_the_same_parameters() {
    let cases: [(&str, Make); 2] = [
        ("rank 0 is another processor", || {
            Rounding { rank: 0 }.into()
        }),
        ("rank 1 is another processor", || {
            Rounding { rank: 1 }.into()
        }),
    ];
    for (name, make) in cases {
        Case { make, ..CASE }.check(name);
    }
}

#[test]
fn windows_clipping_schedules_and_groups_stay_as_they_are() {
    Case {
        accumulate: 2,
        clip: Some(0.05),
        ..CASE
    }
    .check("windows, clipped");
    Case {
        schedule: Schedule::PerEpoch,
        ..CASE
    }
    .check("a rate an epoch");
    Case {
        schedule: Schedule::Groups,
        clip: Some(0.5),
        ..CASE
    }
    .check("groups of rates");
    let two_kinds = || {
        let last = ParamGroup::from_predicate("last");
        adamw().with_group(last, SgdConfig::new().build(), None)
    };
    Case {
        make: two_kinds,
        accumulate: 2,
        ..CASE
    }
    .check("groups of optimizers");
}

/// Fused optimizers read sums in place, and Burn's get copies.
#[test]
fn steps_from_sums_have_burns_bits() {
    let pairs: [(&str, Make, Make); 3] = [
        ("adamw", adamw, || {
            AdamWConfig::new().with_weight_decay(0.05).init_fused()
        }),
        (
            "amsgrad",
            || AdamConfig::new().with_amsgrad(true).init(),
            || AdamConfig::new().with_amsgrad(true).init_fused(),
        ),
        (
            "two kinds",
            || {
                let last = ParamGroup::from_predicate("last");
                adamw().with_group(last, SgdConfig::new().build(), None)
            },
            || {
                let last = ParamGroup::from_predicate("last");
                let fused = AdamWConfig::new().with_weight_decay(0.05).init_fused();
                fused.with_group(last, SgdConfig::new().build(), None)
            },
        ),
    ];
    for (name, burns, fused) in pairs {
        for (clip, dtype) in [
            (None, DType::F32),
            (Some(0.05), DType::F32),
            (None, DType::F64),
        ] {
            let case = Case {
                clip,
                dtype,
                ..CASE
            };
            let expected = Case {
                make: burns,
                ..case
            }
            .run(2, State::Whole);
            for state in BOTH {
                let found = Case {
                    make: fused,
                    ..case
                }
                .run(2, state);
                assert!(found == expected, "{name}, {state:?}, clipped to {clip:?}");
            }
        }
    }
}

#[test]
fn other_types_learn_the_same_bits() {
    let momentum: Make = || {
        SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .init_fused()
    };
    // Adam's squares exceed the range of f16.
    let cases = [
        (DType::F64, adamw as Make),
        (DType::F64, momentum),
        (DType::BF16, adamw),
        (DType::F16, momentum),
    ];
    for (dtype, make) in cases {
        for clip in [None, Some(0.1)] {
            let case = Case {
                clip,
                dtype,
                make,
                ..CASE
            };
            case.check(&format!("{dtype:?}, clipped to {clip:?}"));
        }
    }
}

#[test]
fn state_is_divided_by_the_number_of_ranks() {
    let memory = |ranks, state| {
        accelerator::launch(ranks, |accelerator| {
            let parts = CASE.prepare(&accelerator, state)?;
            assert_eq!(parts.1.state_memory()?, 0, "before the first step");
            let (parts, _) = CASE.train(&accelerator, parts, 0..1)?;
            parts.1.state_memory()
        })
        .unwrap()
    };
    // There are two moments of each element that takes a gradient.
    let whole = 2 * 4 * (50 + 50 + 60 * 300 + 300 + 300 + 1);
    assert_eq!(memory(2, State::Whole), [whole, whole]);
    for ranks in [2, 3] {
        let parts = memory(ranks, State::Sharded);
        assert_eq!(parts.iter().sum::<usize>(), whole, "each element once");
        for part in parts {
            assert!(
                part.abs_diff(whole / ranks) < whole / 20,
                "{part} of {whole}"
            );
        }
    }
}

fn resumed(folder: &Path, ranks: usize, state: State) -> Vec<Vec<f64>> {
    let outcomes = CASE.resume(folder, ranks, state).into_iter();
    of_every_rank(outcomes.map(Result::unwrap).collect())
}

/// Returns cases whose parameters are of another type than Burn loads state in.
fn of_another_type() -> Vec<Case> {
    let case = |dtype| Case { dtype, ..CASE };
    let mut cases: Vec<_> = [DType::F64, DType::F16, DType::BF16].map(case).into();
    if BackendKind::NdArray.is_compiled_in() {
        cases.push(Case {
            device: BackendKind::NdArray,
            ..case(DType::F64)
        });
    }
    cases
}

const FUSED: [Make; 3] = [
    || AdamWConfig::new().with_weight_decay(0.05).init_fused(),
    || AdamConfig::new().with_amsgrad(true).init_fused(),
    || {
        SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .init_fused()
    },
];

#[test]
fn fused_state_of_another_type_than_the_default_devices_continues_with_the_same_bits() {
    for case in of_another_type() {
        for (kind, make) in FUSED.into_iter().enumerate() {
            let case = Case { make, ..case };
            let uninterrupted = case.run(2, State::Whole).split_off(3);
            for state in BOTH {
                let folder = tempfile::tempdir().unwrap();
                case.save(folder.path(), 2, state);
                for outcome in case.resume(folder.path(), 2, state) {
                    assert!(
                        outcome.unwrap() == uninterrupted,
                        "{:?} {:?} {state:?}, optimizer {kind}",
                        case.device,
                        case.dtype
                    );
                }
            }
        }
    }
}

#[test]
fn burns_state_of_another_type_than_the_default_devices_is_refused_by_the_parameters_name() {
    for case in of_another_type() {
        for state in BOTH {
            let folder = tempfile::tempdir().unwrap();
            case.save(folder.path(), 2, state);
            for outcome in case.resume(folder.path(), 2, state) {
                let error = outcome.unwrap_err();
                assert!(error.is_checkpoint(), "{error:?}");
                check_names_type(&error.to_string(), case.dtype);
            }
        }
    }
}

#[test]
fn state_that_a_program_loaded_in_another_type_is_refused_when_it_is_prepared() {
    for case in of_another_type() {
        for (make, is_refused) in [(adamw as Make, true), (FUSED[0], false)] {
            let outcomes = case.builder().launch(2, |accelerator| {
                let parts = case.prepare(&accelerator, State::Whole)?;
                let ((mut model, optimizer, train), _) = case.train(&accelerator, parts, 0..1)?;
                let record = optimizer.inner().into_bytes().unwrap().to_vec();
                let loaded =
                    || make().from_bytes(burn::tensor::Bytes::from_bytes_vec(record.clone()));
                let whole = accelerator.prepare(loaded().unwrap());
                let sharded = accelerator.prepare(Sharded(loaded().unwrap()));
                let mut errors = Vec::new();
                for prepared in [whole, sharded] {
                    let mut optimizer = match prepared {
                        Ok(optimizer) => optimizer,
                        Err(error) => {
                            errors.push(error);
                            continue;
                        }
                    };
                    let batch = train.epoch(1).next().unwrap()?;
                    let loss = model.loss(&batch, case.dtype);
                    let gradients = accelerator.backward(loss, &model, &batch)?;
                    model = optimizer.step(0.02, model, gradients);
                }
                Ok(errors)
            });
            for errors in outcomes.unwrap() {
                assert_eq!(errors.len(), if is_refused { 2 } else { 0 }, "{errors:?}");
                for error in errors {
                    assert!(error.is_checkpoint(), "{error:?}");
                    check_names_type(&error.to_string(), case.dtype);
                }
            }
        }
    }
}

#[test]
fn state_in_another_type_is_refused_in_the_first_step_where_the_model_is_prepared_later() {
    let case = Case {
        dtype: DType::F64,
        ..CASE
    };
    for state in BOTH {
        let ranks = if state == State::Whole { 1 } else { 2 };
        let outcomes = case.builder().launch(ranks, |accelerator| {
            let device = accelerator.device();
            let mut model = Net::new(&device, case.dtype);
            // Every rank has state of rank 0's parameters.
            model.last.weight.id = ParamId::from(7);
            let mut gradients = GradientsParams::new();
            let weight = &model.last.weight;
            let (shape, options) = (weight.val().shape(), (&device.inner(), case.dtype));
            gradients.register(weight.id, Tensor::<2>::ones(shape, options));
            let mut optimizer = adamw();
            let model = optimizer.step(0.1, model, gradients);
            let optimizer = adamw().from_bytes(optimizer.into_bytes().unwrap());
            let optimizer = optimizer.unwrap();
            let mut optimizer = match state {
                State::Whole => accelerator.prepare(optimizer)?,
                State::Sharded => accelerator.prepare(Sharded(optimizer))?,
            };
            let (model, train) = accelerator.prepare((model, loader(4, 2)))?;
            let batch = train.epoch(0).next().unwrap()?;
            let gradients = accelerator.backward(model.loss(&batch, case.dtype), &model, &batch)?;
            let _model = optimizer.step(0.1, model, gradients);
            assert_eq!(optimizer.outcome(), StepOutcome::Lost);
            accelerator.wait_for_everyone()
        });
        let text = format!("{:?}", outcomes.unwrap_err());
        check_names_type(&text, case.dtype);
    }
}

/// Asserts that the message names a parameter and both types.
fn check_names_type(text: &str, dtype: DType) {
    let paths = ["`first.", "`wide.", "`last."];
    assert!(paths.iter().any(|path| text.contains(path)), "{text}");
    assert!(
        text.contains(&format!("{dtype:?}").to_lowercase()),
        "{text}"
    );
    assert!(text.contains("f32"), "{text}");
}

#[test]
fn checkpoints_are_the_same_with_and_without_shards_and_fit_any_number_of_ranks() {
    let uninterrupted = CASE.run(2, State::Whole).split_off(3);
    for saved_by in BOTH {
        let folder = tempfile::tempdir().unwrap();
        accelerator::launch(2, |accelerator| {
            let parts = CASE.prepare(&accelerator, saved_by)?;
            let ((model, optimizer, train), _) = CASE.train(&accelerator, parts, 0..1)?;
            let saving =
                accelerator.save_state_async(folder.path(), (&model, &optimizer, &train))?;
            saving.wait().map(|_| ())
        })
        .unwrap();
        for state in BOTH {
            assert!(
                resumed(folder.path(), 2, state) == uninterrupted,
                "saved {saved_by:?}, resumed {state:?}"
            );
        }
        let whole = resumed(folder.path(), 3, State::Whole);
        assert!(
            resumed(folder.path(), 3, State::Sharded) == whole,
            "saved {saved_by:?}"
        );
        let alone = resumed(folder.path(), 1, State::Whole);
        assert!(
            resumed(folder.path(), 1, State::Sharded) == alone,
            "saved {saved_by:?}"
        );
    }
}

#[test]
fn what_was_resumed_and_not_stepped_is_saved_again() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    accelerator::launch(2, |accelerator| {
        let parts = CASE.prepare(&accelerator, State::Sharded)?;
        let ((model, optimizer, train), _) = CASE.train(&accelerator, parts, 0..1)?;
        accelerator.save_state(first.path(), (&model, &optimizer, &train))?;
        let parts = CASE.prepare(&accelerator, State::Sharded)?;
        let ((model, optimizer, train), _) = accelerator.resume(first.path(), parts)?;
        assert!(optimizer.state_memory()? > 0);
        accelerator.save_state(second.path(), (&model, &optimizer, &train))
    })
    .unwrap();
    let expected = resumed(first.path(), 2, State::Whole);
    assert!(resumed(second.path(), 2, State::Whole) == expected);
}

#[test]
fn another_kind_of_optimizer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let errors = accelerator::launch(2, |accelerator| {
        let parts = CASE.prepare(&accelerator, State::Sharded)?;
        let ((model, optimizer, train), _) = CASE.train(&accelerator, parts, 0..1)?;
        accelerator.save_state(folder.path(), (&model, &optimizer, &train))?;
        let other = Case {
            make: || SgdConfig::new().init(),
            ..CASE
        };
        let parts = other.prepare(&accelerator, State::Sharded)?;
        Ok(accelerator.resume(folder.path(), parts).unwrap_err())
    })
    .unwrap();
    for error in errors {
        assert!(error.is_checkpoint(), "{error:?}");
    }
}

#[test]
fn a_rank_that_is_lost_in_a_step_leaves_the_model_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    accelerator::launch(2, |accelerator| {
        let (mut model, mut optimizer, train) = CASE.prepare(&accelerator, State::Sharded)?;
        let mut batches = train.epoch(0);
        for batch in batches.by_ref().take(2) {
            let batch = batch?;
            let gradients = accelerator.backward(model.loss(&batch, CASE.dtype), &model, &batch)?;
            model = optimizer.step(model, gradients);
        }
        // The third step has another learning rate.
        let before = (flat(&model), optimizer.steps(), optimizer.learning_rate());
        let batch = batches.next().unwrap()?;
        let gradients = accelerator.backward(model.loss(&batch, CASE.dtype), &model, &batch)?;
        if accelerator.rank() == 1 {
            return Ok(());
        }
        model = optimizer.step(model, gradients);
        assert_eq!(optimizer.outcome(), StepOutcome::Lost);
        let after = (flat(&model), optimizer.steps(), optimizer.learning_rate());
        assert_eq!(after, before);
        let loss = model.loss(&batch, CASE.dtype);
        let error = accelerator.backward(loss, &model, &batch).unwrap_err();
        assert!(error.is_collective(), "{error:?}");
        let error = accelerator
            .save_emergency(folder.path(), (&model, &optimizer, &train))
            .unwrap_err();
        assert!(
            error.is_misuse() && error.to_string().contains("sharded"),
            "{error:?}"
        );
        let saved = accelerator.save_emergency(folder.path(), (&model, &train))?;
        assert!(saved.is_some());
        Ok(())
    })
    .unwrap();
    // The samples of the lost step come again.
    let accelerator = Accelerator::new().unwrap();
    let (model, _, train) = CASE.prepare(&accelerator, State::Whole).unwrap();
    let resumed = accelerator.resume(folder.path(), (model, train));
    let ((_, train), position) = resumed.unwrap();
    assert_eq!((position.epoch(), position.step()), (0, 2));
    assert_eq!(train.epoch(0).next().unwrap().unwrap().step(), 2);
}

#[test]
fn the_loss_scale_moves_with_the_step() {
    let builder = Accelerator::builder()
        .precision(Precision::F16)
        .loss_scale(LossScale::new().with_initial(64.0).with_growth_interval(1));
    builder
        .launch(2, |accelerator| {
            let device = accelerator.device();
            let linear: Linear = accelerator.init(|device| LinearConfig::new(3, 2).init(device));
            let (mut model, mut optimizer) = accelerator.prepare((linear, Sharded(adamw())))?;
            let backward = |model: &Linear| {
                let loss = model.forward(Tensor::<2>::ones([2, 3], &device)).mean();
                accelerator.backward(loss, model, 2)
            };
            let gradients = backward(&model)?;
            assert_eq!(accelerator.loss_scale(&model)?, Some(64.0));
            model = optimizer.step(0.1, model, gradients);
            assert_eq!(accelerator.loss_scale(&model)?, Some(128.0));
            let gradients = backward(&model)?;
            if accelerator.rank() == 1 {
                return Ok(());
            }
            model = optimizer.step(0.1, model, gradients);
            assert_eq!(optimizer.outcome(), StepOutcome::Lost);
            assert_eq!(accelerator.loss_scale(&model)?, Some(128.0));
            Ok(())
        })
        .unwrap();
}

#[test]
fn gradients_of_another_accelerator_are_refused_by_that_name() {
    accelerator::launch(2, |accelerator| {
        let linear: Linear = accelerator.init(|device| LinearConfig::new(3, 2).init(device));
        let (model, mut optimizer) = accelerator.prepare((linear, Sharded(adamw())))?;
        let alone = Accelerator::builder()
            .device(accelerator.backend_kind())
            .build()?;
        let model = alone.prepare(model)?;
        let input = Tensor::<2>::ones([2, 3], &alone.device());
        let gradients = alone.backward(model.forward(input).mean(), &model, 2)?;
        accelerator.wait_for_everyone()?;
        let _model = optimizer.step(0.1, model, gradients);
        assert_eq!(optimizer.outcome(), StepOutcome::Lost);
        let error = accelerator.wait_for_everyone().unwrap_err();
        let text = format!("{error:?}");
        assert!(text.contains("another accelerator"), "{text}");
        Ok(())
    })
    .unwrap();
}
