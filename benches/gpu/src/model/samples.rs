use std::sync::Arc;

use burn::data::dataloader::batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::Model;

/// Different samples; a data set goes through them again and again.
const DIFFERENT: usize = 4096;

/// A batch of samples.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    /// `[samples, numbers]`.
    pub(crate) values: Tensor<2>,
    /// `[samples, labels]`.
    pub(crate) labels: Tensor<2, Int>,
}

/// Makes a [`Batch`] of samples, which are given by their numbers: noise, and labels that have nothing to
/// do with it.
#[derive(Clone, Debug)]
pub(crate) struct Batcher {
    values: Arc<[f32]>,
    labels: Arc<[i64]>,
    inputs: usize,
    outputs: usize,
}

/// The data set 0, 1, 2, …
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers(pub(crate) usize);

impl Batcher {
    /// Of the samples that suit a model.
    pub(crate) fn new(model: Model) -> Self {
        let (inputs, (outputs, classes)) = (model.values(), model.labels());
        let mut state = 42_u64;
        let mut random = move || {
            // Knuth's generator (MMIX), whose upper bits are good enough for noise.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state >> 40
        };
        let uniform = |bits: u64| (bits as f32 / (1 << 23) as f32) - 1.0;
        Self {
            values: (0..DIFFERENT * inputs).map(|_| uniform(random())).collect(),
            labels: (0..DIFFERENT * outputs)
                .map(|_| (random() % classes as u64) as i64)
                .collect(),
            inputs,
            outputs,
        }
    }
}

impl batcher::Batcher<usize, Batch> for Batcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let x = rows(&self.values, &items, self.inputs);
        let y = rows(&self.labels, &items, self.outputs);
        Batch {
            values: Tensor::from_data(TensorData::new(x, [items.len(), self.inputs]), device),
            labels: Tensor::from_data(TensorData::new(y, [items.len(), self.outputs]), device),
        }
    }
}

impl Dataset<usize> for Numbers {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        Ok(index)
    }

    fn len(&self) -> usize {
        self.0
    }
}

fn rows<T: Copy>(pool: &[T], items: &[usize], width: usize) -> Vec<T> {
    let mut all = Vec::with_capacity(items.len() * width);
    for item in items {
        let start = item % DIFFERENT * width;
        all.extend_from_slice(&pool[start..start + width]);
    }
    all
}
