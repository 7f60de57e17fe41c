//! A parameter in two places of a model is one parameter everywhere: it follows PyTorch's trajectory and has the bits
//! of a model that has it in one place.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{assert_contains, assert_error, devices};
use accelerator::Overlap;
use accelerator::local::LocalSgdConfig;
use accelerator::model::retie_parameters;
use accelerator::optim::{InitFused, Manual, PreparedOptimizer, Sharded};
use accelerator::prelude::*;
use burn::module::{Module, Param, ParamId};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::{log_softmax, relu, softmax};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use serde::Deserialize;

const TOKENS: usize = 11;
const LENGTH: usize = 6;
const WIDTH: usize = 8;
const SEQUENCES: usize = 4;
const STEPS: usize = 12;
const CLIP: f64 = 0.5;

/// The model of `tests/fixtures/tied_transformer.py`.
#[derive(Debug, Module)]
struct Transformer {
    tokens: Param<Tensor<2>>,
    places: Param<Tensor<2>>,
    query: Param<Tensor<2>>,
    key: Param<Tensor<2>>,
    value: Param<Tensor<2>>,
    output: Param<Tensor<2>>,
    up: Param<Tensor<2>>,
    down: Param<Tensor<2>>,
    /// A clone of `tokens`. Without it, `tokens` itself is used at both ends.
    head: Option<Param<Tensor<2>>>,
}

/// The places of the tied parameter.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Places {
    One,
    Two,
}

impl Transformer {
    fn new(device: &Device, dtype: DType, places: Places) -> Self {
        let values = |number: usize, shape: [usize; 2]| {
            let count = shape[0] * shape[1];
            let values = (0..count).map(|at| (0.7 * at as f64 + number as f64).sin() / 3.0);
            let data = TensorData::new(values.collect::<Vec<_>>(), shape).convert_dtype(dtype);
            Param::from_tensor(Tensor::from_data(data, (device, dtype)))
        };
        let tokens = values(0, [TOKENS, WIDTH]);
        let head = (places == Places::Two).then(|| tokens.clone());
        Self {
            tokens,
            places: values(1, [LENGTH, WIDTH]),
            query: values(2, [WIDTH, WIDTH]),
            key: values(3, [WIDTH, WIDTH]),
            value: values(4, [WIDTH, WIDTH]),
            output: values(5, [WIDTH, WIDTH]),
            up: values(6, [WIDTH, 4 * WIDTH]),
            down: values(7, [4 * WIDTH, WIDTH]),
            head,
        }
    }

    fn head(&self) -> Tensor<2> {
        self.head.as_ref().unwrap_or(&self.tokens).val()
    }

    fn logits(&self, tokens: &[i64]) -> Tensor<2> {
        let device = self.tokens.device().inner();
        let rows = tokens.len() / LENGTH;
        let tokens = Tensor::<1, Int>::from_data(tokens, &device);
        let x = self
            .tokens
            .val()
            .select(0, tokens)
            .reshape([rows, LENGTH, WIDTH]);
        let x = x + self.places.val().unsqueeze::<3>();
        let times = |x: Tensor<3>, weight: &Param<Tensor<2>>| x.matmul(weight.val().unsqueeze());
        let normed = norm(x.clone());
        let scores = times(normed.clone(), &self.query)
            .matmul(times(normed.clone(), &self.key).transpose())
            // Burn computes the gradient of a division by a number in single precision.
            .mul_scalar(1.0 / (WIDTH as f64).sqrt());
        let later = Tensor::<2, burn::tensor::Bool>::tril_mask([LENGTH, LENGTH], 0, &device);
        let scores = scores.mask_fill(later.unsqueeze::<3>().expand([rows, LENGTH, LENGTH]), -1e4);
        let attended = softmax(scores, 2).matmul(times(normed, &self.value));
        let x = x + times(attended, &self.output);
        let x = x.clone() + times(relu(times(norm(x), &self.up)), &self.down);
        norm(x)
            .reshape([rows * LENGTH, WIDTH])
            .matmul(self.head().transpose())
    }

