//! Compares the gradients of blocks that are recomputed with those of `torch.utils.checkpoint`, and with Burn's, in f64.
//! The models are those of `tests/fixtures/recompute.py`.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use accelerator::nn::{self, Units};
use accelerator::prelude::*;
use accelerator::{Overlap, Tensors};
use burn::module::{Module, Param};
use burn::nn::BatchNormConfig;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::activation::{sigmoid, silu, softmax};
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{Bool, Device, FloatDType, Gradients, Int, Tensor, TensorData};
use serde::Deserialize;

use crate::common::{Encoder, child};

#[derive(Deserialize)]
struct Fixture {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    loss: f64,
    tensors: BTreeMap<String, Expected>,
}

#[derive(Deserialize)]
struct Expected {
    shape: Vec<usize>,
    values: Vec<f64>,
    gradient: Option<Vec<f64>>,
}

/// Reads the gradient of a leaf.
type Read = Box<dyn Fn(&Gradients) -> Option<TensorData>>;

/// The leaves of a model, by the names of the fixture.
struct Leaves<'a> {
    case: &'a Case,
    device: Device,
    read: RefCell<Vec<(&'a str, Read)>>,
}

impl Leaves<'_> {
    fn leaf<const D: usize>(&self, name: &str) -> Param<Tensor<D>> {
        let (name, expected) = self.case.tensors.get_key_value(name).unwrap();
        let data = TensorData::new(expected.values.clone(), expected.shape.clone());
        let leaf = Param::<Tensor<D>>::from_data(data, &self.device);
        let leaf = leaf.set_require_grad(expected.gradient.is_some());
        if expected.gradient.is_some() {
            let leaf = leaf.val();
            let read = move |gradients: &Gradients| leaf.grad(gradients).map(Tensor::into_data);
            self.read.borrow_mut().push((name, Box::new(read)));
        }
        leaf
    }

    fn input<const D: usize>(&self, name: &str) -> Tensor<D> {
        self.leaf(name).val()
    }

    fn linear(&self, name: &str) -> Linear {
        Linear {
            weight: self.leaf(&format!("{name}.weight")),
            bias: self.leaf(&format!("{name}.bias")),
        }
    }
}

thread_local! {
    /// Set while blocks are not recomputed.
    static IS_PLAIN: Cell<bool> = const { Cell::new(false) };
}

fn recompute<M, I, O>(block: &M, input: I, forward: impl Fn(&M, I) -> O + Send + 'static) -> O
where
    M: Module + 'static,
    I: Tensors + Clone + Send + 'static,
    O: Tensors + 'static,
{
    match IS_PLAIN.get() {
        true => forward(block, input),
        false => nn::recompute(block, input, forward),
    }
}

#[derive(Debug, Module)]
struct Linear {
    weight: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
}

impl Linear {
    fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        x.matmul(self.weight.val().unsqueeze()) + self.bias.val().unsqueeze()
    }

    fn tanh<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.forward(x).tanh()
    }
}

fn square<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    x.powi_scalar(2).mean()
}

fn mlp(c: &Leaves<'_>) -> Tensor<1> {
    let block = [c.linear("a"), c.linear("b")];
    let x = recompute(&block, c.input::<2>("x"), |_, x| sigmoid(x.clone()) * x);
    square(recompute(&block, x, |[a, b], x| silu(b.forward(a.tanh(x)))))
}

fn nested(c: &Leaves<'_>) -> Tensor<1> {
    let block = [c.linear("a"), c.linear("b"), c.linear("d")];
    square(recompute(&block, c.input::<2>("x"), |[a, b, d], x| {
        d.tanh(recompute(b, a.tanh(x), Linear::tanh))
    }))
}

fn shared(c: &Leaves<'_>) -> Tensor<1> {
    let block = [c.linear("a"), c.linear("b")];
    let x = recompute(&block[0], c.input::<2>("x"), |a, x| a.tanh(a.tanh(x)));
    square(recompute(&block, x, |[a, b], x| a.tanh(b.forward(x))))
}

fn frozen(c: &Leaves<'_>) -> Tensor<1> {
    let x = ["a", "b", "d"]
        .into_iter()
        .fold(c.input::<2>("x"), |x, name| {
            recompute(&c.linear(name), x, Linear::tanh)
        });
    square(x)
}

fn outputs(c: &Leaves<'_>) -> Tensor<1> {
    let block = [c.linear("a"), c.linear("b"), c.linear("d")];
    let (h, [y, _]) = recompute(&block, c.input::<2>("x"), |[a, b, d], x| {
        let h = a.tanh(x);
        (h.clone(), [b.forward(h.clone()), d.forward(h)])
    });
    (h.clone() * h.exp()).mean() + y.powi_scalar(2).sum()
}

