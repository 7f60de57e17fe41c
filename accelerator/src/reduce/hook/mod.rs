//! Hooks that reduce gradients in the program's own way instead of by an all-reduce: see [`CommunicationHook`], and
//! [`PowerSgd`] for a ready one.
//!
//! ```
//! use accelerator::hook::PowerSgd;
//! use accelerator::prelude::*;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::SgdConfig;
//! use burn::tensor::Tensor;
//!
//! Accelerator::builder()
//!     .communication_hook(|| PowerSgd::new(2).start_after(1))
//!     .launch(2, |accelerator| {
//!         let model: Linear = accelerator.init(|device| LinearConfig::new(64, 64).init(device));
//!         let (mut model, mut optimizer) = accelerator.prepare((model, SgdConfig::new().init()))?;
//!         for _ in 0..3 {
//!             let input = Tensor::<2>::ones([4, 64], &accelerator.device());
//!             let gradients = accelerator.backward(model.forward(input).mean(), &model, 4)?;
//!             model = optimizer.step(0.1, model, gradients);
//!         }
//!         accelerator.check_replicas(&model)
//!     })?;
//! # Ok::<(), accelerator::Error>(())
//! ```

mod gradient_bucket;
mod power_sgd;

use core::fmt;
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use accelerator_host::sync::Mutex;

use crate::core::error::{Error, Kind, Result, panic_text};

pub use self::gradient_bucket::{BucketParameter, BucketValues, GradientBucket, Ranks};
pub use self::power_sgd::PowerSgd;

/// The error of a hook.
pub type HookError = Box<dyn StdError + Send + Sync>;

/// Reduces the gradients of a model over the ranks, bucket by bucket, instead of an all-reduce.
///
/// It is given to [`communication_hook`](crate::AcceleratorBuilder::communication_hook), and
/// built once for each prepared model of each rank, so that what it keeps belongs to one model. [`GradientBucket`] and
/// [`Ranks`] have examples.
///
/// # What it gets, and what it leaves
///
/// A bucket holds *this rank's share of the mean gradient*: `weight / total · gradient`, where `total` is
/// the weight of all ranks in this step. The sum of the shares is the mean gradient over every sample of
/// every rank; that sum, or what the hook takes for it, is what `reduce` leaves in the bucket. Gradients
/// are accumulated and unscaled by then, and not clipped yet.
///
/// - **Every rank must leave the same bits.** Ranks step on their own from what they get: where it
///   differs, they train different models from then on. What comes out of an all-reduce or an all-gather
///   has the same bits on all ranks, and so has what is computed from it alone, in one order.
///   [`check_replicas_every`](crate::AcceleratorBuilder::check_replicas_every) finds a hook that breaks
///   this.
/// - **Every rank makes the same calls** of [`Ranks`], in one order. It may depend on the bucket's number,
///   step and parameters, which are the same on all ranks; not on this rank's values.
/// - Values are finite. A step in which some rank's gradients are not is reduced as it is, on all ranks
///   alike, and passes the hook by: what a hook keeps from step to step stays finite.
/// - Buckets come in their order, when backward has ended: nothing is sent while it runs, whatever
///   [`Overlap`](crate::Overlap) says ([`OverlapReport`](crate::OverlapReport) tells `Off`).
/// - One rank alone has nothing to reduce, and calls no hook.
/// - It may ask the accelerator what it knows, and call its collectives on every rank:
///   [`overlap_report`](crate::Accelerator::overlap_report) tells of the step before. What belongs between steps is
///   [refused](crate::Error::is_misuse) without waiting: a checkpoint of the model, and `backward`, which ends the
///   group.
///
/// # Errors
///
/// An error or a panic ends the step on every rank: here as [`Error::is_hook`](crate::Error::is_hook) or
/// [`Error::is_panic`](crate::Error::is_panic), on the others as a lost peer, whose cause is this error. An
/// error of [`Ranks`] is handed on as it is.
pub trait CommunicationHook: Send {
    /// Returns the name of the hook, with every setting on which the result depends. It is compared between the ranks
    /// when the accelerator is built, and between a checkpoint and the program that continues from it.
    fn name(&self) -> String;

    /// Puts the sum over the ranks in the place of this rank's share.
    ///
    /// # Errors
    ///
    /// Whatever it likes; it ends the step on all ranks.
    fn reduce(
        &mut self,
        bucket: &mut GradientBucket<'_>,
        ranks: &Ranks<'_>,
    ) -> Result<(), HookError>;

    /// Returns the state that this rank keeps from step to step, for a checkpoint. Called between steps. Empty by
    /// default: there is nothing to keep.
    ///
    /// # Errors
    ///
    /// Whatever it likes; the save fails on all ranks.
    fn save(&self) -> Result<Vec<u8>, HookError> {
        Ok(Vec::new())
    }

