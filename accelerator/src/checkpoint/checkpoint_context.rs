use std::ops::Deref;
use std::sync::Arc;

use accelerator_host::sync::Mutex;

use super::background::Ongoing;
use super::source::LiveState;
use crate::core::error::Result;
use crate::reduce::ReduceContext;
use crate::tracking::Tracking;

/// A rank that saves checkpoints: its [`ReduceContext`], with what it keeps between saves.
#[derive(Debug)]
pub(crate) struct CheckpointContext {
    /// The state that rank 0 has taken along from the group before, until the program resumes.
    live: Mutex<Option<Arc<LiveState>>>,
    pub(super) ongoing: Ongoing,
    pub(super) reduction: Arc<ReduceContext>,
    pub(super) tracking: Arc<Tracking>,
}

impl CheckpointContext {
    pub(crate) fn new(reduction: Arc<ReduceContext>, tracking: Arc<Tracking>) -> Self {
        Self {
            live: Mutex::default(),
            ongoing: Ongoing::default(),
            reduction,
            tracking,
        }
    }

    /// Goes on from that state, in place of a checkpoint.
    pub(crate) fn go_on_from(&self, live: Option<Arc<LiveState>>) {
        *self.live.lock() = live;
    }

    pub(super) fn live(&self) -> Option<Arc<LiveState>> {
        self.live.lock().clone()
    }

    /// Waits, on this rank alone, for a save that it has begun.
    pub(crate) fn complete(&self) {
        self.ongoing.complete();
    }

    /// Waits for a save that was begun, and tells every rank how it went.
    #[track_caller]
    pub(crate) fn settle(&self) -> Result<()> {
        self.ongoing.settle(self)
    }
}

impl Deref for CheckpointContext {
    type Target = ReduceContext;

    fn deref(&self) -> &ReduceContext {
        &self.reduction
    }
}
