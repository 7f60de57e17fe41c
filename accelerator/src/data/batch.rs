//! Batches, their weights, and the watch over padding that nobody asked about.

use core::fmt;
use core::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_host::sync::Mutex;
use serde::{Deserialize, Serialize};

use super::cursor::{ConsumeTicket, EpochPass};
use super::source::DeferredBatch;
use crate::core::error::{self, Error, Result};

/// This rank's batch of a step: the batcher's value, with its weight and position. It derefs to the batcher's value,
/// so its fields and methods can be used directly.
///
/// A value that is a tensor itself is `(*batch).clone()`: `batch.clone()` is another `Batch`.
///
/// It knows its place, and what it counts:
///
/// ```
/// # use burn::data::dataset::InMemDataset;
/// use accelerator::prelude::*;
///
/// let batches = launch(2, |accelerator| {
///     let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
///         .batch_size(2)
///         .build(InMemDataset::new((0..5).collect()));
///     accelerator.prepare(loader)?.epoch(0).collect::<Result<Vec<_>>>()
/// })?;
/// let last = &batches[0][1];
/// assert_eq!((last.epoch(), last.step(), last.is_last()), (0, 1, true));
/// assert_eq!((last.len(), last.indices()), (1, &[4][..]));
/// // Nothing is left for rank 1: it runs an earlier batch again, which counts for nothing.
/// let idle = &batches[1][1];
/// assert!(idle.is_idle() && idle.real() == 0);
/// let items: Vec<u32> = batches[0][0].clone().into_inner();
/// assert_eq!(items, [0, 1]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct Batch<O> {
    value: O,
    pub(super) info: BatchInfo,
    /// The place at which it ends; known when it is handed out.
    ticket: Option<ConsumeTicket>,
    /// The watch of a batch with padding, when it is handed out.
    padding: Option<Arc<PaddingWatch>>,
}

/// Notes whether the program uses a batch with padding, and asks how much of it is padding, whose rows look like any
/// others.
#[derive(Debug)]
struct PaddingWatch {
    counted: AtomicBool,
    pass: Arc<EpochPass>,
    share: StepShare,
    uncounted: UncountedPadding,
    used: AtomicBool,
}

impl Drop for PaddingWatch {
    fn drop(&mut self) {
        if self.used.load(Ordering::Relaxed) && !self.counted.load(Ordering::Relaxed) {
            *self.uncounted.0.lock() = Some((self.pass.clone(), self.share));
        }
    }
}

/// The last batch of the pass that was begun last which was used and has padding, and of which the program did not ask
/// how much. Whether anything was counted of it shows when a metric is reduced.
#[derive(Clone, Debug, Default)]
pub(crate) struct UncountedPadding(Arc<Mutex<Option<LastPadding>>>);

type LastPadding = (Arc<EpochPass>, StepShare);

impl UncountedPadding {
    /// Forgets what was counted: another pass begins.
    pub(super) fn forget(&self) {
        *self.0.lock() = None;
    }

    /// Notes that something was counted; warns once per loader that it includes padding.
    pub(crate) fn warn(&self) {
        let Some((pass, share)) = self.0.lock().take() else {
            return;
        };
        if !pass.claim_padding_warning() {
            return;
        }
        let what = match share {
            StepShare::Idle => "an idle batch (a copy of an earlier one)",
            StepShare::Used => "a batch with samples that others have, too,",
        };
        error::warn(&format!(
            "{what} was used and never asked how many samples it counts, and a metric is reduced, in which they may be \
             counted twice: count `batch.real()` samples, not the rows of its tensors, and pass `&batch` to \
             `gather_for_metrics` (reported once per loader)"
        ));
    }
}

/// Everything about a batch but its value.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct BatchInfo {
    /// The number of samples of the epoch that all ranks have used with this batch.
    pub(crate) consumed: u64,
    pub(crate) epoch: u64,
    pub(crate) indices: Vec<u64>,
    pub(crate) is_last: bool,
    /// The number of samples in the value.
    pub(crate) len: usize,
    /// The number of them, from the first, that are seen for the first time in this epoch.
    pub(crate) real: usize,
    pub(crate) share: StepShare,
    pub(crate) step: u64,
    /// Other ranks may run another number of steps.
    pub(crate) uneven: bool,
}

/// The part of a batch in its step.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum StepShare {
    /// This rank had no sample left: the value is an earlier batch, and counts for nothing.
    Idle,
    Used,
}

