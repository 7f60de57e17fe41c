use core::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use accelerator_host::sync::Mutex;

use super::{CommunicationHook, GradientBucket, HookError, Ranks, SavedBy};
use crate::core::error::{Error, Kind, Result};
use crate::core::panic_text::panic_text;

/// Makes the hook of each model.
#[derive(Clone)]
pub(crate) struct HookFactory {
    make: Arc<dyn Fn() -> Box<dyn CommunicationHook> + Send + Sync>,
}

/// The hook of a model.
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

    /// Lets the hook reduce a bucket. A panic of its is an error like others: the other ranks wait for
    /// what does not come.
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
                "could not go on from what it saved",
                error,
            )
        })
    }

    /// Errors of the communication stay what they are.
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