    /// Continues from what [`save`](Self::save) gave. It is called on every rank or on none, before the first
    /// step, and only where the checkpoint was saved with a hook of the same [`name`](Self::name), which kept
    /// something on some rank. `state` is empty where this rank kept nothing and another one did.
    ///
    /// State that belongs to one rank alone is left out if another rank saved it:
    ///
    /// ```
    /// use accelerator::hook::SavedBy;
    /// # use accelerator::hook::{CommunicationHook, GradientBucket, HookError, Ranks};
    /// # #[derive(Default)]
    /// # struct Rests { steps: u64, rest: u64 }
    ///
    /// # impl CommunicationHook for Rests {
    /// #     fn name(&self) -> String { "rests".to_owned() }
    /// #     fn reduce(
    /// #         &mut self,
    /// #         bucket: &mut GradientBucket<'_>,
    /// #         ranks: &Ranks<'_>,
    /// #     ) -> Result<(), HookError> {
    /// #         Ok(bucket.all_reduce(ranks)?)
    /// #     }
    /// fn save(&self) -> Result<Vec<u8>, HookError> {
    ///     Ok([self.steps.to_le_bytes(), self.rest.to_le_bytes()].concat())
    /// }
    ///
    /// fn restore(&mut self, state: &[u8], saved_by: SavedBy) -> Result<(), HookError> {
    ///     let (steps, rest) = state.split_at(8);
    ///     self.steps = u64::from_le_bytes(steps.try_into()?);
    ///     if saved_by == SavedBy::ThisRank {
    ///         self.rest = u64::from_le_bytes(rest.try_into()?);
    ///     }
    ///     Ok(())
    /// }
    /// # }
    /// # let mut hook = Rests::default();
    /// # hook.restore(&Rests { steps: 3, rest: 5 }.save().unwrap(), SavedBy::OneForAll).unwrap();
    /// # assert_eq!((hook.steps, hook.rest), (3, 0));
    /// # hook.restore(&Rests { steps: 3, rest: 5 }.save().unwrap(), SavedBy::ThisRank).unwrap();
    /// # assert_eq!((hook.steps, hook.rest), (3, 5));
    /// ```
    ///
    /// # Errors
    ///
    /// Whatever it likes; the resume fails on all ranks.
    fn restore(&mut self, state: &[u8], saved_by: SavedBy) -> Result<(), HookError> {
        let _ = (state, saved_by);
        Ok(())
    }
}

/// The rank whose saved state a hook continues from.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum SavedBy {
    /// One of the ranks, the same one for all: the job had another number of ranks, or not all of
    /// them were left to save. The hook must leave out what a rank has for itself alone.
    OneForAll,
    /// This rank's own.
    ThisRank,
}

#[derive(Clone)]
pub(crate) struct HookFactory {
    make: Arc<dyn Fn() -> Box<dyn CommunicationHook> + Send + Sync>,
}

pub(crate) struct HookInstance {
    hook: Mutex<Box<dyn CommunicationHook>>,
    name: String,
}

impl HookFactory {
    pub(crate) fn new<H: CommunicationHook + 'static>(
        make: impl Fn() -> H + Send + Sync + 'static,
    ) -> Self {
        Self {
            make: Arc::new(move || Box::new(make())),
        }
    }

    pub(crate) fn make(&self) -> HookInstance {
        let hook = (self.make)();
        HookInstance {
            name: hook.name(),
            hook: Mutex::new(hook),
        }
    }
}

impl HookInstance {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Reduces a bucket by the hook. A panic becomes an error like others: the other ranks wait for this one.
    pub(in crate::reduce) fn reduce(
        &self,
        bucket: &mut GradientBucket<'_>,
        ranks: &Ranks<'_>,
    ) -> Result<()> {
        let number = bucket.number();
        let mut hook = self.hook.lock();
        match catch_unwind(AssertUnwindSafe(|| hook.reduce(bucket, ranks))) {
            Ok(outcome) => outcome.map_err(|error| {
                self.failed(
                    Kind::Hook,
                    &format!("could not reduce bucket {number}"),
                    error,
                )
            }),
            Err(panic) => Err(Error::new(
                Kind::Panic,
                format!(
                    "the communication hook `{}` panicked in bucket {number}: {}",
                    self.name,
                    panic_text(&*panic)
                ),
            )),
        }
    }

    /// Returns the state that this rank keeps from step to step; empty if there is none. If the hook itself calls this,
    /// by saving a checkpoint, it is in the midst of a step and would wait for itself, which is an error.
    pub(crate) fn save(&self) -> Result<Vec<u8>> {
        let Some(hook) = self.hook.try_lock() else {
            return Err(Error::misuse(format!(
                "a checkpoint is saved between optimizer steps, and the communication hook `{}` reduces \
                 gradients of this model: save when `optimizer.step` has returned",
                self.name
            )));
        };
        let saved = hook.save();
        saved.map_err(|error| self.failed(Kind::Checkpoint, "could not save what it keeps", error))
    }

    pub(crate) fn restore(&self, state: &[u8], saved_by: SavedBy) -> Result<()> {
        let restored = self.hook.lock().restore(state, saved_by);
        restored.map_err(|error| {
            self.failed(
                Kind::Checkpoint,
                "could not continue from what it saved",
                error,
            )
        })
    }

    /// Returns the error of the hook; errors of the communication stay what they are.
    fn failed(&self, kind: Kind, what: &str, error: HookError) -> Error {
        let error = match error.downcast::<accelerator_collective::Error>() {
            Ok(error) => return Error::from(*error),
            Err(error) => error,
        };
        if let Some(ours) = error.downcast_ref::<Error>()
            && ours.is_collective()
        {
            return ours.clone();
        }
        let message = format!("the communication hook `{}` {what}: {error}", self.name);
        Error::new(kind, message).with_source(error)
    }
}

impl fmt::Debug for HookFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookFactory").finish_non_exhaustive()
    }
}

impl fmt::Debug for HookInstance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookInstance")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
