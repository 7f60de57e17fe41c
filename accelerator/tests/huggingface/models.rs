//! Burn versions of the fixtures' models, and their data.

use std::collections::BTreeMap;
use std::fmt::Display;

use burn::data::dataloader::batcher::Batcher;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::activation::ActivationConfig;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::MaxPool2dConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::{log_softmax, relu};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use accelerator::train::LossOutput;

use super::Case;

/// The inputs of a sample, and its label.
pub type Sample = (Vec<f64>, f64);
/// Logits and labels.
pub type Outputs = (Tensor<2>, Tensor<2>);
/// Flat values, by path.
pub type Weights = BTreeMap<String, Vec<f64>>;

#[derive(Clone, Debug)]
pub struct Rows {
    pub x: Tensor<2>,
    pub labels: Tensor<2>,
}

pub struct Collator(pub DType);

impl Batcher<Sample, Rows> for Collator {
    fn batch(&self, items: Vec<Sample>, device: &Device) -> Rows {
        let rows = items.len();
        let (x, labels): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        let matrix = |values: Vec<f64>| {
            let shape = [rows, values.len() / rows];
            Tensor::from_data(TensorData::new(values, shape), (device, self.0))
        };
        Rows {
            x: matrix(x.concat()),
            labels: matrix(labels),
        }
    }
}

pub trait Model: Module + Display + 'static {
    fn new(device: &Device) -> Self;

    fn loss(&self, rows: &Rows, case: &Case) -> LossOutput<Outputs>;
}

/// Implements the line `w x + b`.
impl Model for Linear {
    fn new(device: &Device) -> Self {
        LinearConfig::new(1, 1).init(device)
    }

    fn loss(&self, rows: &Rows, _: &Case) -> LossOutput<Outputs> {
        let found = self.forward(rows.x.clone());
        let loss = (found.clone() - rows.labels.clone()).powi_scalar(2).mean();
        LossOutput::new(loss).with_outputs((found, rows.labels.clone()))
    }
}

/// A single weight, whose loss is a mean over the tokens of a batch.
#[derive(Debug, Module)]
pub struct OneWeight {
    weight: Param<Tensor<1>>,
}

impl Model for OneWeight {
    fn new(device: &Device) -> Self {
        Self {
            weight: Param::from_data([0.0], device),
        }
    }

    fn loss(&self, rows: &Rows, case: &Case) -> LossOutput<Outputs> {
        let distances = self.weight.val().unsqueeze::<2>() - rows.x.clone();
        let tokens = rows.x.dims()[1];
        let loss = LossOutput::new(distances.powi_scalar(2).mean());
        let loss = match &*case.name {
            "weighted" => loss.with_num_items(tokens),
            _ => loss,
        };
        loss.with_outputs((rows.x.clone(), rows.labels.clone()))
    }
}

#[derive(Debug, Module)]
pub struct Classifier {
    tokens: Embedding,
    places: Embedding,
    encoder: TransformerEncoder,
    output: Linear,
}

impl Model for Classifier {
    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(32, 8).init(device),
            places: EmbeddingConfig::new(12, 8).init(device),
            encoder: TransformerEncoderConfig::new(8, 16, 2, 2)
                .with_dropout(0.0)
                .with_activation(ActivationConfig::GeluApproximate)
                .init(device),
            output: LinearConfig::new(8, 4).init(device),
        }
    }

    fn loss(&self, rows: &Rows, case: &Case) -> LossOutput<Outputs> {
        let tokens = rows.x.clone().int();
        let [batch, length] = tokens.dims();
        let places = Tensor::arange(0..length as i64, &tokens.device()).unsqueeze::<2>();
        let x = self.tokens.forward(tokens.clone()) + self.places.forward(places);
        let padding = tokens.equal_elem(0);
        let x = self
            .encoder
            .forward(TransformerEncoderInput::new(x).mask_pad(padding));
        let is_real = rows.x.clone().clamp(0.0, 1.0).reshape([batch, length, 1]);
        let mean = (x * is_real.clone()).sum_dim(1) / is_real.sum_dim(1);
        let logits = self.output.forward(mean.reshape([batch, 8]));
        cross_entropy(logits, rows, case)
    }
}

#[derive(Debug, Module)]
pub struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    linear1: Linear,
    linear2: Linear,
}

impl Model for Cnn {
    fn new(device: &Device) -> Self {
        Self {
            conv1: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            conv2: Conv2dConfig::new([4, 8], [3, 3]).init(device),
            linear1: LinearConfig::new(32, 16).init(device),
            linear2: LinearConfig::new(16, 10).init(device),
        }
    }

    fn loss(&self, rows: &Rows, case: &Case) -> LossOutput<Outputs> {
        let [batch, _] = rows.x.dims();
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init();
        let x = rows.x.clone().reshape([batch, 1, 14, 14]);
        let x = pool.forward(relu(self.conv1.forward(x)));
        let x = pool.forward(relu(self.conv2.forward(x)));
        let x = relu(self.linear1.forward(x.reshape([batch, 32])));
        cross_entropy(self.linear2.forward(x), rows, case)
    }
}

fn cross_entropy(logits: Tensor<2>, rows: &Rows, case: &Case) -> LossOutput<Outputs> {
    let smoothing = case.label_smoothing();
    let labels: Tensor<2, Int> = rows.labels.clone().int();
    let logs = log_softmax(logits.clone(), 1);
    let of_labels = logs.clone().gather(1, labels).mean();
    let loss = of_labels * (1.0 - smoothing) + logs.mean() * smoothing;
    LossOutput::new(-loss).with_outputs((logits, rows.labels.clone()))
}

/// Returns the share of rows whose greatest logit is that of the label.
pub fn accuracy((logits, labels): Outputs) -> f64 {
    let [rows, _] = labels.dims();
    let hits = logits.argmax(1).equal(labels.int()).int().sum();
    hits.into_data().iter::<f64>().sum::<f64>() / rows as f64
}

/// Returns the model with these weights, all of which it must use.
pub fn with_weights<M: Module>(model: M, weights: &Weights, dtype: DType) -> M {
    let mut writer = Writer {
        path: Vec::new(),
        weights: weights.clone(),
        dtype,
    };
    let model = model.map(&mut writer);
    assert!(writer.weights.is_empty(), "no {:?}", writer.weights);
    model
}

pub fn weights_of<M: Module>(model: &M) -> Weights {
    let mut reader = Reader::default();
    model.visit(&mut reader);
    reader.weights
}

struct Writer {
    path: Vec<String>,
    weights: Weights,
    dtype: DType,
}

impl ModuleMapper for Writer {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let values = self.weights.remove(&path);
        let values = values.unwrap_or_else(|| panic!("the fixture has no {path}"));
        let old = param.val();
        let data = TensorData::new(values, old.dims());
        Param::from_tensor(Tensor::from_data(data, (&old.device(), self.dtype)))
    }
}

#[derive(Default)]
struct Reader {
    path: Vec<String>,
    weights: Weights,
}

impl ModuleVisitor for Reader {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let values = param.val().into_data().iter::<f64>().collect();
        self.weights.insert(self.path.join("."), values);
    }
}