fn embedding(c: &Leaves<'_>) -> Tensor<1> {
    let tokens = Tensor::<2, Int>::from_data([[1, 2, 0, 6], [3, 3, 5, 4]], &c.device);
    let targets = Tensor::<1, Int>::from_data([6, 1, 2, 0, 4, 3, 3, 5], &c.device);
    let weight = c.leaf::<2>("embedding.weight");
    let x: Tensor<3> = recompute(&weight, tokens, |weight: &Param<Tensor<2>>, tokens| {
        let rows = weight.val().select(0, tokens.flatten::<1>(0, 1));
        rows.reshape([2, 4, 4])
    });
    let x = recompute(&c.linear("a"), x, |a, x| x.clone() + a.tanh(x));
    recompute(
        &weight,
        (x, targets),
        |weight: &Param<Tensor<2>>, (x, targets)| {
            let logits = x.flatten::<2>(0, 1).matmul(weight.val().transpose());
            let loss = CrossEntropyLossConfig::new().init(&logits.device());
            loss.forward(logits, targets)
        },
    )
}

#[derive(Debug, Module)]
struct Attention {
    layers: [Linear; 4],
    gamma: Param<Tensor<1>>,
    beta: Param<Tensor<1>>,
}

impl Attention {
    fn forward(&self, (x, mask): (Tensor<3>, Tensor<2, Bool>)) -> Tensor<3> {
        let [q, k, v, o] = &self.layers;
        let centered = x.clone() - x.clone().mean_dim(2);
        let variance = centered.clone().powi_scalar(2).mean_dim(2);
        let y = centered / (variance + 1e-5).sqrt();
        let y = y * self.gamma.val().unsqueeze() + self.beta.val().unsqueeze();
        let scores = q
            .forward(y.clone())
            .matmul(k.forward(y.clone()).transpose())
            / 2.0;
        let scores = scores.mask_fill(mask.unsqueeze(), -1e9);
        x + o.forward(softmax(scores, 2).matmul(v.forward(y)))
    }
}

fn attention(c: &Leaves<'_>) -> Tensor<1> {
    let block = Attention {
        layers: ["q", "k", "v", "o"].map(|name| c.linear(name)),
        gamma: c.leaf("norm.gamma"),
        beta: c.leaf("norm.beta"),
    };
    let mask = Tensor::<2, Bool>::triu_mask([5, 5], 1, &c.device).bool_not();
    let x = recompute(&block, (c.input("x"), mask.clone()), Attention::forward);
    square(recompute(&block, (x, mask), Attention::forward))
}

fn convolution(c: &Leaves<'_>) -> Tensor<1> {
    let mut norm = BatchNormConfig::new(3).init(&c.device);
    (norm.gamma, norm.beta) = (c.leaf("norm.gamma"), c.leaf("norm.beta"));
    let block = (c.leaf::<4>("conv.weight"), c.leaf::<1>("conv.bias"), norm);
    let y = recompute(&block, c.input::<4>("x"), |(weight, bias, norm), x| {
        let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
        norm.forward(conv2d(x, weight.val(), Some(bias.val()), options))
            .tanh()
    });
    y.powi_scalar(3).mean()
}

fn optional(c: &Leaves<'_>) -> Tensor<1> {
    type Input = (Vec<Tensor<2>>, Option<Tensor<2>>);
    let (x, constant) = (c.input::<2>("x"), c.input::<2>("constant"));
    let block = [c.linear("a"), c.linear("b")];
    let forward = |[a, b]: &[Linear; 2], (parts, other): Input| {
        let h = a.tanh(parts[0].clone() * parts[1].clone());
        match other {
            Some(other) => h + b.forward(other),
            None => h,
        }
    };
    let h = recompute(&block, (vec![x.clone(), constant.clone()], None), forward);
    square(recompute(&block, (vec![h, constant], Some(x)), forward))
}

fn losses(c: &Leaves<'_>) -> Tensor<1> {
    let layers = ["a", "b", "d", "e"].map(|name| c.linear(name));
    let run = |rows: Tensor<2>| {
        let rows = layers.iter().fold(rows, |rows, layer| {
            recompute(layer, rows, |layer, rows| rows.clone() + layer.tanh(rows))
        });
        square(rows)
    };
    run(c.input("x")) + run(c.input("y"))
}

