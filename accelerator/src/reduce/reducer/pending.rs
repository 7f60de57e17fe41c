use accelerator_collective::{Buffer, Pending, ProcessGroup, TransportKind};

use crate::core::error::{Error, Result};
use crate::timeline::{EventSubject, Phase, Timeline};

/// The collective operations of one window. A rank that has started them must issue all of them: the other ranks wait for
/// the rest, or would take this rank's next operations for it. If the rest does not follow, the group fails on all
/// ranks.
#[derive(Debug)]
pub(super) struct PendingCollective {
    group: ProcessGroup,
    state: PendingState,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum PendingState {
    /// No operation was accepted: one that the group refuses at once does not count.
    NotStarted,
    Started,
    /// All operations were issued, or the group has failed.
    Ended,
}

impl PendingCollective {
    pub(super) fn new(group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            state: PendingState::NotStarted,
        }
    }

    /// Notes that the group has accepted an operation.
    pub(super) fn mark_started(&mut self) {
        self.state = PendingState::Started;
    }

    /// Notes that all operations were issued.
    pub(super) fn mark_complete(&mut self) {
        self.state = PendingState::Ended;
    }

    /// Fails the group where operations were started: the rest does not follow because of this error. Does nothing to a
    /// group that failed before.
    pub(super) fn abort(&mut self, error: &Error) {
        self.end(&format!(
            "it stopped in the middle of reducing gradients: {error}"
        ));
    }

    fn end(&mut self, reason: &str) {
        if self.state == PendingState::Started {
            self.group.abort(reason);
        }
        self.state = PendingState::Ended;
    }
}

impl Drop for PendingCollective {
    fn drop(&mut self) {
        // The group reports a panic itself, when its last handle is dropped.
        if !std::thread::panicking() {
            self.end("it dropped gradients of which a part was sent");
        }
    }
}

/// Waits for what was started, and notes how long.
pub(super) fn waited(
    timeline: &Timeline,
    part: EventSubject,
    bytes: usize,
    pending: Pending,
) -> Result<Buffer> {
    let _reduce = timeline.span(Phase::Reduce { part, bytes });
    Ok(pending.wait()?)
}

/// Returns `true` if started operations gain from others in flight: connections carry several, whereas
/// memory is as fast as the thread that works on it.
pub(super) fn is_networked(group: &ProcessGroup) -> bool {
    matches!(
        group.transport(),
        TransportKind::Tcp | TransportKind::Hierarchical
    )
}
