use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_collective::ProcessGroup;
use accelerator_collective::launcher::GroupExt;
use accelerator_host::sync::Mutex;

use super::error::{Error, Result};

/// A note that there are layers that communicate. Their collectives run in the order of the graph during backward, so
/// no bucket of gradients may be sent then.
#[derive(Debug, Default)]
pub(crate) struct ForwardCollectives {
    /// The error of such a layer, which cannot return one and gave useless values instead.
    failure: Mutex<Option<Error>>,
    noted: AtomicBool,
}

impl ForwardCollectives {
    pub(crate) fn note(&self) {
        self.noted.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_noted(&self) -> bool {
        self.noted.load(Ordering::Relaxed)
    }

    /// Keeps why the ranks could not compute a layer together.
    pub(crate) fn failed(&self, error: Error) {
        self.failure.lock().get_or_insert(error);
    }

    /// Fails where a layer did, before what came of it is used: once for one that was called where it must
    /// not be, which leaves the group as it was, and always for a group that has failed.
    pub(crate) fn check(&self) -> Result<()> {
        if !self.is_noted() {
            return Ok(());
        }
        let mut failure = self.failure.lock();
        let lasts = failure.as_ref().is_some_and(|error| !error.is_misuse());
        let error = match lasts {
            true => failure.clone(),
            false => failure.take(),
        };
        error.map_or(Ok(()), Err)
    }

    /// The same in a call that the other ranks make, too: they do not know of a misuse on this one, and would wait for
    /// it, so the group ends with it.
    pub(crate) fn check_in(&self, group: &ProcessGroup) -> Result<()> {
        self.check().inspect_err(|error| {
            if group.check_allowed("this call").is_ok() {
                group.abort(error.to_string());
            }
        })
    }
}