#[test]
fn gradients_are_those_of_pytorchs_checkpoints() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/recompute.json"
    );
    let fixture: Fixture = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(fixture.cases.len(), 10);
    // The operations of `ndarray` are not all in f64.
    for kind in [BackendKind::Flex] {
        let builder = Accelerator::builder().device(kind).dtype(FloatDType::F64);
        let device = builder.build().unwrap().device();
        for case in &fixture.cases {
            let model = match &*case.name {
                "mlp" => mlp,
                "nested" => nested,
                "shared" => shared,
                "frozen" => frozen,
                "outputs" => outputs,
                "embedding" => embedding,
                "attention" => attention,
                "convolution" => convolution,
                "optional" => optional,
                "losses" => losses,
                other => panic!("no model {other}"),
            };
            let run = |is_plain| {
                let leaves = Leaves {
                    case,
                    device: device.clone(),
                    read: RefCell::default(),
                };
                IS_PLAIN.set(is_plain);
                let loss = model(&leaves);
                IS_PLAIN.set(false);
                let gradients = loss.backward();
                let read = leaves.read.into_inner();
                let found = read.into_iter().map(|(name, read)| {
                    let gradient = read(&gradients).unwrap();
                    (name, gradient.try_into_vec::<f64>().unwrap())
                });
                (loss.into_scalar::<f64>(), found.collect::<Vec<_>>())
            };
            let (loss, gradients) = run(false);
            // These use a tensor three times, some of them in a block, which adds up the gradients of its own first.
            if !["shared", "outputs"].contains(&&*case.name) {
                let plain = run(true);
                assert_eq!((loss, &gradients), (plain.0, &plain.1), "{}", case.name);
            }
            let close = |name: &str, found: &[f64], expected: &[f64]| {
                assert_eq!(found.len(), expected.len());
                let size = expected
                    .iter()
                    .fold(1e-3_f64, |size, it| size.max(it.abs()));
                for (found, expected) in found.iter().zip(expected) {
                    let apart = (found - expected).abs() / size;
                    assert!(apart <= 1e-12, "{kind}, {}, {name}: {apart:e}", case.name);
                }
            };
            close("loss", &[loss], &[case.loss]);
            let expected = case.tensors.values().filter(|it| it.gradient.is_some());
            assert_eq!(gradients.len(), expected.count(), "{}", case.name);
            for (name, found) in gradients {
                close(name, &found, case.tensors[name].gradient.as_ref().unwrap());
            }
        }
    }
}

/// Trains an encoder of units in f64 for three steps; returns the values of each rank.
fn trained(units: Units, ranks: usize, dropout: f64) -> Vec<Vec<f64>> {
    Accelerator::builder()
        .device(BackendKind::Flex)
        .dtype(FloatDType::F64)
        .overlap(Overlap::On)
        .bucket_size(4096)
        .accumulation_steps(2)
        .units(units)
        .seed(4)
        .launch(ranks, |accelerator| {
            let model = accelerator.init(|device| Encoder::new(3, dropout, device));
            let (mut model, mut optimizer) =
                accelerator.prepare((model, AdamWConfig::new().init()))?;
            for step in 0..6 {
                let values = (0..4 * 8 * 16).map(|at| {
                    let place = at + 7 * step + 31 * accelerator.rank();
                    (place as f64 * 0.37).sin()
                });
                let values = TensorData::new(values.collect::<Vec<_>>(), [4, 8, 16]);
                let x = Tensor::from_data(values, &accelerator.device());
                let gradients = accelerator.backward(model.loss(x), &model, 4)?;
                let gradients = gradients.clip_norm(0.5);
                model = optimizer.step(0.01, model, gradients);
            }
            Ok(crate::values(&model))
        })
        .unwrap()
}

fn check_training(ranks: usize, dropout: f64) {
    let plain = trained(Units::Plain, ranks, dropout);
    assert!(plain.iter().flatten().all(|value| value.is_finite()));
    let is_single = |value: &f64| *value == f64::from(*value as f32);
    assert!(!plain[0].iter().all(is_single), "these are values of f32");
    for units in [Units::Keep, Units::Recompute] {
        let other = trained(units, ranks, dropout);
        assert!(other == plain, "{ranks} ranks, dropout {dropout}, {units}");
    }
}

#[test]
fn a_training_has_the_same_bits_whatever_units_do() {
    for ranks in [1, 2, 3] {
        check_training(ranks, 0.0);
    }
    let (succeeded, output) = child("units::a_training_with_dropout", "RUST_BACKTRACE", "0");
    assert!(succeeded, "{output}");
}

/// In a process of its own, since other tests draw from the same generator.
#[test]
#[ignore = "the test above runs it"]
fn a_training_with_dropout() {
    check_training(1, 0.3);
}
