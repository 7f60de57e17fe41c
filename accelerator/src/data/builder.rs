//! The builder of loaders, and the loaders that it builds.

use core::fmt;
use std::sync::Arc;

use accelerator_plan::{TailPolicy, TokenBatches, WeightedSampler};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::Device;

use super::order::{BatchSizeSpec, Listed, SampleOrder, Spec, TokenOrder};
use super::source::{self, Batched, Batching, Digest, ItemSource, SamplePlace};
use super::stream::SharedStream;
use crate::core::error::{Error, Result};

/// Builds a loader that [`Accelerator::prepare`](crate::Accelerator::prepare) divides among the ranks.
///
/// The methods are those of Burn's builder of the same name, and a few more. Unlike Burn's, the
/// order of samples depends on seed and epoch alone, never on workers or on what was read
/// before, so that it is the same on every rank and can be resumed anywhere.
///
/// ```
/// use accelerator::data::LoaderBuilder;
/// use accelerator::plan::TailPolicy;
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
///     let loader = LoaderBuilder::new(Listed)
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
pub struct LoaderBuilder<I, O> {
    pub(super) batching: Batching<I, O>,
    compares_items: bool,
    pub(super) spec: Spec,
    tokens: Option<TokenLimit<I>>,
}

/// A limit on the tokens of a batch.
struct TokenLimit<I> {
    max: usize,
    length: Box<dyn Fn(&I) -> usize + Send + Sync>,
    group: GroupByTokens,
}

/// Groups samples of these lengths into batches with a limit.
type GroupByTokens = fn(Vec<u64>, u64) -> accelerator_plan::Result<TokenBatches>;

impl<I: Send + 'static, O: Send + 'static> LoaderBuilder<I, O> {
    /// Makes a builder with the batcher, which turns samples into a batch. The batch size is 1 until you set it.
    ///
    /// The batcher may draw random numbers from the device it is given: see
    /// [random numbers](crate::data#random-numbers).
    pub fn new(batcher: impl Batcher<I, O> + 'static) -> Self {
        Self {
            batching: Batching {
                batcher: Arc::new(batcher),
                maker: Arc::default(),
                map: None,
            },
            compares_items: true,
            spec: Spec::default(),
            tokens: None,
        }
    }

    /// Makes a builder with a function instead of a batcher.
    pub fn from_fn(batch: impl Fn(Vec<I>, &Device) -> O + Send + Sync + 'static) -> Self {
        Self::new(FnBatcher(batch))
    }

    /// Sets how many samples each rank gets in a step. `W` ranks use `W` times as many together.
    pub fn batch_size(mut self, samples: usize) -> Self {
        self.spec.size = BatchSizeSpec::PerRank(samples);
        self
    }

