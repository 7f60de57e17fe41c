//! Helpers that the tests of this folder share.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]

pub mod checkpoints;

use accelerator::prelude::*;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};

/// Returns the CPU devices of this build. Tests run on each of them.
pub fn devices() -> impl Iterator<Item = BackendKind> {
    [BackendKind::Flex, BackendKind::NdArray]
        .into_iter()
        .filter(|kind| kind.is_compiled_in())
}

/// A value for each sample, in a column, with the samples' numbers.
#[derive(Clone, Debug)]
pub struct Column {
    pub numbers: Vec<usize>,
    pub values: Tensor<2>,
}

pub struct ColumnBatcher;

impl Batcher<usize, Column> for ColumnBatcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Column {
        let values: Vec<f32> = items.iter().map(|&item| item as f32 / 10.0 - 1.0).collect();
        let shape = [items.len(), 1];
        Column {
            values: Tensor::from_data(TensorData::new(values, shape), device),
            numbers: items,
        }
    }
}

pub fn columns(samples: usize) -> InMemDataset<usize> {
    InMemDataset::new((0..samples).collect())
}

pub fn loader(samples: usize, batch_size: usize) -> accelerator::data::Loader<Column> {
    LoaderBuilder::new(ColumnBatcher)
        .batch_size(batch_size)
        .build(columns(samples))
}

/// Returns a line whose weights are known.
pub fn line(device: &Device) -> Linear {
    let mut line: Linear = LinearConfig::new(1, 1).init(device);
    line.weight = Param::from_data(TensorData::from([[0.5_f32]]), device);
    line.bias = Some(Param::from_data(TensorData::from([0.25_f32]), device));
    line
}

/// Returns a layer whose weights are always the same, even if other tests draw from the generator at the same time.
pub fn linear(inputs: usize, outputs: usize, device: &Device) -> Linear {
    let weights = (0..inputs * outputs).map(|i| (i as f32 * 1.7).sin() / (inputs as f32).sqrt());
    let weights = TensorData::new(weights.collect::<Vec<_>>(), [inputs, outputs]);
    let mut linear: Linear = LinearConfig::new(inputs, outputs).init(device);
    linear.weight = Param::from_data(weights, device);
    linear.bias = Some(Param::from_data(vec![0.1_f32; outputs].as_slice(), device));
    linear
}

/// Returns the squared distance from `3 x - 1`.
pub fn distance(model: &Linear, batch: &Column) -> Tensor<1> {
    let wanted = batch.values.clone() * 3.0 - 1.0;
    MseLoss::new().forward(model.forward(batch.values.clone()), wanted, Reduction::Mean)
}

/// Returns a folder in memory if the system has one, since hundreds of saves would wait for the disk.
pub fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap()
}

/// Returns every float parameter, one after the other.
pub fn flat<M: Module>(model: &M) -> Vec<f32> {
    struct Flat(Vec<f32>);
    impl ModuleVisitor for Flat {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0
                .extend(param.val().into_data().try_to_vec::<f32>().unwrap());
        }
    }
    let mut flat = Flat(Vec::new());
    model.visit(&mut flat);
    flat.0
}

/// Returns the values of the ranks, which must agree to the bit.
pub fn of_every_rank(outcomes: Vec<Vec<f32>>) -> Vec<f32> {
    let bits = |values: &Vec<f32>| {
        values
            .iter()
            .map(|value| value.to_bits())
            .collect::<Vec<_>>()
    };
    for outcome in &outcomes {
        assert_eq!(
            bits(outcome),
            bits(&outcomes[0]),
            "every rank holds the same bits"
        );
    }
    outcomes.into_iter().next().unwrap()
}

pub fn assert_close(ours: &[f32], theirs: &[f32], bound: f32) {
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert!(
            (ours - theirs).abs() <= bound,
            "{ours} is not {theirs} to {bound}"
        );
    }
}
