use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::Model;

/// Different samples; a data set goes through them again and again.
const DIFFERENT: usize = 1024;

/// A batch of samples.
#[derive(Clone, Debug)]
pub struct Batch {
    /// `[samples, numbers]`.
    pub values: Tensor<2>,
    /// `[samples, labels]`.
    pub labels: Tensor<2, Int>,
}

/// Noise and labels that have nothing to do with it, so that the loss stays where it is however
/// long a bench trains.
#[derive(Clone, Debug)]
pub struct Samples {
    values: Arc<[f32]>,
    labels: Arc<[i64]>,
    inputs: usize,
    outputs: usize,
}

/// Makes a [`Batch`] of samples, which are given by their numbers.
#[derive(Clone, Debug)]
pub struct SampleBatcher(Samples);

impl Samples {
    /// The samples of a model.
    pub fn new(model: Model) -> Self {
        let (inputs, (outputs, classes)) = (model.inputs(), model.labels());
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

    /// A data set of so many samples.
    pub fn dataset(count: usize) -> InMemDataset<usize> {
        InMemDataset::new((0..count).collect())
    }

    /// What makes batches of them.
    pub fn batcher(&self) -> SampleBatcher {
        SampleBatcher(self.clone())
    }
}

impl Batcher<usize, Batch> for SampleBatcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let Samples {
            values,
            labels,
            inputs,
            outputs,
        } = &self.0;
        let x = rows(values, &items, *inputs);
        let y = rows(labels, &items, *outputs);
        Batch {
            values: Tensor::from_data(TensorData::new(x, [items.len(), *inputs]), device),
            labels: Tensor::from_data(TensorData::new(y, [items.len(), *outputs]), device),
        }
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