impl<O> Batch<O> {
    pub(crate) fn new(value: O, info: BatchInfo) -> Self {
        Self {
            value,
            info,
            ticket: None,
            padding: None,
        }
    }

    /// Notes that the batch is handed out, and the place at which it ends.
    pub(super) fn set_ticket(&mut self, ticket: ConsumeTicket, uncounted: &UncountedPadding) {
        self.padding = (self.info.real < self.info.len).then(|| {
            Arc::new(PaddingWatch {
                counted: AtomicBool::new(false),
                pass: ticket.pass.clone(),
                share: self.info.share,
                uncounted: uncounted.clone(),
                used: AtomicBool::new(false),
            })
        });
        self.ticket = Some(ticket);
    }

    fn note_counted(&self) {
        if let Some(padding) = &self.padding {
            padding.counted.store(true, Ordering::Relaxed);
        }
    }

    fn note_used(&self) {
        if let Some(padding) = &self.padding {
            padding.used.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the number of samples, duplicates included: the rows of its tensors.
    pub fn num_samples(&self) -> usize {
        self.note_used();
        self.info.len
    }

    /// Returns how many samples, from the first on, are seen for the first time in this epoch. The other samples are
    /// padding, which metrics leave out; in an idle batch, all of them are.
    ///
    /// This is what a figure counts that is added up by hand: the rows of an idle batch's tensors look like any other.
    /// Where a batch with padding was used and nobody has asked for this, or for its weight, a warning says so once per
    /// loader, when a metric is [reduced](crate::Accelerator::reduce_metric) behind that pass.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// use accelerator::metric::Sum;
    /// use accelerator::prelude::*;
    ///
    /// let even = launch(3, |accelerator| {
    ///     let valid = LoaderBuilder::from_fn(|items: Vec<u32>, _| items)
    ///         .batch_size(2)
    ///         .build(InMemDataset::new((0..13).collect()));
    ///     let mut even = Sum::new();
    ///     for batch in accelerator.prepare(valid)?.epoch(0) {
    ///         let batch = batch?;
    ///         even.count(batch[..batch.real()].iter().filter(|item| **item % 2 == 0).count());
    ///     }
    ///     Ok(accelerator.reduce_metric(even)?.value())
    /// })?;
    /// assert_eq!(even, [7.0; 3]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn real(&self) -> usize {
        self.note_counted();
        self.info.real
    }

    /// Returns the weight of this batch in [`backward`](crate::Accelerator::backward): its number of samples, or 0 if
    /// it is idle. Duplicates of [`TailPolicy::Pad`](crate::plan::TailPolicy::Pad) count, as they do in Accelerate.
    pub fn weight(&self) -> Weight {
        self.with_weight(self.info.len as f64)
    }

    /// Returns its [`weight`](Self::weight) with another count: the number by which the loss was divided. For a mean
    /// over tokens, that is the number of tokens. If samples are weighted one by one, or by class as in Burn's
    /// `CrossEntropyLoss` with weights, it is the sum of the samples' weights. An idle batch still counts nothing.
    ///
    /// ```
    /// # use burn::data::dataset::InMemDataset;
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::tensor::Tensor;
    /// # use accelerator::prelude::*;
    /// # let accelerator = Accelerator::new()?;
    /// # let device = accelerator.device();
    /// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
    /// # let dataset = InMemDataset::new(vec![3, 5, 4]);
    /// # let loader = LoaderBuilder::from_fn(|items: Vec<u32>, _| items).batch_size(3).build(dataset);
    /// # let loader = accelerator.prepare(loader)?;
    /// # let batch = loader.epoch(0).next().unwrap()?;
    /// # let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    /// // Sentences of 3, 5 and 4 words, whose loss is the mean over all words.
    /// let words: u32 = batch.iter().sum();
    /// let gradients = accelerator.backward(loss, &model, batch.with_weight(words))?;
    /// assert_eq!(gradients.samples(), Some(12.0));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn with_weight(&self, count: impl Into<f64>) -> Weight {
        Weight {
            count: if self.is_idle() { 0.0 } else { count.into() },
            ends_epoch: self.info.is_last,
            epoch: Some(self.info.epoch),
            ticket: self.ticket.clone(),
            closing: Closing::AsSet,
            uneven: self.info.uneven,
        }
    }

