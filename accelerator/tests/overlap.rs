//! Gradients that are sent while backward runs: the same bits, whatever the graph does.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod common;

use core::fmt::Display;

use accelerator::prelude::*;
use accelerator::{Compression, Overlap, OverlapReport, OverlapState, Weight};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use common::devices;

/// A call of `backward`.
struct Place {
    device: Device,
    rank: usize,
    step: usize,
}

impl Place {
    /// Numbers that differ between ranks and steps.
    fn input<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        let count: usize = shape.iter().product();
        let seed = (self.rank * 31 + self.step * 7) as f32;
        let values = (0..count).map(|i| ((i as f32) * 0.37 + seed).sin());
        let values = TensorData::new(values.collect::<Vec<f32>>(), shape);
        Tensor::from_data(values, &self.device.clone().inner())
    }

    /// A batch of another size on each rank.
    fn rows(&self) -> usize {
        3 + self.rank
    }
}

#[derive(Clone, Copy)]
struct Setting {
    accumulation: usize,
    compression: Compression,
    kind: DeviceKind,
    ranks: usize,
    steps: usize,
    weight: fn(&Place) -> f64,
}

impl Setting {
    fn new(kind: DeviceKind) -> Self {
        Self {
            accumulation: 1,
            compression: Compression::None,
            kind,
            ranks: 2,
            steps: 6,
            weight: |place| place.rows() as f64,
        }
    }
}

/// What a rank ends with, bit for bit, and how it was sent.
#[derive(Debug)]
struct Outcome {
    parameters: Vec<TensorData>,
    losses: Vec<u64>,
    norms: Vec<u64>,
    report: OverlapReport,
}

fn run<M: Module + Display>(
    setting: Setting,
    overlap: Overlap,
    build: &(impl Fn(&Device) -> M + Sync),
    loss: &(impl Fn(&M, &Place) -> Tensor<1> + Sync),
) -> Vec<Outcome> {
    Accelerator::builder()
        .device(setting.kind)
        .bucket_size(1024)
        .accumulation_steps(setting.accumulation)
        .with_compression(setting.compression)
        .with_overlap(overlap)
        .launch(setting.ranks, |accelerator| {
            let model = known(build(&accelerator.device()));
            let (mut model, mut optimizer) =
                accelerator.prepare((model, AdamWConfig::new().init()))?;
            let (mut losses, mut norms) = (Vec::new(), Vec::new());
            for step in 0..setting.steps * setting.accumulation {
                let place = Place {
                    device: accelerator.device(),
                    rank: accelerator.rank(),
                    step,
                };
                let weight = (setting.weight)(&place);
                let gradients = accelerator.backward(loss(&model, &place), &model, weight)?;
                losses.extend(gradients.loss().map(f64::to_bits));
                let mut gradients = gradients.clip_norm(0.5);
                norms.extend(gradients.norm().map(f64::to_bits));
                model = optimizer.step(0.05, model, gradients);
            }
            Ok(Outcome {
                parameters: parameters(&model),
                losses,
                norms,
                report: accelerator.overlap_report(&model)?,
            })
        })
        .unwrap()
}

/// Trains with overlap and without, compares everything, and gives the reports of those with.
fn same_bits<M: Module + Display>(
    setting: Setting,
    build: impl Fn(&Device) -> M + Sync,
    loss: impl Fn(&M, &Place) -> Tensor<1> + Sync,
) -> Vec<OverlapReport> {
    let off = run(setting, Overlap::Off, &build, &loss);
    let on = run(setting, Overlap::On, &build, &loss);
    assert!(!off[0].parameters.is_empty() && off[0].losses.len() == setting.steps);
    for outcome in off.iter().chain(&on) {
        assert_eq!(outcome.parameters, off[0].parameters);
        assert_eq!(outcome.losses, off[0].losses);
        assert_eq!(outcome.norms, off[0].norms);
    }
    assert!(
        off.iter()
            .all(|off| off.report.state == OverlapState::Off && off.report.early == 0)
    );
    on.into_iter().map(|outcome| outcome.report).collect()
}

fn assert_on(reports: &[OverlapReport]) {
    for report in reports {
        assert_eq!(report.state, OverlapState::On, "{report:?}");
        assert!(
            report.early > 0 && report.early < report.buckets,
            "{report:?}"
        );
        assert_eq!(report.repairs, 0, "{report:?}");
    }
}

