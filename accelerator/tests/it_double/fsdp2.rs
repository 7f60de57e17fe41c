//! Sharded units follow the trajectories of PyTorch's FSDP2, which `tests/fixtures/fsdp2.py` has recorded.

use std::collections::BTreeMap;
use std::path::Path;

use accelerator::nn::{Unit, Units};
use accelerator::prelude::*;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use serde::Deserialize;

use crate::common::folder_in_memory;

const TOKENS: usize = 7;
const WIDTH: usize = 4;
const LENGTH: usize = 5;
const BLOCKS: usize = 2;
const MICRO_STEPS: usize = 2;
const ROWS: usize = 4;
const CLIP: f64 = 0.5;

#[derive(Deserialize)]
struct Fixture {
    initial: Weights,
    cases: Vec<Case>,
}

type Weights = BTreeMap<String, Vec<f64>>;

#[derive(Deserialize)]
struct Case {
    optimizer: String,
    ranks: usize,
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    last: Weights,
}

#[derive(Debug, Module)]
struct Block {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm: LayerNorm,
    inner: Linear,
    outer: Linear,
}

#[derive(Debug, Module)]
struct Transformer {
    embedding: Embedding,
    blocks: Vec<Unit<Block>>,
}

impl Block {
    fn new(device: &Device) -> Self {
        let linear =
            |inputs, outputs| -> Linear { LinearConfig::new(inputs, outputs).init(device) };
        Self {
            query: linear(WIDTH, WIDTH),
            key: linear(WIDTH, WIDTH),
            value: linear(WIDTH, WIDTH),
            output: linear(WIDTH, WIDTH),
            norm: LayerNormConfig::new(WIDTH).init(device),
            inner: linear(WIDTH, 4 * WIDTH),
            outer: linear(4 * WIDTH, WIDTH),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let query = self.query.forward(x.clone());
        let (key, value) = (self.key.forward(x.clone()), self.value.forward(x.clone()));
        let scores = query.matmul(key.swap_dims(1, 2)) / (WIDTH as f64).sqrt();
        let x = x + self.output.forward(softmax(scores, 2).matmul(value));
        let y = self.inner.forward(self.norm.forward(x.clone())).tanh();
        x + self.outer.forward(y)
    }
}

impl Transformer {
    fn new(device: &Device, weights: &Weights) -> Self {
        let model = Self {
            embedding: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            blocks: (0..BLOCKS).map(|_| Unit::new(Block::new(device))).collect(),
        };
        model.map(&mut Loaded {
            path: Vec::new(),
            weights,
        })
    }

    fn loss(&self, tokens: Tensor<2, Int>, following: Tensor<2, Int>) -> Tensor<1> {
        let mut x = self.embedding.forward(tokens);
        for block in &self.blocks {
            x = block.run(x, Block::forward);
        }
        let logits = x.matmul(self.embedding.weight.val().transpose().unsqueeze());
        let cross_entropy = CrossEntropyLossConfig::new().init(&logits.device());
        let rows = following.shape().num_elements();
        cross_entropy.forward(logits.reshape([rows, TOKENS]), following.reshape([rows]))
    }
}

/// Returns the name under which `torch.nn` has a parameter.
fn name_of(path: &[String]) -> String {
    let words = path.iter().map(|word| match word.as_str() {
        "gamma" => "weight",
        "beta" => "bias",
        word => word,
    });
    words.collect::<Vec<_>>().join(".")
}

/// Returns the values in the other layout, if they are a linear layer's: `torch.nn` has `[outputs, inputs]`.
fn turned(name: &str, values: &[f64], shape: &[usize]) -> Vec<f64> {
    match shape {
        [inputs, outputs] if !name.starts_with("embedding") => {
            let at = |at| values[at % outputs * inputs + at / outputs];
            (0..inputs * outputs).map(at).collect()
        }
        _ => values.to_vec(),
    }
}

struct Loaded<'a> {
    path: Vec<String>,
    weights: &'a Weights,
}

impl ModuleMapper for Loaded<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = name_of(&self.path);
        param.map(|old| {
            let shape = old.dims();
            let values = turned(&name, &self.weights[&name], &shape);
            let device = (&old.device(), old.dtype());
            Tensor::from_data(TensorData::new(values, shape), device).require_grad()
        })
    }
}

/// The largest difference of a model's weights from those of the fixture.
struct Distance<'a> {
    path: Vec<String>,
    weights: &'a Weights,
    largest: f64,
}

impl ModuleVisitor for Distance<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let name = name_of(&self.path);
        let expected = turned(&name, &self.weights[&name], &param.shape());
        let found = param.val().into_data();
        for (found, expected) in found.iter::<f64>().zip(expected) {
            self.largest = self.largest.max((found - expected).abs());
        }
    }
}