    fn loss(&self, (tokens, following): &(Vec<i64>, Vec<i64>)) -> Tensor<1> {
        cross_entropy(self.logits(tokens), following)
    }

    fn named(&self) -> [(&str, &Param<Tensor<2>>); 8] {
        [
            ("tokens", &self.tokens),
            ("places", &self.places),
            ("query", &self.query),
            ("key", &self.key),
            ("value", &self.value),
            ("output", &self.output),
            ("up", &self.up),
            ("down", &self.down),
        ]
    }

    fn flat(&self) -> Vec<f64> {
        let all = self.named().into_iter();
        all.flat_map(|(_, param)| values(param)).collect()
    }

    fn assert_tied(&self) {
        if let Some(head) = &self.head {
            assert_eq!(head.id, self.tokens.id);
            assert_eq!(head.val().into_data(), self.tokens.val().into_data());
        }
    }
}

fn norm(x: Tensor<3>) -> Tensor<3> {
    let x = x.clone() - x.mean_dim(2);
    let variance = (x.clone() * x.clone()).mean_dim(2);
    x / variance.add_scalar(1e-5).sqrt()
}

fn cross_entropy(logits: Tensor<2>, following: &[i64]) -> Tensor<1> {
    let following = Tensor::<1, Int>::from_data(following, &logits.device().inner());
    log_softmax(logits, 1)
        .gather(1, following.unsqueeze_dim(1))
        .mean()
        .neg()
}

fn values(param: &Param<Tensor<2>>) -> Vec<f64> {
    param.val().into_data().iter::<f64>().collect()
}

/// Returns this rank's sequences of a step, and the token that follows each token.
fn batch(accelerator: &Accelerator, step: usize) -> (Vec<i64>, Vec<i64>) {
    let token = |row, column| ((7 * row + 3 * column + 5 * step + row * column) % TOKENS) as i64;
    let rows = (accelerator.rank()..SEQUENCES).step_by(accelerator.world_size());
    let (mut tokens, mut following) = (Vec::new(), Vec::new());
    for row in rows {
        tokens.extend((0..LENGTH).map(|column| token(row, column)));
        following.extend((1..=LENGTH).map(|column| token(row, column)));
    }
    (tokens, following)
}

/// The optimizers of `tests/fixtures/tied_transformer.py`.
#[derive(Clone, Copy, Debug)]
enum Rule {
    AdamW,
    Sgd,
}

impl Rule {
    fn rate(self) -> f64 {
        match self {
            Self::AdamW => 1e-2,
            Self::Sgd => 0.1,
        }
    }

    fn adamw() -> AdamWConfig {
        AdamWConfig::new()
            .with_beta_1(0.5)
            .with_beta_2(0.75)
            .with_epsilon(2_f32.powi(-10))
            .with_weight_decay(2_f32.powi(-7))
    }

    fn sgd() -> SgdConfig {
        let momentum = MomentumConfig::new().with_momentum(0.5).with_dampening(0.0);
        SgdConfig::new().with_momentum(Some(momentum))
    }

    fn burns(self) -> ModuleOptimizer {
        match self {
            Self::AdamW => Self::adamw().init(),
            Self::Sgd => Self::sgd().init(),
        }
    }