    /// Sets how many samples all ranks together get in a step, at least one each. If the number is not a multiple of
    /// the world size, the first ranks get one sample more; [`TailPolicy::Pad`] and [`TailPolicy::Uneven`] require a
    /// multiple. This is Accelerate's `split_batches`.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::prelude::*;
    ///
    /// let sizes = launch(3, |accelerator| {
    ///     let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
    ///         .global_batch_size(4)
    ///         .build(InMemDataset::new((0..8).collect()));
    ///     let loader = accelerator.prepare(loader)?;
    ///     loader.epoch(0).map(|batch| Ok(batch?.num_samples())).collect::<Result<Vec<_>>>()
    /// })?;
    /// assert_eq!(sizes, [[2, 2], [1, 1], [1, 1]]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn global_batch_size(mut self, samples: usize) -> Self {
        self.spec.size = BatchSizeSpec::Global(samples);
        self
    }

    /// Shuffles the samples, in a different order each epoch.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.spec.order = SampleOrder::Shuffled { seed };
        self
    }

    /// Reads the samples in the order that `order` returns for each epoch, as positions in the data set. It may leave
    /// samples out or repeat them.
    ///
    /// It must depend on the epoch alone. Ranks compare what they got when an epoch's first batch is
    /// asked for, which all of them must do together, and fail alike where it differs. An epoch that continues
    /// from a checkpoint is compared with what was given when it began.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::prelude::*;
    ///
    /// let shares = launch(2, |accelerator| {
    ///     let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
    ///         .batch_size(2)
    ///         .sampler(|epoch| (epoch..10).rev().collect())
    ///         .build(InMemDataset::new((0..10).collect()));
    ///     let loader = accelerator.prepare(loader)?;
    ///     loader.epoch(3).map(|batch| Ok(batch?.into_inner())).collect()
    /// })?;
    /// assert_eq!(shares, [[vec![9, 8], vec![5, 4]], [vec![7, 6], vec![3]]]);
    /// # let _: &Vec<Vec<Vec<u32>>> = &shares;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn sampler(mut self, order: impl Fn(u64) -> Vec<u64> + Send + Sync + 'static) -> Self {
        self.spec.order = SampleOrder::Listed(Listed {
            choices: None,
            draws: None,
            list: Arc::new(order),
            name: "that of a sampler".to_owned(),
        });
        self
    }

    /// Uses the batches that `batches` returns for each epoch: lists of positions in the data set, of any sizes.
    /// Ranks take whole batches in turns, one each per step; batch sizes do not count. Under [`TailPolicy::Exact`], a
    /// rank idles if the last round has no batch for it.
    ///
    /// It must depend on the epoch alone, and is compared between ranks, as a
    /// [`sampler`](Self::sampler)'s order is.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::prelude::*;
    ///
    /// let shares = launch(2, |accelerator| {
    ///     let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
    ///         .batch_sampler(|_epoch| vec![vec![0, 1, 2], vec![3], vec![4, 5]])
    ///         .build(InMemDataset::new((0..6).collect()));
    ///     let loader = accelerator.prepare(loader)?;
    ///     loader.epoch(0).map(|batch| batch.map(|batch| batch.real())).collect()
    /// })?;
    /// assert_eq!(shares, [[3, 2], [1, 0]]);
    /// # let _: &Vec<Vec<usize>> = &shares;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn batch_sampler(
        mut self,
        batches: impl Fn(u64) -> Vec<Vec<u64>> + Send + Sync + 'static,
    ) -> Self {
        self.spec.order = SampleOrder::Batched(Arc::new(batches));
        self
    }

    /// Makes batches with at most `tokens` tokens each, where `length` returns the number of tokens of a sample. Padding
    /// counts: the number of samples times the length of the longest is at most `tokens`. Samples of similar length share
    /// a batch. The batch size is ignored. `length` sees samples as the data set returns them, before
    /// [`map_samples`](Self::map_samples).
    ///
    /// Each step gives every rank one whole batch, so ranks get about the same number of tokens. Under
    /// [`TailPolicy::Exact`], ranks idle in the last step if there are too few batches. With [`shuffle`](Self::shuffle),
    /// each epoch reorders the batches and swaps samples of equal length; otherwise the longest samples come first. Every
    /// epoch has the same number of [steps](super::PreparedLoader::steps). Batches do not depend on the number of ranks,
    /// so a job can resume on a different number.
    ///
    /// [`build`](Self::build) reads the whole data set once, on every rank, to get the lengths. If the loss is a mean over
    /// tokens, pass the number of tokens to [`Batch::with_weight`](super::Batch::with_weight).
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::prelude::*;
    ///
    /// let sentences = ["a", "a b", "a b c d e", "a b c", "a b c d", "a b"].map(str::to_owned);
    /// let tokens = |sentence: &String| sentence.split(' ').count();
    /// let accelerator = Accelerator::new()?;
    /// let loader = LoaderBuilder::from_fn(|items: Vec<String>, _| items)
    ///     .max_tokens(8, tokens)
    ///     .build(InMemDataset::new(sentences.to_vec()));
    /// let loader = accelerator.prepare(loader)?;
    /// assert_eq!(loader.steps(), Some(3));
    /// let batches = loader.epoch(0).map(|batch| Ok(batch?.into_inner())).collect::<Result<Vec<_>>>()?;
    /// assert_eq!(batches[0], ["a b c d e"]);
    /// assert_eq!(batches[1], ["a b c d", "a b c"]);
    /// assert_eq!(batches[2], ["a b", "a b", "a"]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn max_tokens(
        self,
        tokens: usize,
        length: impl Fn(&I) -> usize + Send + Sync + 'static,
    ) -> Self {
        self.with_tokens(tokens, Box::new(length), TokenBatches::padded)
    }

    /// Like [`max_tokens`](Self::max_tokens), for a batcher that concatenates the samples of a batch without padding: the
    /// lengths add up to at most `tokens`, and batches are as full as possible. Samples of different lengths share a
    /// batch.
    pub fn max_packed_tokens(
        self,
        tokens: usize,
        length: impl Fn(&I) -> usize + Send + Sync + 'static,
    ) -> Self {
        self.with_tokens(tokens, Box::new(length), TokenBatches::packed)
    }

    fn with_tokens(
        mut self,
        max: usize,
        length: Box<dyn Fn(&I) -> usize + Send + Sync>,
        group: GroupByTokens,
    ) -> Self {
        self.tokens = Some(TokenLimit { max, length, group });
        self
    }

    /// Draws `draws` samples in each epoch by their weights, with replacement.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::plan::WeightedSampler;
    /// use accelerator::prelude::*;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
    ///     .batch_size(50)
    ///     .weighted(WeightedSampler::new([1.0, 1.0, 8.0])?, 100, 42)
    ///     .build(InMemDataset::new(vec![0, 1, 2]));
    /// let loader = accelerator.prepare(loader)?;
    /// assert_eq!(loader.steps(), Some(2));
    /// let first = loader.epoch(0).next().unwrap()?;
    /// assert!(first.iter().filter(|&&item| item == 2).count() > 25);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn weighted(mut self, sampler: WeightedSampler, draws: usize, seed: u64) -> Self {
        self.spec.order = SampleOrder::Listed(Listed {
            choices: Some(sampler.len() as u64),
            draws: Some(draws as u64),
            name: format!("{draws} draws by weights and {seed}, with replacement"),
            list: Arc::new(move |epoch| sampler.with_replacement(draws, seed, epoch)),
        });
        self
    }

    /// Draws `draws` different samples in each epoch by their weights; at most as many as have a weight above 0.
    ///
    /// # Errors
    ///
    /// [`Error::is_config`](crate::Error::is_config) if fewer samples can be drawn.
    pub fn weighted_without_replacement(
        mut self,
        sampler: WeightedSampler,
        draws: usize,
        seed: u64,
    ) -> Result<Self> {
        sampler.without_replacement(draws, seed, 0)?;
        self.spec.order = SampleOrder::Listed(Listed {
            choices: Some(sampler.len() as u64),
            draws: Some(draws as u64),
            name: format!("{draws} draws by weights and {seed}, without replacement"),
            list: Arc::new(move |epoch| {
                // It succeeded for epoch 0, and does not depend on the epoch.
                let drawn = sampler.without_replacement(draws, seed, epoch);
                drawn.unwrap_or_default()
            }),
        });
        Ok(self)
    }

    /// Applies a function to each sample before it is put into a batch, on the thread that loads it. The function
    /// knows the sample's position, so that augmentation is the same whichever rank and worker does it.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::prelude::*;
    ///
    /// let noisy = |ranks| launch(ranks, |accelerator| {
    ///     let loader = LoaderBuilder::from_fn(|items: Vec<u64>, _| items)
    ///         .batch_size(2)
    ///         // In a program: a generator that is seeded by this.
    ///         .map_samples(|item, place| item * 1000 + place.rng_seed(42) % 1000)
    ///         .build(InMemDataset::new((0..8).collect()));
    ///     let loader = accelerator.prepare(loader)?;
    ///     loader.epoch(0).map(|batch| Ok(batch?.into_inner())).collect::<Result<Vec<_>>>()
    /// });
    /// let (one, two) = (noisy(1)?.concat().concat(), noisy(2)?.concat().concat());
    /// assert!(one.iter().all(|item| two.contains(item)));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn map_samples(
        mut self,
        map: impl Fn(I, SamplePlace) -> I + Send + Sync + 'static,
    ) -> Self {
        self.batching.map = Some(match self.batching.map {
            None => Arc::new(map),
            Some(before) => Arc::new(move |item, place| map(before(item, place), place)),
        });
        self
    }

    /// Sets how many threads load batches ahead. With 0, each batch is loaded when the loop takes it. The order of
    /// batches does not depend on this number. A stream is read by one thread. Default: 1.
    ///
    /// Workers call the batcher too, unless it [draws from the device](crate::data#random-numbers).
    ///
    /// Leaving an epoch of a data set early waits for the batches that are being loaded at that moment, all at
    /// the same time.
    pub fn num_workers(mut self, workers: usize) -> Self {
        self.spec.workers = workers;
        self
    }

    /// Sets how many batches each worker may be ahead, at least 1. Default: 2.
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.spec.prefetch = batches.max(1);
        self
    }

    /// Sets what happens if the samples do not fill the last step. Default: `Exact`.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// # use accelerator::prelude::*;
    /// # let accelerator = Accelerator::new()?;
    /// let sizes = |policy| -> Result<Vec<_>> {
    ///     let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
    ///         .batch_size(4)
    ///         .tail(policy)
    ///         .build(InMemDataset::new((0..10).collect()));
    ///     accelerator.prepare(loader)?.epoch(0).map(|batch| Ok(batch?.num_samples())).collect()
    /// };
    /// assert_eq!(sizes(TailPolicy::Exact)?, [4, 4, 2]);
    /// assert_eq!(sizes(TailPolicy::Pad)?, [4, 4, 4]);
    /// assert_eq!(sizes(TailPolicy::Drop)?, [4, 4]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn tail(mut self, policy: TailPolicy) -> Self {
        self.spec.tail = policy;
        self
    }

    /// Trusts that each index of the data set gives the same item on every rank, and every time, without a check. For
    /// data sets whose items take long to read, or are random on purpose: see [the same data set on every
    /// rank](crate::data#the-same-data-set-on-every-rank).
    pub fn without_item_check(mut self) -> Self {
        self.compares_items = false;
        self
    }

    /// Does not compile, and says why.
    #[doc(hidden)]
    pub fn set_device(self, _: Device) -> Self
    where
        Self: OnDevice,
    {
        self
    }

    /// Returns the settings for a stream. With a token limit, `prepare` refuses them.
    pub(super) fn stream_spec(&self) -> Spec {
        let mut spec = self.spec.clone();
        if self.tokens.is_some() {
            let refusal = Error::config(
                "`max_tokens` and `max_packed_tokens` need a data set, and a stream has no lengths: batch by tokens within the stream",
            );
            spec.order = SampleOrder::Tokens(Err(refusal));
        }
        spec
    }

    fn build_with(
        mut self,
        dataset: impl Dataset<I> + 'static,
        digest: Option<Digest<I>>,
    ) -> Loader<O> {
        if let Some(limit) = &self.tokens {
            let order = limit.order(&dataset, &self.spec.order);
            self.spec.order = SampleOrder::Tokens(order.map(Arc::new));
        }
        Loader {
            origin: SampleSource::Indexed(Arc::new(Batched {
                batching: self.batching.with_workers(self.spec.workers),
                dataset: Arc::new(dataset),
                digest: digest.filter(|_| self.compares_items),
            })),
            spec: self.spec,
        }
    }
}

