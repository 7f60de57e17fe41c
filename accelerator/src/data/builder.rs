use core::fmt;
use std::sync::Arc;

use accelerator_plan::{BatchSize, Order, Plan, PlanConfig, TailPolicy};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;

use super::source::{Batched, Source};
use crate::error::Result;

/// Builds a loader that [`Accelerator::prepare`](crate::Accelerator::prepare) can share out.
///
/// The methods are those of Burn's builder of the same name, and a few more. Unlike Burn's, the
/// order of samples depends on seed and epoch alone, never on workers or on what was read
/// before, so that it is the same on every rank and can be resumed anywhere.
///
/// ```
/// use accelerator::data::{DataLoaderBuilder, TailPolicy};
/// use burn::data::dataloader::batcher::Batcher;
/// use burn::data::dataset::InMemDataset;
/// use burn::tensor::Device;
///
/// struct Listed;
/// impl Batcher<u32, Vec<u32>> for Listed {
///     fn batch(&self, items: Vec<u32>, _device: &Device) -> Vec<u32> { items }
/// }
///
/// let shares = accelerator::launch(2, |accelerator| {
///     let loader = DataLoaderBuilder::new(Listed)
///         .batch_size(2)
///         .build(InMemDataset::new((0..6).collect()));
///     let loader = accelerator.prepare(loader)?;
///     loader.epoch(0).map(|batch| Ok(batch?.into_inner())).collect()
/// })?;
/// assert_eq!(shares, [[vec![0, 1], vec![4]], [vec![2, 3], vec![5]]]);
/// # let _: &Vec<Vec<Vec<u32>>> = &shares;
/// # Ok::<(), accelerator::Error>(())
/// ```
#[must_use]
pub struct DataLoaderBuilder<I, O> {
    batcher: Arc<dyn Batcher<I, O>>,
    spec: Spec,
}

impl<I: Send + 'static, O: Send + 'static> DataLoaderBuilder<I, O> {
    /// Begins with what makes a batch of samples. The batch size is 1 until it is set.
    pub fn new(batcher: impl Batcher<I, O> + 'static) -> Self {
        Self {
            batcher: Arc::new(batcher),
            spec: Spec {
                agreed: None,
                order: Order::Sequential,
                prefetch: 2,
                size: Size::PerRank(1),
                tail: TailPolicy::default(),
                workers: 1,
            },
        }
    }

    /// How many samples each rank gets in a step. `W` ranks use `W` times as many together.
    pub fn batch_size(mut self, samples: usize) -> Self {
        self.spec.size = Size::PerRank(samples);
        self
    }

    /// How many samples all ranks get in a step together, at least one each. Where it does not
    /// divide over the ranks, the first ones get one sample more ([`TailPolicy::Pad`] and
    /// [`TailPolicy::Uneven`] want a multiple of the world size). This is Accelerate's
    /// `split_batches`.
    pub fn global_batch_size(mut self, samples: usize) -> Self {
        self.spec.size = Size::Global(samples);
        self
    }

    /// Shuffles, in another order each epoch.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.spec.order = Order::Shuffled { seed };
        self
    }

    /// How many threads load ahead. With 0, each batch is loaded when it is asked for. The order
    /// of batches does not depend on it. Default: 1.
    pub fn num_workers(mut self, workers: usize) -> Self {
        self.spec.workers = workers;
        self
    }

    /// How many batches each worker may be ahead, at least 1. Default: 2.
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.spec.prefetch = batches.max(1);
        self
    }

    /// What happens where the samples do not fill the last step. Default: `Exact`.
    pub fn tail(mut self, policy: TailPolicy) -> Self {
        self.spec.tail = policy;
        self
    }

    /// Adds the data set.
    pub fn build(self, dataset: impl Dataset<I> + 'static) -> Loader<O> {
        Loader {
            source: Arc::new(Batched {
                batcher: self.batcher,
                dataset: Arc::new(dataset),
            }),
            spec: self.spec,
        }
    }
}

/// A loader that was built and not yet shared out: pass it to
/// [`Accelerator::prepare`](crate::Accelerator::prepare).
#[must_use]
pub struct Loader<O> {
    pub(super) source: Arc<dyn Source<O>>,
    pub(super) spec: Spec,
}

/// How samples are to be read, whatever they are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spec {
    /// The global batch size of the checkpoint that training went on from, instead of `size`.
    agreed: Option<u64>,
    order: Order,
    pub(super) prefetch: usize,
    size: Size,
    tail: TailPolicy,
    pub(super) workers: usize,
}

/// As the user gave it.
#[derive(Clone, Copy, Debug)]
enum Size {
    Global(usize),
    PerRank(usize),
}

impl Spec {
    /// Who gets which of `samples` samples.
    pub(super) fn plan(&self, samples: u64, world_size: usize) -> Result<Plan> {
        let size = match (self.agreed, self.size) {
            (Some(size), _) => BatchSize::global(usize::try_from(size).unwrap_or(usize::MAX))?,
            (None, Size::Global(size)) => BatchSize::global(size)?,
            (None, Size::PerRank(size)) => BatchSize::per_rank(size)?,
        };
        Ok(PlanConfig::new(samples, size)
            .with_world_size(world_size)
            .with_order(self.order)
            .with_tail(self.tail)
            .init()?)
    }

    /// With that global batch size, whatever the user gave.
    pub(super) fn agreed(self, global_batch: Option<u64>) -> Self {
        Self {
            agreed: global_batch,
            ..self
        }
    }

    /// The batch size that the user gave, in words.
    pub(super) fn size(&self) -> String {
        match self.size {
            Size::Global(size) => format!("a global batch size of {size}"),
            Size::PerRank(size) => format!("a batch size of {size}"),
        }
    }

    /// The order of samples, in words.
    pub(super) fn order(&self) -> String {
        match self.order {
            Order::Shuffled { seed } => format!("shuffled by {seed}"),
            Order::Sequential => "in sequence".to_owned(),
        }
    }

    pub(super) fn tail(&self) -> TailPolicy {
        self.tail
    }

    pub(super) fn is_uneven(&self) -> bool {
        self.tail == TailPolicy::Uneven
    }
}

/// What must be the same on every rank.
impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, order, tail) = (self.size(), self.order(), self.tail);
        write!(f, "{size}, {order}, tail policy {tail}")
    }
}

impl<I, O> fmt::Debug for DataLoaderBuilder<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoaderBuilder")
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

impl<O> fmt::Debug for Loader<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("samples", &self.source.len())
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}
