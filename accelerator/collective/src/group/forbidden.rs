//! Places where a rank must call no collective.

use core::fmt;
use std::sync::Arc;

use super::ProcessGroup;
use crate::error::Result;

impl ProcessGroup {
    /// Forbids collectives on all handles of this rank while the guard lives.
    ///
    /// A collective that only some ranks reach would wait for the others in vain; around code
    /// that runs on one rank alone, this turns it into a misuse error at once, with the reason.
    /// The group stays usable.
    ///
    /// ```
    /// use accelerator_collective::ProcessGroup;
    ///
    /// let group = ProcessGroup::single();
    /// let guard = group.forbid("only the main rank runs this closure");
    /// let error = group.barrier().unwrap_err();
    /// assert!(error.is_misuse());
    /// assert!(error.to_string().ends_with("only the main rank runs this closure"));
    /// drop(guard);
    /// assert!(group.barrier().is_ok());
    /// ```
    pub fn forbid(&self, reason: impl Into<String>) -> Forbidden {
        let reason: Arc<str> = reason.into().into();
        self.0.rank_state.forbid(Arc::clone(&reason));
        Forbidden {
            group: self.clone(),
            reason,
        }
    }

    /// Checks that collectives of this rank are allowed here, for a `call` that communicates only after it
    /// has done something else. Sends nothing.
    ///
    /// # Errors
    ///
    /// A misuse error if they are [forbidden](Self::forbid), with the reason. The group stays usable.
    pub fn check_allowed(&self, call: impl fmt::Display) -> Result<()> {
        self.0.rank_state.check_allowed(&call)
    }
}

/// A guard that makes collectives of this rank fail while it lives; see [`ProcessGroup::forbid`].
#[derive(Debug)]
#[must_use = "collectives are allowed again when this is dropped"]
pub struct Forbidden {
    group: ProcessGroup,
    reason: Arc<str>,
}

impl Drop for Forbidden {
    fn drop(&mut self) {
        self.group.0.rank_state.allow(&self.reason);
    }
}
