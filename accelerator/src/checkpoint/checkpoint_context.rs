use std::ops::Deref;
use std::sync::Arc;

use super::background::Ongoing;
use crate::core::error::Result;
use crate::reduce::ReduceContext;

/// A rank that saves checkpoints: its [`ReduceContext`], with what it keeps between saves.
#[derive(Debug)]
pub(crate) struct CheckpointContext {
    pub(super) ongoing: Ongoing,
    pub(super) reduction: Arc<ReduceContext>,
}

impl CheckpointContext {
    pub(crate) fn new(reduction: Arc<ReduceContext>) -> Self {
        Self {
            ongoing: Ongoing::default(),
            reduction,
        }
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