impl<I> TokenLimit<I> {
    /// Divides the samples of a data set into batches, which are shuffled as the samples were to be.
    fn order(&self, dataset: &dyn Dataset<I>, order: &SampleOrder) -> Result<TokenOrder> {
        let max = self.max;
        let seed = match order {
            SampleOrder::Sequential => None,
            SampleOrder::Shuffled { seed } => Some(*seed),
            _ => {
                return Err(Error::config(format!(
                    "a limit of {max} tokens per batch can only be combined with `shuffle`, but the order of this loader is \
                     {order}: remove one of them"
                )));
            }
        };
        let lengths = source::lengths(dataset, &self.length)?;
        let batches = (self.group)(lengths, max as u64)?;
        Ok(TokenOrder {
            name: format!("{batches}, {order}"),
            batches,
            seed,
        })
    }
}

impl<I: fmt::Debug + Send + 'static, O: Send + 'static> LoaderBuilder<I, O> {
    /// Builds a loader of a data set. When the loader is prepared, ranks compare some of its items: see [the same
    /// data set on every rank](crate::data#the-same-data-set-on-every-rank).
    ///
    /// Items without `Debug` are not compared. Their loader is built by [`BuildUncompared::build`], which is in the
    /// [prelude](crate::prelude).
    pub fn build(self, dataset: impl Dataset<I> + 'static) -> Loader<O> {
        self.build_with(dataset, Some(source::of_debug))
    }
}

