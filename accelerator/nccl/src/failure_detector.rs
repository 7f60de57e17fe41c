//! The failures that a communicator and the group that it belongs to tell each other.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use accelerator_collective::ProcessGroup;

/// The failure detection of the group that a communicator belongs to.
///
/// Both methods are called by a thread of the communicator's, and by those that use it, at any time until
/// it is dropped; they return at once.
pub(crate) trait FailureDetector: Send + Sync {
    /// Returns the reason that the group has ended, if it has. What is waiting for peers is freed then.
    fn failure(&self) -> Option<String>;

    /// Takes the news, at most once, that the communicator has ended on this rank for a reason that the
    /// group may not know.
    fn failed(&self, text: &str);
}

impl fmt::Debug for dyn FailureDetector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("FailureDetector")
    }
}

/// The failure detection of a process group.
pub(crate) struct GroupFailureDetector {
    group: ProcessGroup,
    /// Set once all ranks are connected. Until then, a failure of NCCL's is no failure of the group.
    enabled: AtomicBool,
}

impl GroupFailureDetector {
    pub(crate) fn new(group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            enabled: AtomicBool::new(false),
        }
    }

    /// Lets failures of NCCL's end the group from now on.
    pub(crate) fn enable(&self) {
        self.enabled.store(true, Ordering::Release);
    }
}

impl FailureDetector for GroupFailureDetector {
    fn failure(&self) -> Option<String> {
        self.group.failure()
    }

    fn failed(&self, text: &str) {
        if self.enabled.load(Ordering::Acquire) {
            self.group.abort(text);
        }
    }
}