/// What is trained. Running statistics are each rank's own.
fn parameters<M: Module>(model: &M) -> Vec<TensorData> {
    struct Reader(Vec<TensorData>);
    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_require_grad() {
                self.0.push(param.val().into_data());
            }
        }
    }
    let mut reader = Reader(Vec::new());
    model.visit(&mut reader);
    reader.0
}

/// The model with values that are the same each time. Tests beside this one draw from the same
/// generator.
fn known<M: Module>(model: M) -> M {
    struct Known(f32);
    impl ModuleMapper for Known {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (id, old, mapper) = param.consume();
            // A variance must not be negative.
            let mean = if D == 1 { 0.5 } else { 0.0 };
            let values = (0..old.shape().num_elements()).map(|_| {
                self.0 += 1.0;
                mean + 0.3 * (self.0 * 1.7).sin()
            });
            let values = TensorData::new(values.collect::<Vec<f32>>(), old.shape());
            let new = Tensor::from_data(
                values.convert_dtype(old.dtype()),
                (&old.device(), old.dtype()),
            );
            Param::from_mapped_value(id, new.set_require_grad(old.is_require_grad()), mapper)
        }
    }
    model.map(&mut Known(0.0))
}

#[derive(Debug, Module)]
struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    const WIDTH: usize = 16;

    fn new(depth: usize, device: &Device) -> Self {
        let layer = |_| LinearConfig::new(Self::WIDTH, Self::WIDTH).init(device);
        Self {
            layers: (0..depth).map(layer).collect(),
        }
    }

    fn four(device: &Device) -> Self {
        Self::new(4, device)
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.layers
            .iter()
            .fold(input, |x, layer| relu(layer.forward(x)) + 0.1)
    }

    fn loss(&self, place: &Place) -> Tensor<1> {
        let output = self.forward(place.input([place.rows(), Self::WIDTH]));
        (output.clone() * output).mean()
    }
}

#[test]
fn a_network_has_the_same_bits_on_any_number_of_ranks() {
    for kind in devices() {
        for ranks in [2, 3] {
            let setting = Setting {
                ranks,
                ..Setting::new(kind)
            };
            assert_on(&same_bits(setting, Mlp::four, Mlp::loss));
        }
    }
}

#[derive(Debug, Module)]
struct Cnn {
    first: Conv2d,
    norm: BatchNorm,
    second: Conv2d,
    last: Linear,
}

impl Cnn {
    fn new(device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([1, 8], [3, 3]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            second: Conv2dConfig::new([8, 8], [3, 3]).init(device),
            last: LinearConfig::new(8 * 4 * 4, 3).init(device),
        }
    }

    fn loss(&self, place: &Place) -> Tensor<1> {
        let x = place.input([place.rows(), 1, 8, 8]);
        let x = relu(self.norm.forward(self.first.forward(x)));
        let x = relu(self.second.forward(x));
        let x = self.last.forward(x.flatten::<2>(1, 3));
        (x.clone() * x).mean()
    }
}

#[test]
fn a_network_with_batch_norm() {
    for kind in devices() {
        assert_on(&same_bits(Setting::new(kind), Cnn::new, Cnn::loss));
    }
}

#[derive(Debug, Module)]
struct Tied {
    embedding: Embedding,
    layers: Mlp,
}

#[test]
fn a_weight_that_is_used_at_both_ends() {
    for kind in devices() {
        let build = |device: &Device| Tied {
            embedding: EmbeddingConfig::new(10, Mlp::WIDTH).init(device),
            layers: Mlp::four(device),
        };
        let loss = |model: &Tied, place: &Place| {
            let words: Vec<i64> = (0..6).map(|i| (i * 3 + place.step as i64) % 10).collect();
            let words = TensorData::new(words, [2, 3]);
            let words = Tensor::<2, Int>::from_data(words, &place.device.clone().inner());
            let x = model.embedding.forward(words).flatten::<2>(0, 1);
            let x = model.layers.forward(x);
            let scores = x.matmul(model.embedding.weight.val().transpose());
            (scores.clone() * scores).mean()
        };
        assert_on(&same_bits(Setting::new(kind), build, loss));
    }
}

#[test]
fn frozen_parameters() {
    for kind in devices() {
        let build = |device: &Device| {
            let mut model = Mlp::four(device);
            let layer = model.layers.remove(2).no_grad();
            model.layers.insert(2, layer);
            model
        };
        assert_on(&same_bits(Setting::new(kind), build, Mlp::loss));
    }
}