fn optimizer(name: &str) -> (ModuleOptimizer, f64) {
    match name {
        "sgd" => {
            let momentum = MomentumConfig::new().with_momentum(0.5).with_dampening(0.0);
            (SgdConfig::new().with_momentum(Some(momentum)).init(), 0.1)
        }
        _ => {
            let config = AdamWConfig::new().with_beta_1(0.5).with_beta_2(0.75);
            let config = config
                .with_epsilon(0.000_976_562_5)
                .with_weight_decay(0.007_812_5);
            (config.init(), 1e-2)
        }
    }
}

/// A rank's share of the rows of a micro-batch.
fn batch(number: usize, accelerator: &Accelerator) -> [Tensor<2, Int>; 2] {
    let token = |at: usize| ((at + 1000 * number) * 7919 % 104_729 % TOKENS) as i64;
    let values: Vec<i64> = (0..ROWS * (LENGTH + 1)).map(token).collect();
    let data = TensorData::new(values, [ROWS, LENGTH + 1]);
    let rows = Tensor::<2, Int>::from_data(data, &accelerator.device());
    let share = ROWS / accelerator.world_size();
    let own = rows.narrow(0, accelerator.rank() * share, share);
    [own.clone().narrow(1, 0, LENGTH), own.narrow(1, 1, LENGTH)]
}

/// Takes steps of a case, from the checkpoint in the folder if there is one. Returns the largest distance of losses and
/// norms, and saves the model.
fn steps(
    ranks: usize,
    steps: core::ops::Range<usize>,
    (fixture, case): (&Fixture, &Case),
    folder: &Path,
) -> f64 {
    let builder = Accelerator::builder()
        .dtype(FloatDType::F64)
        .accumulation_steps(MICRO_STEPS)
        .units(Units::Shard);
    let largest = builder.launch(ranks, |accelerator| {
        let (rule, rate) = optimizer(&case.optimizer);
        let model = accelerator.init(|device| Transformer::new(device, &fixture.initial));
        let mut parts = accelerator.prepare((model, rule))?;
        let kept = folder.join("kept");
        if steps.start > 0 {
            (parts, _) = accelerator.resume(&kept, parts)?;
        }
        let (mut model, mut optimizer) = parts;
        let mut largest = 0.0_f64;
        for step in steps.clone() {
            for micro_step in 0..MICRO_STEPS {
                let [tokens, following] = batch(step * MICRO_STEPS + micro_step, &accelerator);
                let rows = tokens.dims()[0];
                let loss = model.loss(tokens, following);
                let gradients = accelerator.backward(loss, &model, rows)?.clip_norm(CLIP);
                if let Some(loss) = gradients.loss() {
                    largest = largest.max((loss - case.losses[step]).abs());
                }
                model = optimizer.step(rate, model, gradients);
            }
            let StepOutcome::Stepped { norm, .. } = optimizer.outcome() else {
                panic!("{:?}", optimizer.outcome());
            };
            largest = largest.max((norm.unwrap() - case.grad_norms[step]).abs());
        }
        accelerator.save_state(&kept, (&model, &optimizer))?;
        accelerator.save_model(&model, folder.join("model.safetensors"))?;
        Ok(largest)
    });
    largest.unwrap().into_iter().fold(0.0, f64::max)
}

#[test]
fn sharded_units_follow_fsdp2_at_every_number_of_ranks_and_through_resumes() {
    let fixture: Fixture =
        serde_json::from_str(include_str!("../../../tests/fixtures/fsdp2.json")).unwrap();
    assert_eq!(fixture.cases.len(), 6);
    for case in &fixture.cases {
        let last = case.losses.len();
        for resumed in [case.ranks, 2, 4, 1] {
            let folder = folder_in_memory();
            let about = (&fixture, case);
            let mut figures = steps(case.ranks, 0..last / 2, about, folder.path());
            figures = figures.max(steps(resumed, last / 2..last, about, folder.path()));
            // A rank without sharding reads the file.
            let alone = Accelerator::builder().dtype(FloatDType::F64);
            let weights = alone.launch(1, |accelerator| {
                let model = accelerator.init(|device| Transformer::new(device, &fixture.initial));
                let model =
                    accelerator.load_model(model, folder.path().join("model.safetensors"))?;
                let mut distance = Distance {
                    path: Vec::new(),
                    weights: &case.last,
                    largest: 0.0,
                };
                model.visit(&mut distance);
                Ok(distance.largest)
            });
            let weights = weights.unwrap()[0];
            let about = format!("{}, {} ranks, then {resumed}", case.optimizer, case.ranks);
            assert!(
                figures < 1e-12,
                "{about}: losses and norms differ by {figures:e}"
            );
            assert!(weights < 1e-12, "{about}: weights differ by {weights:e}");
        }
    }
}
