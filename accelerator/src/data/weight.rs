use crate::core::error::{Error, Result};
use crate::data::ConsumeTicket;

/// The weight of one call of [`Accelerator::backward`](crate::Accelerator::backward) in the
/// average, and whether it ends the accumulation window: see [`no_sync`](Self::no_sync) and
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
    /// The rule by which its window ends.
    pub(crate) closing: Closing,
    /// The batch is from a loader whose ranks may run different numbers of steps.
    pub(crate) uneven: bool,
}

/// The bounds of a weight that is not 0. The most is more tokens than a program sees, and products with any
/// gradient of use stay within the range of `f32`, sums over many ranks and micro-steps too.
const MOST: f64 = (1_u64 << 40) as f64;
const LEAST: f64 = 1.0 / MOST;

/// The rule by which an accumulation window ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Closing {
    /// Ends when it is full, and with the epoch.
    AsSet,
    /// Does not end with this call.
    KeepOpen,
    /// Ends with this call.
    Now,
}

impl Weight {
    /// Keeps the accumulation window open after this call, however many micro-steps it holds, and at the end of an
    /// epoch too. Nothing is communicated; the sums are averaged when a later call ends the window.
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

    /// Ends the accumulation window with this call, however few it holds. Every rank says so in the
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