#[test]
fn parameters_that_no_rank_uses_or_only_some_do() {
    for kind in devices() {
        let setting = Setting::new(kind);
        // The last layer is used by nobody, the one before it by rank 1.
        let build = |device: &Device| Mlp::new(6, device);
        let loss = |model: &Mlp, place: &Place| {
            let used = if place.rank == 1 { 5 } else { 4 };
            let layers = Mlp {
                layers: model.layers[..used].to_vec(),
            };
            layers.loss(place)
        };
        for report in same_bits(setting, build, loss) {
            assert_eq!(report.state, OverlapState::On);
            assert_eq!(report.repairs, 0);
        }
        // A layer that rank 1 does not use, in the middle.
        let loss = |model: &Mlp, place: &Place| {
            let mut layers = model.clone();
            if place.rank == 1 {
                layers.layers.remove(2);
            }
            layers.loss(place)
        };
        for report in same_bits(setting, Mlp::four, loss) {
            assert_eq!(report.repairs, 0);
        }
    }
}

/// Uses a weight at the top of the graph, and from the fourth step on at its bottom too.
fn top_and_later_bottom(model: &Mlp, place: &Place) -> Tensor<1> {
    let mut x = place.input([place.rows(), Mlp::WIDTH]);
    if place.step >= 3 {
        x = relu(model.layers[3].forward(x)) + 0.1;
    }
    let output = model.forward(x);
    (output.clone() * output).mean()
}

#[test]
fn what_was_sent_too_early_is_reduced_again_and_given_up_after_three_times() {
    for kind in devices() {
        for (steps, repairs, state) in [
            (4, 1, OverlapState::On),
            (5, 2, OverlapState::On),
            (6, 3, OverlapState::GivenUp),
            (8, 3, OverlapState::GivenUp),
        ] {
            let setting = Setting {
                steps,
                ..Setting::new(kind)
            };
            for report in same_bits(setting, Mlp::four, top_and_later_bottom) {
                assert_eq!(
                    (report.repairs, report.state),
                    (repairs, state),
                    "{report:?}"
                );
            }
        }
    }
}

#[test]
fn one_rank_that_sent_too_early_makes_all_repair() {
    for kind in devices() {
        for rank in [0, 1] {
            let loss = move |model: &Mlp, place: &Place| {
                if place.rank == rank {
                    top_and_later_bottom(model, place)
                } else {
                    model.loss(place)
                }
            };
            for report in same_bits(Setting::new(kind), Mlp::four, loss) {
                assert_eq!(report.repairs, 3);
                assert_eq!(report.state, OverlapState::GivenUp);
            }
        }
    }
}

#[test]
fn a_repair_in_the_last_micro_step_keeps_what_was_accumulated() {
    for kind in devices() {
        let setting = Setting {
            accumulation: 3,
            steps: 5,
            ..Setting::new(kind)
        };
        // The first micro-steps of a window are as in the beginning, the last one is not.
        let loss = |model: &Mlp, place: &Place| {
            if place.step % 3 == 2 && place.step > 9 {
                top_and_later_bottom(model, place)
            } else {
                model.loss(place)
            }
        };
        for report in same_bits(setting, Mlp::four, loss) {
            assert_eq!(report.repairs, 2, "{report:?}");
        }
    }
}

#[test]
fn a_graph_that_is_another_one_in_each_step_and_on_each_rank() {
    for kind in devices() {
        let loss = |model: &Mlp, place: &Place| {
            let mut layers = model.clone();
            layers.layers.rotate_left(place.step % 3);
            layers.layers.truncate(2 + (place.step + place.rank) % 3);
            layers.loss(place)
        };
        let setting = Setting {
            steps: 12,
            ..Setting::new(kind)
        };
        same_bits(setting, Mlp::four, loss);
    }
}

#[test]
fn gradient_checkpointing() {
    for kind in devices() {
        let build = |device: &Device| Mlp::four(&device.clone().gradient_checkpointing());
        assert_on(&same_bits(Setting::new(kind), build, Mlp::loss));
    }
}

#[test]
fn two_losses_added() {
    for kind in devices() {
        let loss = |model: &Mlp, place: &Place| {
            let second = Place {
                device: place.device.clone(),
                rank: place.rank,
                step: place.step + 100,
            };
            model.loss(place) + model.loss(&second) * 0.5
        };
        assert_on(&same_bits(Setting::new(kind), Mlp::four, loss));
    }
}