    /// Returns the positions of its samples in the data set or stream. Empty for a batch of one of Burn's own
    /// loaders, which do not know them, and of a stream that is read in parts.
    pub fn indices(&self) -> &[u64] {
        self.note_used();
        &self.info.indices
    }

    /// Returns the [`indices`](Self::indices) of the [`real`](Self::real) samples. Over all ranks, each sample of an
    /// epoch is among them exactly once.
    pub fn real_indices(&self) -> &[u64] {
        &self.info.indices[..self.real().min(self.info.indices.len())]
    }

    /// Returns the epoch that was asked for.
    pub fn epoch(&self) -> u64 {
        self.info.epoch
    }

    /// Returns the number of this step in the epoch, from 0, also after [`resume`](crate::Accelerator::resume) in
    /// mid-epoch. To do something every N steps, use this number or the one from
    /// [`Epoch::enumerate`](super::Epoch::enumerate).
    pub fn step(&self) -> u64 {
        self.info.step
    }

    /// Returns `true` for the last batch of the epoch on this rank, as Accelerate's `end_of_dataloader` does. Each
    /// loader tracks this for itself, even if another one is read inside its loop.
    pub fn is_last(&self) -> bool {
        self.info.is_last
    }

    /// Returns `true` if this rank had no sample left for the epoch's last step, so the value is an earlier batch
    /// again. Run it like any other batch: its gradient and metrics count for nothing.
    pub fn is_idle(&self) -> bool {
        self.note_counted();
        self.info.share == StepShare::Idle
    }

    pub(crate) fn is_uneven(&self) -> bool {
        self.info.uneven
    }

    #[cfg(feature = "burn-train")]
    pub(crate) fn consumed(&self) -> u64 {
        self.info.consumed
    }

    /// The value, and what is known of it.
    #[cfg(feature = "burn-train")]
    pub(crate) fn into_parts(self) -> (O, Batch<()>) {
        self.note_used();
        self.replace(())
    }

    /// Puts another value in the place of its own, which it returns.
    fn replace<P>(self, value: P) -> (O, Batch<P>) {
        let Self {
            value: own,
            info,
            ticket,
            padding,
        } = self;
        let batch = Batch {
            value,
            info,
            ticket,
            padding,
        };
        (own, batch)
    }

    /// Returns the batcher's value.
    pub fn into_inner(self) -> O {
        self.note_used();
        self.value
    }
}

impl<O> Batch<DeferredBatch<O>> {
    /// Makes its value; everything that this draws is drawn from the seed.
    pub(super) fn resolve(self, seed: Option<u64>) -> Result<Batch<O>> {
        let (value, batch) = self.replace(());
        Ok(batch.replace(value.resolve(seed)?).1)
    }

    /// The same, for who hands it on.
    pub(super) fn resolved(self, seed: Option<u64>) -> Result<Self> {
        let (value, batch) = self.replace(());
        let value = DeferredBatch::Ready(value.resolve(seed)?);
        Ok(batch.replace(value).1)
    }
}

impl<O> From<&Batch<O>> for Weight {
    /// The number of samples in the batch; none when it is padding.
    fn from(batch: &Batch<O>) -> Self {
        batch.weight()
    }
}

impl<O> Deref for Batch<O> {
    type Target = O;

    fn deref(&self) -> &O {
        self.note_used();
        &self.value
    }
}

impl<O> fmt::Debug for Batch<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.info, f)
    }
}

/// The weight that one call of [`Accelerator::backward`](crate::Accelerator::backward) has in the average. It can
/// also decide whether the call ends the accumulation window: see [`no_sync`](Self::no_sync) and
/// [`trigger_sync`](Self::trigger_sync).
///
/// It is usually made from a batch (`&batch`). A bare number of samples or tokens works too, but has no epoch and no
/// loader, so ranks at different steps of the data are not detected: use
/// [`Batch::with_weight`](crate::data::Batch::with_weight) when you accumulate, have a schedule by epoch, or save
/// checkpoints. Nor does a number leave out padding: `batch.num_samples()` of an idle rank's batch counts samples that do
/// not exist. Use [`Batch::real`](crate::data::Batch::real) if it must be a number.
///
/// Gradients are multiplied by it and added up, in `f32` where they are `f32`: it is 0, or from 2⁻⁴⁰ to 2⁴⁰
/// (about 10⁻¹² to 10¹²), which leaves them room on both sides.
///
/// ```
/// use accelerator::prelude::*;
/// use accelerator::Weight;
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::Tensor;
///
/// let accelerator = Accelerator::builder().accumulation_steps(2).build()?;
/// # let device = accelerator.device();
/// # let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
/// # let loss = |mean: f64| model.forward(Tensor::<2>::ones([4, 2], &device)).mean() * 0.0 + mean;
/// // A loss of 1 over 4 samples, and one of 5 over 12.
/// let open = accelerator.backward(loss(1.0), &model, Weight::from(4))?;
/// let gradients = accelerator.backward(loss(5.0), &model, 12)?;
/// assert_eq!(gradients.loss(), Some(4.0));
/// # assert!(open.is_accumulating());
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Weight {
    pub(crate) count: f64,
    pub(crate) ends_epoch: bool,
    pub(crate) epoch: Option<u64>,
    /// The place in its loader at which its batch ends.
    pub(crate) ticket: Option<ConsumeTicket>,
    pub(crate) closing: Closing,
    /// See [`BatchInfo::uneven`].
    pub(crate) uneven: bool,
}

