use std::time::Duration;

use super::{GroupId, OpDeadline, OpNumber, OpTimeouts, TimeoutKind};
use crate::fingerprint::{CallSite, CollectiveFingerprint, OpKind};

/// Returns the clock of a barrier of rank 0 that has so much time for progress.
pub(crate) fn deadline(sequence: u64, timeout: Duration) -> OpDeadline {
    let timeouts = OpTimeouts {
        timeout,
        warn_after: timeout,
        limit: TimeoutKind::Progress,
    };
    let fingerprint = CollectiveFingerprint::new(OpKind::Barrier, CallSite::new("here.rs", 1));
    OpDeadline::new(
        0,
        number(sequence),
        fingerprint,
        timeouts,
        std::time::Instant::now(),
    )
}

/// Returns the number of an operation of the world.
pub(crate) fn number(sequence: u64) -> OpNumber {
    OpNumber {
        group: GroupId::WORLD,
        sequence,
        subset: None,
    }
}