#[test]
fn accumulation() {
    for kind in devices() {
        let setting = Setting {
            accumulation: 3,
            ..Setting::new(kind)
        };
        assert_on(&same_bits(setting, Mlp::four, Mlp::loss));
    }
}

#[test]
fn ranks_that_idle_now_and_then() {
    for kind in devices() {
        let setting = Setting {
            weight: |place| {
                // In the steps in which it is learnt what is ready, too.
                if place.step % 2 == place.rank {
                    0.0
                } else {
                    4.0
                }
            },
            ..Setting::new(kind)
        };
        let loss = |model: &Mlp, place: &Place| {
            let loss = model.loss(place);
            if place.step % 2 == place.rank {
                loss * f32::NAN
            } else {
                loss
            }
        };
        for report in same_bits(setting, Mlp::four, loss) {
            assert_eq!((report.state, report.repairs), (OverlapState::On, 0));
        }
    }
}

#[test]
fn gradients_in_half_precision() {
    for kind in devices() {
        for compression in [Compression::F16, Compression::Bf16] {
            for accumulation in [1, 2] {
                let setting = Setting {
                    accumulation,
                    compression,
                    ..Setting::new(kind)
                };
                // Whether the weights are known in time is a matter of luck.
                for report in same_bits(setting, Mlp::four, Mlp::loss) {
                    assert_eq!((report.state, report.repairs), (OverlapState::On, 0));
                }
                same_bits(setting, Mlp::four, top_and_later_bottom);
            }
        }
    }
}

#[test]
fn what_overflows_in_one_bucket_leaves_no_trace_of_the_layout() {
    for kind in devices() {
        for accumulation in [1, 2] {
            let setting = Setting {
                accumulation,
                compression: Compression::F16,
                ..Setting::new(kind)
            };
            // The gradient of one bias is beyond f16. Its bucket holds others with overlap, and none
            // without. In the first steps everything fits.
            let loss = |model: &Mlp, place: &Place| {
                let factor = if place.step < 4 { 1.0 } else { 1000.0 };
                let bias = model.layers[1].bias.as_ref().unwrap();
                model.loss(place) + bias.val().sum() * factor
            };
            for report in same_bits(setting, Mlp::four, loss) {
                assert_eq!((report.state, report.repairs), (OverlapState::On, 0));
            }
        }
    }
}

/// Parameters of several types.
#[derive(Debug, Module)]
struct Mixed {
    layers: Mlp,
    half: Param<Tensor<2>>,
    brain: Param<Tensor<2>>,
    double: Param<Tensor<2>>,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        let weight = |dtype: DType| {
            Param::from_tensor(Tensor::<2>::zeros(
                [Mlp::WIDTH, Mlp::WIDTH],
                (device, dtype),
            ))
        };
        Self {
            layers: Mlp::four(device),
            half: weight(DType::F16),
            brain: weight(DType::BF16),
            double: weight(DType::F64),
        }
    }

    fn loss(&self, place: &Place) -> Tensor<1> {
        let mut x = self.layers.forward(place.input([place.rows(), Mlp::WIDTH]));
        for weight in [&self.half, &self.brain, &self.double] {
            let weight = weight.val();
            let dtype = weight.dtype();
            x = relu(x.cast(dtype).matmul(weight)).cast(DType::F32) + 0.1;
        }
        (x.clone() * x).mean()
    }
}

#[test]
fn parameters_of_several_types() {
    // ndarray has no half precision.
    for kind in devices().filter(|kind| *kind == DeviceKind::Flex) {
        assert_on(&same_bits(Setting::new(kind), Mixed::new, Mixed::loss));
    }
}

