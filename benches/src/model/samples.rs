use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::{Device, Int, Tensor, TensorData};

/// The sizes of samples.
#[derive(Clone, Copy, Debug)]
pub struct SampleKind {
    /// The number of values in a sample.
    pub values: usize,
    /// The number of labels in a sample.
    pub labels: usize,
    /// The number of different labels.
    pub classes: usize,
}

/// A batch of samples.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The values, `[samples, values]`.
    pub values: Tensor<2>,
    /// The labels, `[samples, labels]`.
    pub labels: Tensor<2, Int>,
}

/// Noise with unrelated labels, so that the loss stays the same however long a bench trains.
#[derive(Clone, Debug)]
pub struct Samples {
    values: Arc<[f32]>,
    labels: Arc<[i64]>,
    kind: SampleKind,
    different: usize,
}

/// The data set 0, 1, 2, …
#[derive(Clone, Copy, Debug)]
pub struct Numbers(usize);

/// Makes a [`Batch`] of the samples with the given numbers.
#[derive(Clone, Debug)]
pub struct SampleBatcher(Samples);

impl Samples {
    /// Creates `different` distinct samples, which a data set repeats again and again.
    pub fn new(kind: SampleKind, different: usize) -> Self {
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
            values: (0..different * kind.values)
                .map(|_| uniform(random()))
                .collect(),
            labels: (0..different * kind.labels)
                .map(|_| (random() % kind.classes as u64) as i64)
                .collect(),
            kind,
            different,
        }
    }

    /// Creates a data set of `count` samples.
    pub fn dataset(count: usize) -> Numbers {
        Numbers(count)
    }

    /// Creates the batcher of these samples.
    pub fn batcher(&self) -> SampleBatcher {
        SampleBatcher(self.clone())
    }

    fn rows<T: Copy>(&self, pool: &[T], items: &[usize], width: usize) -> Vec<T> {
        let mut all = Vec::with_capacity(items.len() * width);
        for item in items {
            let start = item % self.different * width;
            all.extend_from_slice(&pool[start..start + width]);
        }
        all
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

impl Batcher<usize, Batch> for SampleBatcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let Self(samples) = self;
        let SampleKind { values, labels, .. } = samples.kind;
        let x = samples.rows(&samples.values, &items, values);
        let y = samples.rows(&samples.labels, &items, labels);
        Batch {
            values: Tensor::from_data(TensorData::new(x, [items.len(), values]), device),
            labels: Tensor::from_data(TensorData::new(y, [items.len(), labels]), device),
        }
    }
}
