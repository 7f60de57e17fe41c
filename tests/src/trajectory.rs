//! Runs a trajectory of the fixtures with this library, and compares the two.

use accelerator::nn::Unit;
use accelerator::prelude::*;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::tanh};
use serde::{Deserialize, Serialize};

use crate::fixtures::{Case, Optimizer, Problem, Weights};

/// The result of a run, with the names of the fixtures.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Trajectory {
    pub losses: Vec<f64>,
    pub grad_norms: Vec<f64>,
    pub last: Weights,
}

#[derive(Debug, Module)]
struct Net {
    hidden: Unit<Linear>,
    output: Unit<Linear>,
}

#[derive(Clone, Debug)]
struct Sample {
    x: [f32; 4],
    y: i64,
}

#[derive(Clone, Debug)]
struct Samples {
    x: Tensor<2>,
    y: Tensor<1, Int>,
}

struct SampleBatcher;

/// Trains with the settings of the case.
pub fn run(accelerator: &Accelerator, case: &Case, problem: &Problem) -> Result<Trajectory> {
    assert!(case.even_batches, "the trajectories pad");
    let device = accelerator.device();
    let model = Net::new(&problem.initial, &device);
    let train = LoaderBuilder::new(SampleBatcher)
        .batch_size(case.batch_size)
        .tail(TailPolicy::Pad)
        .build(samples(problem));
    let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer(case), train))?;
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for epoch in 0..case.epochs {
        for batch in train.epoch(epoch) {
            let batch = batch?;
            let loss = CrossEntropyLossConfig::new()
                .init(&device)
                .forward(model.forward(batch.x.clone()), batch.y.clone());
            let mut gradients = accelerator.backward(loss, &model, &batch)?;
            losses.extend(gradients.loss());
            // Ranks that hold pieces of the gradients do not know their norm when they are first asked for it.
            let norm = gradients.norm();
            grad_norms.extend(norm.or_else(|| gradients.norm_of_order(2.0)));
            if let Some(max) = case.clip {
                gradients = gradients.clip_norm(max);
            }
            model = optimizer.step(case.lr, model, gradients);
        }
    }
    // Units may be sharded, and a file has whole parameters.
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("last.safetensors");
    accelerator.save_model(&model, &file)?;
    let last = accelerator.load_model(Net::new(&problem.initial, &device), &file)?;
    accelerator.finish()?;
    Ok(Trajectory {
        losses,
        grad_norms,
        last: last.weights(),
    })
}

impl Trajectory {
    /// Returns the largest differences from PyTorch's results: (losses, norms, weights).
    pub fn distance(&self, case: &Case) -> (f64, f64, f64) {
        let largest = |ours: &[f64], theirs: &[f64]| {
            assert_eq!(
                ours.len(),
                theirs.len(),
                "one figure for each optimizer step"
            );
            ours.iter()
                .zip(theirs)
                .map(|(ours, theirs)| (ours - theirs).abs())
                .fold(0.0, f64::max)
        };
        let wide = |weights: &Weights| {
            weights
                .flat()
                .into_iter()
                .map(f64::from)
                .collect::<Vec<_>>()
        };
        (
            largest(&self.losses, &case.losses),
            largest(&self.grad_norms, &case.grad_norms),
            largest(&wide(&self.last), &wide(&case.last)),
        )
    }
}

impl Net {
    fn new(weights: &Weights, device: &Device) -> Self {
        let linear = |rows: usize, columns: usize, weight: &[f32], bias: &[f32]| {
            let mut linear = LinearConfig::new(columns, rows).init(device);
            let weight = TensorData::new(weight.to_vec(), [rows, columns]);
            linear.weight = Param::from_tensor(Tensor::<2>::from_data(weight, device).transpose());
            let bias = TensorData::new(bias.to_vec(), [rows]);
            linear.bias = Some(Param::from_data(bias, device));
            Unit::new(linear)
        };
        Self {
            hidden: linear(16, 4, &weights.hidden_weight, &weights.hidden_bias),
            output: linear(3, 16, &weights.output_weight, &weights.output_bias),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let run = |layer: &Unit<Linear>, x| layer.run(x, |layer, x| layer.forward(x));
        run(&self.output, tanh(run(&self.hidden, x)))
    }

    fn weights(&self) -> Weights {
        /// The values of each parameter; matrices are transposed, as PyTorch has them.
        struct Values(Vec<Vec<f32>>);
        impl ModuleVisitor for Values {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let value = match D {
                    1 => param.val(),
                    _ => param.val().transpose(),
                };
                self.0.push(value.into_data().try_to_vec().unwrap());
            }
        }
        let mut values = Values(Vec::new());
        self.visit(&mut values);
        let [hidden_weight, hidden_bias, output_weight, output_bias] = values.0.try_into().unwrap();
        Weights {
            hidden_weight,
            hidden_bias,
            output_weight,
            output_bias,
        }
    }
}

impl Batcher<Sample, Samples> for SampleBatcher {
    fn batch(&self, items: Vec<Sample>, device: &Device) -> Samples {
        let count = items.len();
        let x: Vec<f32> = items.iter().flat_map(|sample| sample.x).collect();
        let y: Vec<i64> = items.iter().map(|sample| sample.y).collect();
        Samples {
            x: Tensor::from_data(TensorData::new(x, [count, 4]), device),
            y: Tensor::from_data(TensorData::new(y, [count]), device),
        }
    }
}

fn samples(problem: &Problem) -> InMemDataset<Sample> {
    let (rows, rest) = problem.x.as_chunks::<4>();
    assert!(rest.is_empty() && rows.len() == problem.y.len());
    let sample = |(x, y): (&[f32; 4], &i64)| Sample { x: *x, y: *y };
    InMemDataset::new(rows.iter().zip(&problem.y).map(sample).collect())
}

fn optimizer(case: &Case) -> ModuleOptimizer {
    match case.optimizer {
        Optimizer::Adamw => AdamWConfig::new()
            .with_epsilon(1e-8)
            .with_weight_decay(0.01)
            .init(),
        Optimizer::Sgd => {
            let momentum = case.momentum.unwrap_or(0.0);
            let momentum = MomentumConfig::new()
                .with_momentum(momentum)
                .with_dampening(0.0);
            SgdConfig::new().with_momentum(Some(momentum)).init()
        }
    }
}