/// Builds loaders of items that do not implement `Debug`, and so are not compared between ranks.
///
/// ```
/// use accelerator::prelude::*;
/// use burn::data::dataset::InMemDataset;
///
/// #[derive(Clone)]
/// struct Secret(u32);
///
/// let accelerator = Accelerator::new()?;
/// let loader = LoaderBuilder::from_fn(|items: Vec<Secret>, _| items.iter().map(|item| item.0).sum::<u32>())
///     .batch_size(2)
///     .build(InMemDataset::new(vec![Secret(1), Secret(2)]));
/// let loader = accelerator.prepare(loader)?;
/// assert_eq!(*loader.epoch(0).next().unwrap()?, 3);
/// # Ok::<(), Error>(())
/// ```
pub trait BuildUncompared<I, O> {
    /// Adds the data set. Where items implement `Debug`, this is [`LoaderBuilder::build`].
    fn build(self, dataset: impl Dataset<I> + 'static) -> Loader<O>;
}

impl<I: Send + 'static, O: Send + 'static> BuildUncompared<I, O> for LoaderBuilder<I, O> {
    fn build(self, dataset: impl Dataset<I> + 'static) -> Loader<O> {
        self.build_with(dataset, None)
    }
}

/// A bound that no loader meets: its device is the accelerator's.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "a loader is not told its device",
    label = "leave this call out",
    note = "batches of a prepared loader arrive on the device of the accelerator, `accelerator.device()`"
)]
pub trait OnDevice {}

