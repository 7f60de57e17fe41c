use accelerator_collective::ProcessGroup;

use crate::core::error::Error;

/// Who has sent a part of a window owes the other ranks the rest: they wait for it, or would take
/// what this rank sends next for it. Where it does not come, the group fails, on all ranks at once.
#[derive(Debug)]
pub(super) struct PendingCollective {
    group: ProcessGroup,
    state: PendingState,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum PendingState {
    /// Nothing was sent: an operation that the group refuses at once owes nothing.
    Free,
    Given,
    /// Everything was sent, or the group has failed.
    Over,
}

impl PendingCollective {
    pub(super) fn new(group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            state: PendingState::Free,
        }
    }

    /// The group has accepted something.
    pub(super) fn give(&mut self) {
        self.state = PendingState::Given;
    }

    /// Everything was sent.
    pub(super) fn keep(&mut self) {
        self.state = PendingState::Over;
    }

    /// The rest is not sent, since this happened. Does nothing to a group that failed before.
    pub(super) fn break_for(&mut self, error: &Error) {
        self.give_up(&format!(
            "it stopped in the middle of reducing gradients: {error}"
        ));
    }

    fn give_up(&mut self, reason: &str) {
        if self.state == PendingState::Given {
            self.group.abort(reason);
        }
        self.state = PendingState::Over;
    }
}

impl Drop for PendingCollective {
    fn drop(&mut self) {
        // The group tells of a panic itself, when its last handle goes.
        if !std::thread::panicking() {
            self.give_up("it dropped gradients of which a part was sent");
        }
    }
}