    fn fused(self) -> ModuleOptimizer {
        match self {
            Self::AdamW => Self::adamw().init_fused(),
            Self::Sgd => Self::sgd().init_fused(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Burns,
    Fused,
    Sharded,
    ShardedFused,
}

const KINDS: [Kind; 4] = [Kind::Burns, Kind::Fused, Kind::Sharded, Kind::ShardedFused];

#[derive(Clone, Copy, Debug)]
struct Optimizer {
    kind: Kind,
    rule: Rule,
}

fn optimizers() -> impl Iterator<Item = Optimizer> {
    let rules = |kind| [Rule::AdamW, Rule::Sgd].map(|rule| Optimizer { kind, rule });
    KINDS.into_iter().flat_map(rules)
}

const ADAMW: Optimizer = Optimizer {
    kind: Kind::Burns,
    rule: Rule::AdamW,
};

impl Optimizer {
    fn prepare(self, accelerator: &Accelerator, model: Transformer) -> accelerator::Result<Parts> {
        let (model, optimizer) = match self.kind {
            Kind::Burns => accelerator.prepare((model, self.rule.burns()))?,
            Kind::Fused => accelerator.prepare((model, self.rule.fused()))?,
            Kind::Sharded => accelerator.prepare((model, Sharded(self.rule.burns())))?,
            Kind::ShardedFused => accelerator.prepare((model, Sharded(self.rule.fused())))?,
        };
        let rate = self.rule.rate();
        Ok(Parts {
            model,
            optimizer,
            rate,
        })
    }
}

struct Parts {
    model: Transformer,
    optimizer: PreparedOptimizer<Manual>,
    rate: f64,
}

fn prepare(
    accelerator: &Accelerator,
    optimizer: Optimizer,
    dtype: DType,
    places: Places,
) -> accelerator::Result<Parts> {
    let model = Transformer::new(&accelerator.device(), dtype, places);
    optimizer.prepare(accelerator, model)
}

/// Trains, and returns the loss and norm of each step.
fn train(
    accelerator: &Accelerator,
    parts: &mut Parts,
    steps: core::ops::Range<usize>,
) -> accelerator::Result<Vec<[f64; 2]>> {
    let Parts {
        model,
        optimizer,
        rate,
    } = parts;
    let mut told = Vec::new();
    for step in steps {
        let batch = batch(accelerator, step);
        let rows = batch.0.len() / LENGTH;
        let logits = accelerator.forward(model, |model| model.logits(&batch.0));
        let loss = cross_entropy(accelerator.to_full(logits), &batch.1);
        let mut gradients = accelerator.backward(loss, model, rows)?.clip_norm(CLIP);
        told.push([gradients.loss().unwrap(), gradients.norm().unwrap()]);
        *model = optimizer.step(*rate, model.clone(), gradients);
        model.assert_tied();
    }
    Ok(told)
}

/// The results of PyTorch.
#[derive(Deserialize)]
struct Recorded {
    adamw: Trajectory,
    sgd: Trajectory,
}

#[derive(Deserialize)]
struct Trajectory {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    last: BTreeMap<String, Vec<f64>>,
}

impl Recorded {
    fn load() -> Self {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tied_transformer.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn check(&self, rule: Rule, told: &[[f64; 2]], model: &Transformer, case: &str) {
        let recorded = match rule {
            Rule::AdamW => &self.adamw,
            Rule::Sgd => &self.sgd,
        };
        let near = |what: &str, found: Vec<f64>, expected: &[f64]| {
            assert_eq!(found.len(), expected.len());
            let pairs = found.iter().zip(expected);
            let distance = pairs
                .map(|(found, expected)| (found - expected).abs())
                .fold(0.0, f64::max);
            assert!(
                distance < 1e-11,
                "{case}: {what} differ from PyTorch's by {distance:.1e}"
            );
        };
        let column = |at: usize| told.iter().map(|told| told[at]).collect();
        near("losses", column(0), &recorded.losses);
        near("norms", column(1), &recorded.grad_norms);
        for (name, param) in model.named() {
            near(name, values(param), &recorded.last[name]);
        }
    }
}

#[test]
fn tied_embeddings_follow_pytorchs_trajectory() {
    let recorded = Recorded::load();
    for kind in devices() {
        for ranks in [1, 2, 3] {
            for optimizer in optimizers() {
                for overlap in [Overlap::Off, Overlap::On] {
                    let case = format!("{kind}, {ranks} ranks, {optimizer:?}, {overlap:?}");
                    let outcomes = Accelerator::builder()
                        .device(kind)
                        .bucket_size(1024)
                        .overlap(overlap)
                        .launch(ranks, |accelerator| {
                            let mut parts =
                                prepare(&accelerator, optimizer, DType::F64, Places::Two)?;
                            let told = train(&accelerator, &mut parts, 0..STEPS)?;
                            recorded.check(optimizer.rule, &told, &parts.model, &case);
                            assert_eq!(
                                accelerator.overlap_report(&parts.model)?.repairs,
                                0,
                                "{case}"
                            );
                            Ok(parts.model.flat())
                        })
                        .unwrap();
                    assert!(
                        outcomes.iter().all(|outcome| *outcome == outcomes[0]),
                        "{case}"
                    );
                }
            }
        }
    }
}

/// Trains up to `cut`, saves, resumes on another number of ranks, and trains to the end.
fn train_in_two_parts(
    optimizer: Optimizer,
    dtype: DType,
    [before, after]: [usize; 2],
    cut: usize,
) -> (Vec<[f64; 2]>, Transformer) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let builder = || Accelerator::builder().device(BackendKind::Flex);
    let first = builder().launch(before, |accelerator| {
        let mut parts = prepare(&accelerator, optimizer, dtype, Places::Two)?;
        let told = train(&accelerator, &mut parts, 0..cut)?;
        accelerator.save_state(folder, (&parts.model, &parts.optimizer))?;
        Ok(told)
    });
    let mut told = first.unwrap().remove(0);
    let rest = builder().launch(after, |accelerator| {
        let parts = prepare(&accelerator, optimizer, dtype, Places::Two)?;
        let ((model, optimizer), _) = accelerator.resume(folder, (parts.model, parts.optimizer))?;
        model.assert_tied();
        let mut parts = Parts {
            model,
            optimizer,
            rate: parts.rate,
        };
        let told = train(&accelerator, &mut parts, cut..STEPS)?;
        Ok((told, parts.model))
    });
    let (rest, model) = rest.unwrap().remove(0);
    told.extend(rest);
    (told, model)
}

#[test]
fn a_resumed_run_follows_pytorchs_trajectory_on_any_number_of_ranks() {
    let recorded = Recorded::load();
    // Burn loads the state of its own optimizers in single precision.
    let fused = optimizers().filter(|it| matches!(it.kind, Kind::Fused | Kind::ShardedFused));
    for optimizer in fused {
        for ranks in [[1, 1], [2, 2], [1, 3], [3, 1]] {
            let (told, model) = train_in_two_parts(optimizer, DType::F64, ranks, 5);
            let case = format!("{optimizer:?}, {ranks:?}");
            recorded.check(optimizer.rule, &told, &model, &case);
        }
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_the_undisturbed_one() {
    for optimizer in optimizers() {
        for ranks in [1, 2] {
            let run = |cut| {
                let (told, model) = train_in_two_parts(optimizer, DType::F32, [ranks; 2], cut);
                (told, model.flat())
            };
            assert_eq!(run(5), run(STEPS), "{optimizer:?}, {ranks} ranks");
        }
    }
}

/// The bits are those of a model that has the parameter in one place.
#[test]
fn two_places_learn_the_bits_of_one() {
    for precision in [Precision::No, Precision::Bf16] {
        for overlap in [Overlap::Off, Overlap::On] {
            for ranks in [1, 2] {
                let run = |places| {
                    Accelerator::builder()
                        .device(BackendKind::Flex)
                        .accumulation_steps(2)
                        .bucket_size(1024)
                        .precision(precision)
                        .overlap(overlap)
                        .launch(ranks, |accelerator| {
                            let mut model =
                                Transformer::new(&accelerator.device(), DType::F32, places);
                            // A program may load another file's weights before training.
                            model = accelerator.prepare(model)?;
                            let mut average = Ema::new(&model, 0.9);
                            let mut optimizer = accelerator.prepare(Rule::AdamW.fused())?;
                            for step in 0..2 * STEPS {
                                let batch = batch(&accelerator, step);
                                let rows = batch.0.len() / LENGTH;
                                let logits =
                                    accelerator.forward(&model, |model| model.logits(&batch.0));
                                let loss = cross_entropy(accelerator.to_full(logits), &batch.1);
                                let gradients =
                                    accelerator.backward(loss, &model, rows)?.clip_norm(CLIP);
                                model = optimizer.step(1e-2, model, gradients);
                                model.assert_tied();
                                average.update(&model);
                                average.model().assert_tied();
                            }
                            Ok((model.flat(), average.model().flat()))
                        })
                        .unwrap()
                };
                assert_eq!(
                    run(Places::Two),
                    run(Places::One),
                    "{precision}, {overlap:?}, {ranks} ranks"
                );
            }
        }
    }
}

/// The model computes with one place of the parameter in half precision and with the other in full.
#[test]
fn a_place_that_is_kept_in_full_precision_gets_its_gradient_too() {
    let run = |overlap| {
        Accelerator::builder()
            .device(BackendKind::Flex)
            .bucket_size(1024)
            .precision(Precision::Bf16)
            .overlap(overlap)
            .launch(2, |accelerator| {
                let Parts {
                    mut model,
                    mut optimizer,
                    rate,
                } = prepare(&accelerator, ADAMW, DType::F32, Places::Two)?;
                let mut norms = Vec::new();
                for step in 0..STEPS {
                    let copy = accelerator.working_copy(&model, |path| path == "head");
                    let (tokens, _) = batch(&accelerator, step);
                    let tokens =
                        Tensor::<1, Int>::from_data(&tokens[..], &accelerator.device().inner());
                    let x = accelerator.to_full(copy.tokens.val().select(0, tokens));
                    let loss = x.matmul(copy.head().transpose()).powi_scalar(2).mean();
                    let mut gradients = accelerator.backward(loss, &model, 1)?;
                    norms.extend(gradients.norm());
                    model = optimizer.step(rate, model, gradients);
                    model.assert_tied();
                }
                Ok((norms, model.flat()))
            })
            .unwrap()
    };
    let (off, on) = (run(Overlap::Off), run(Overlap::On));
    assert_eq!(off, on);
    assert!(off[0].0[0] > 0.0);
}

#[test]
fn local_training_keeps_parameters_tied() {
    let run = |places| {
        Accelerator::builder()
            .device(BackendKind::Flex)
            .launch(2, |accelerator| {
                let Parts {
                    mut model,
                    mut optimizer,
                    rate,
                } = prepare(&accelerator, ADAMW, DType::F32, places)?;
                let mut local = LocalSgdConfig::new(3).init(&accelerator, &model)?;
                for step in 0..STEPS {
                    let batch = batch(&accelerator, step);
                    let loss = model.loss(&batch);
                    let gradients = local.backward(loss, &model, 2)?;
                    model = optimizer.step(rate, model, gradients);
                    local.step(&mut model)?;
                    model.assert_tied();
                }
                local.finish(&mut model)?;
                Ok(model.flat())
            })
            .unwrap()
    };
    assert_eq!(run(Places::Two), run(Places::One));
}

#[test]
fn a_model_file_keeps_parameters_tied() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    for ranks in [1, 2] {
        Accelerator::builder()
            .device(BackendKind::Flex)
            .launch(ranks, |accelerator| {
                let mut parts = prepare(&accelerator, ADAMW, DType::F64, Places::Two)?;
                train(&accelerator, &mut parts, 0..2)?;
                accelerator.save_model(&parts.model, &path)?;
                let model = Transformer::new(&accelerator.device(), DType::F64, Places::Two);
                let model = accelerator.load_model(model, &path)?;
                model.assert_tied();
                let mut loaded = ADAMW.prepare(&accelerator, model)?;
                let mut same = ADAMW.prepare(&accelerator, parts.model)?;
                let told = train(&accelerator, &mut loaded, 2..5)?;
                assert_eq!(told, train(&accelerator, &mut same, 2..5)?);
                assert_eq!(loaded.model.flat(), same.model.flat());
                Ok(())
            })
            .unwrap();
    }
}

/// Burn's own optimizer steps only the first place.
#[test]
fn places_that_became_two_tensors_are_refused_until_they_are_tied_again() {
    let accelerator = Accelerator::new().unwrap();
    let model = Transformer::new(&accelerator.device(), DType::F64, Places::Two);
    let mut model = accelerator.prepare(model).unwrap();
    let mut optimizer = Rule::AdamW.burns();
    let recorded = Recorded::load();
    let mut told = Vec::new();
    for step in 0..STEPS {
        let batch = batch(&accelerator, step);
        let mut gradients = accelerator
            .backward(model.loss(&batch), &model, SEQUENCES)
            .unwrap()
            .clip_norm(CLIP);
        told.push([gradients.loss().unwrap(), gradients.norm().unwrap()]);
        model = optimizer.step(1e-2, model, gradients.into_params().unwrap());
        let error = accelerator
            .backward(model.loss(&batch), &model, SEQUENCES)
            .unwrap_err();
        let words = ["`tokens` and `head`", "retie_parameters"];
        assert_error(&error, Error::is_misuse, &words);
        model = retie_parameters(model);
        model.assert_tied();
    }
    recorded.check(Rule::AdamW, &told, &model, "retied by hand");
}

#[test]
fn tied_places_with_different_values_are_refused_on_every_rank() {
    for ranks in [1, 2] {
        launch(ranks, |accelerator| {
            let mut model = Transformer::new(&accelerator.device(), DType::F32, Places::Two);
            model.head = model.head.map(|head| {
                let twice = head.val().inner().mul_scalar(2.0);
                Param::initialized(head.id, Tensor::from_inner(twice).require_grad())
            });
            let error = accelerator.prepare(model).unwrap_err();
            assert_error(&error, Error::is_model, &["`tokens` and `head`"]);
            accelerator.wait_for_everyone()
        })
        .unwrap();
    }
}

#[test]
fn a_frozen_clone_behind_a_parameter_stays_what_it_is() {
    launch(2, |accelerator| {
        let mut model = Transformer::new(&accelerator.device(), DType::F32, Places::Two);
        model.head = model.head.map(|head| head.set_require_grad(false));
        let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
        let before = model.head().into_data();
        for step in 0..3 {
            let loss = model.loss(&batch(&accelerator, step));
            let gradients = accelerator.backward(loss, &model, 2)?;
            model = optimizer.step(0.1, model, gradients);
        }
        assert_eq!(model.head().into_data(), before);
        assert_ne!(model.tokens.val().into_data(), before);
        // Burn's optimizers would step a parameter that is frozen before `prepare`.
        let mut model = Transformer::new(&accelerator.device(), DType::F32, Places::Two);
        model.tokens = model.tokens.set_require_grad(false);
        let error = accelerator.prepare(model).unwrap_err();
        assert_error(&error, Error::is_model, &["`tokens` is frozen"]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_and_checkpoints_that_tie_otherwise_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    launch(2, |accelerator| {
        let untied = || {
            let mut model = Transformer::new(&accelerator.device(), DType::F32, Places::Two);
            model.head.as_mut().unwrap().id = ParamId::new();
            model
        };
        let model = match accelerator.rank() {
            1 => untied(),
            _ => Transformer::new(&accelerator.device(), DType::F32, Places::Two),
        };
        let error = accelerator.prepare(model).unwrap_err();
        let words = ["`head` is tied to `tokens` on rank 0, and a parameter of its own on rank 1"];
        assert_error(&error, Error::is_model, &words);
        let parts = prepare(&accelerator, ADAMW, DType::F32, Places::Two)?;
        accelerator.save_state(folder, &parts.model)?;
        let model = accelerator.prepare(untied())?;
        let error = accelerator.resume(folder, model).unwrap_err();
        let words = ["`head` is tied to `tokens` in the checkpoint, and a parameter of its own"];
        assert_contains(&error.to_string(), &words);
        Ok(())
    })
    .unwrap();
}