struct FnBatcher<F>(F);

impl<I, O, F: Fn(Vec<I>, &Device) -> O + Send + Sync> Batcher<I, O> for FnBatcher<F> {
    fn batch(&self, items: Vec<I>, device: &Device) -> O {
        (self.0)(items, device)
    }
}

impl<I, O> fmt::Debug for LoaderBuilder<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoaderBuilder")
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

/// A loader that is built but not yet prepared: pass it to [`Accelerator::prepare`](crate::Accelerator::prepare).
#[must_use]
pub struct Loader<O> {
    pub(super) origin: SampleSource<O>,
    pub(super) spec: Spec,
}

pub(super) enum SampleSource<O> {
    Indexed(Arc<dyn ItemSource<O>>),
    Stream(Arc<SharedStream<O>>),
}

impl<O> SampleSource<O> {
    /// Returns the number of samples; `None` for a stream.
    pub(super) fn len(&self) -> Option<u64> {
        match self {
            Self::Indexed(source) => Some(source.len()),
            Self::Stream(_) => None,
        }
    }
}

impl<O> Clone for SampleSource<O> {
    fn clone(&self) -> Self {
        match self {
            Self::Indexed(source) => Self::Indexed(source.clone()),
            Self::Stream(stream) => Self::Stream(stream.clone()),
        }
    }
}

impl<O> Loader<O> {
    /// Does not compile, and says why.
    #[doc(hidden)]
    pub fn epoch(&self, _: u64) -> core::iter::Empty<Result<super::Batch<O>>>
    where
        Self: Epochs,
    {
        core::iter::empty()
    }

    /// Does not compile, and says why.
    #[doc(hidden)]
    pub fn eval(&self) -> core::iter::Empty<Result<super::Batch<O>>>
    where
        Self: Epochs,
    {
        core::iter::empty()
    }

    /// Does not compile, and says why.
    #[doc(hidden)]
    pub fn steps(&self) -> Option<u64>
    where
        Self: Epochs,
    {
        None
    }

    /// Does not compile, and says why.
    #[doc(hidden)]
    pub fn iter(&self) -> core::iter::Empty<Result<super::Batch<O>>>
    where
        Self: Epochs,
    {
        core::iter::empty()
    }
}

/// A bound that no loader meets before it is prepared.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "this loader was built and not prepared, so it has no epochs",
    label = "built, and not prepared",
    note = "pass it to `accelerator.prepare(…)`, and take the batches of the prepared loader: `loader.epoch(epoch)`, or \
            `loader.eval()` to evaluate"
)]
pub trait Epochs {}

impl<O> fmt::Debug for Loader<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Loader");
        match &self.origin {
            SampleSource::Indexed(source) => debug.field("samples", &source.len()),
            SampleSource::Stream(stream) => debug.field("stream", &stream.sharing),
        };
        debug.field("spec", &self.spec).finish_non_exhaustive()
    }
}