/// The bounds of a weight that is not 0: more tokens than a program sees, while products with gradients, and their sums
/// over ranks and micro-steps, stay within the range of `f32`.
const MOST: f64 = (1_u64 << 40) as f64;
const LEAST: f64 = 1.0 / MOST;

/// The rule by which an accumulation window ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Closing {
    /// Ends when it is full, and with the epoch.
    AsSet,
    KeepOpen,
    Now,
}

impl Weight {
    /// Keeps the accumulation window open after this call, however many micro-steps it holds, even at the end of an
    /// epoch. Nothing is communicated; a later call that ends the window averages the sums.
    ///
    /// Every rank must do so in the same calls. Where windows that end together hold different numbers of
    /// calls, `backward` fails on all ranks, with [`Error::is_misuse`](crate::Error::is_misuse).
    ///
    /// ```
    /// use accelerator::prelude::*;
    /// use accelerator::Weight;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::Tensor;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let device = accelerator.device();
    /// let model: Linear = accelerator.prepare(LinearConfig::new(2, 1).init(&device))?;
    /// let loss = || model.forward(Tensor::<2>::ones([4, 2], &device)).mean();
    ///
    /// // With a batch, `batch.weight().no_sync()`.
    /// let open = accelerator.backward(loss(), &model, Weight::from(4).no_sync())?;
    /// assert!(open.is_accumulating());
    /// let gradients = accelerator.backward(loss(), &model, 4)?;
    /// assert_eq!(gradients.samples(), Some(8.0));
    /// # Ok::<(), Error>(())
    /// ```
    #[must_use]
    pub fn no_sync(self) -> Self {
        let closing = Closing::KeepOpen;
        Self { closing, ..self }
    }

    /// Ends the accumulation window with this call, however few micro-steps it holds. Every rank must do so in the
    /// same calls, as with [`no_sync`](Self::no_sync).
    #[must_use]
    pub fn trigger_sync(self) -> Self {
        let closing = Closing::Now;
        Self { closing, ..self }
    }

    /// Refuses what is no number of samples or tokens, or would be lost in sums.
    pub(crate) fn check_count(&self) -> Result<()> {
        if self.count == 0.0 || (LEAST..=MOST).contains(&self.count) {
            return Ok(());
        }
        let why = match self.count < 0.0 {
            false => format!(
                "it is 0, or from {LEAST:.0e} to {MOST:.0e}, since gradients are multiplied by it and added up, \
                 and would leave the range of f32"
            ),
            true => "it is 0 or more, 0 where this rank has none".to_owned(),
        };
        Err(Error::misuse(format!(
            "the weight of a batch is {:?}; expected a number of samples or tokens: {why}",
            self.count
        )))
    }

    /// Tells if a window with that many `calls`, this one included, ends; `full` calls fill it.
    pub(crate) fn ends_window(&self, calls: usize, full: usize) -> bool {
        match self.closing {
            Closing::AsSet => calls >= full || self.ends_epoch,
            Closing::KeepOpen => false,
            Closing::Now => true,
        }
    }
}

impl From<usize> for Weight {
    fn from(count: usize) -> Self {
        Self::from(count as f64)
    }
}

impl From<f64> for Weight {
    fn from(count: f64) -> Self {
        Self {
            count,
            ends_epoch: false,
            epoch: None,
            ticket: None,
            closing: Closing::AsSet,
            uneven: false,
        }
    }
}
