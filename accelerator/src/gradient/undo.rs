use std::sync::Arc;

use super::slot::Slot;
use crate::data::Mark;
use crate::precision::ScalerState;

/// What has moved on since a window was averaged, for where the step that it was for does not happen.
pub(crate) struct Undo {
    pub(super) marks: Vec<Mark>,
    pub(super) scaler: Option<ScalerState>,
    pub(super) slot: Arc<Slot>,
}

impl Undo {
    /// The window's samples are not used, its step is none, and the scale of losses does not move by it.
    pub(crate) fn undo(self) {
        self.marks.iter().for_each(Mark::is_unused);
        self.slot.uncount_step();
        if let Some(state) = self.scaler {
            self.slot.restore_scaler(state);
        }
    }
}
