use std::time::Duration;

use super::{OpDeadline, OpTimeouts, TimeoutKind};
use crate::fingerprint::{CallSite, CollectiveFingerprint, OpKind};

/// Returns the clock of a barrier of rank 0 that has so much time for progress.
pub(crate) fn deadline(sequence: u64, timeout: Duration) -> OpDeadline {
    let timeouts = OpTimeouts {
        timeout,
        warn_after: timeout,
        limit: TimeoutKind::Progress,
    };
    let fingerprint = CollectiveFingerprint::new(OpKind::Barrier, CallSite::new("here.rs", 1));
    OpDeadline::new(0, sequence, fingerprint, timeouts)
}