#[test]
fn two_models_in_turn_and_two_backward_calls_in_a_step() {
    for kind in devices() {
        let outcomes = [Overlap::Off, Overlap::On].map(|overlap| {
            Accelerator::builder()
                .device(kind)
                .bucket_size(1024)
                .with_overlap(overlap)
                .launch(2, |accelerator| {
                    let parts = (
                        known(Mlp::four(&accelerator.device())),
                        SgdConfig::new().init(),
                        known(Cnn::new(&accelerator.device())),
                        SgdConfig::new().init(),
                    );
                    let (mut mlp, mut first, mut cnn, mut second) = accelerator.prepare(parts)?;
                    for step in 0..6 {
                        let place = Place {
                            device: accelerator.device(),
                            rank: accelerator.rank(),
                            step,
                        };
                        // The losses are there before either of them is used.
                        let (one, other) = (mlp.loss(&place), cnn.loss(&place));
                        let of_cnn = accelerator.backward(other, &cnn, 2)?;
                        let of_mlp = accelerator.backward(one, &mlp, 2)?;
                        // Legal in plain Burn: the gradients are thrown away.
                        drop(accelerator.backward(mlp.loss(&place), &mlp, 2)?);
                        let plain = mlp.loss(&place).backward();
                        drop(GradientsParams::from_grads(plain, &mlp));
                        mlp = first.step(0.05, mlp, of_mlp);
                        cnn = second.step(0.05, cnn, of_cnn);
                    }
                    let reports = [
                        accelerator.overlap_report(&mlp)?,
                        accelerator.overlap_report(&cnn)?,
                    ];
                    if overlap == Overlap::On {
                        assert_on(&reports);
                    }
                    Ok((parameters(&mlp), parameters(&cnn)))
                })
                .unwrap()
        });
        assert_eq!(outcomes[0], outcomes[1]);
        assert_eq!(outcomes[0][0], outcomes[0][1]);
    }
}

#[test]
fn buckets_hold_the_gradients_once() {
    const WIDTH: usize = 128;
    const BUCKET: usize = WIDTH * WIDTH * 4;
    for (overlap, accumulation, times) in [
        (Overlap::Off, 1, 1),
        (Overlap::On, 1, 1),
        (Overlap::Off, 2, 1),
        // A step may have to be undone.
        (Overlap::On, 2, 2),
    ] {
        let outcomes = Accelerator::builder()
            .bucket_size(BUCKET)
            .accumulation_steps(accumulation)
            .with_overlap(overlap)
            .launch(2, |accelerator| {
                let device = accelerator.device();
                let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(&device);
                let model = known(Mlp {
                    layers: (0..6).map(layer).collect(),
                });
                let (mut model, mut optimizer) =
                    accelerator.prepare((model, SgdConfig::new().init()))?;
                assert_eq!(accelerator.bucket_memory(), 0);
                for step in 0..10 {
                    let place = Place {
                        device: accelerator.device(),
                        rank: accelerator.rank(),
                        step,
                    };
                    let loss = model.forward(place.input([2, WIDTH])).mean();
                    let gradients = accelerator.backward(loss, &model, Weight::from(2))?;
                    model = optimizer.step(0.05, model, gradients);
                }
                Ok((accelerator.bucket_memory(), 4 * model.num_params()))
            })
            .unwrap();
        for (bytes, gradients) in outcomes {
            // Buffers are whole pages.
            let bounds = times * gradients..times * gradients + BUCKET;
            assert!(bounds.contains(&bytes), "{bytes}, not within {bounds:?}");
        }
    }
}

#[test]
fn a_rank_that_is_lost_in_the_middle_of_a_step_is_named() {
    let outcomes = Accelerator::builder()
        .bucket_size(1024)
        .with_overlap(Overlap::On)
        .launch(3, |accelerator| {
            let model = accelerator.prepare(known(Mlp::four(&accelerator.device())))?;
            for step in 0..4 {
                let place = Place {
                    device: accelerator.device(),
                    rank: accelerator.rank(),
                    step,
                };
                drop(accelerator.backward(model.loss(&place), &model, 2)?);
            }
            assert_eq!(accelerator.overlap_report(&model)?.state, OverlapState::On);
            if accelerator.rank() == 1 {
                accelerator.group().abort("its disk is full");
                return Ok(None);
            }
            let place = Place {
                device: accelerator.device(),
                rank: accelerator.rank(),
                step: 4,
            };
            Ok(accelerator.backward(model.loss(&place), &model, 2).err())
        })
        .unwrap();
    for error in [&outcomes[0], &outcomes[2]] {
        let error = error.as_ref().unwrap();
        assert!(error.is_peer_lost(), "{error:?}");
        assert_eq!(error.culprit().unwrap().rank(), 1);
    }
}

#[test]
fn the_variable_and_the_program_must_not_contradict_each_other() {
    // The variable is for a process of its own.
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "asks_for_overlap", "--nocapture"])
        .env("ACCEL_OVERLAP", "off")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("refused"), "{text}");
}

#[test]
#[ignore = "a part of another test"]
fn asks_for_overlap() {
    let error = Accelerator::builder()
        .with_overlap(Overlap::On)
        .build()
        .unwrap_err();
    assert!(error.is_config() && error.to_string().contains("ACCEL_OVERLAP"));
    println!("refused: {error}");
}
