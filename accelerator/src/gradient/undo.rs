use std::sync::Arc;

use super::slot::Slot;
use crate::data::Mark;

/// What has moved on since a window was averaged, for where the step that it was for does not happen.
pub(crate) struct Undo {
    pub(super) marks: Vec<Mark>,
    pub(super) slot: Arc<Slot>,
}

impl Undo {
    /// The window's samples are not used, and its step is none.
    pub(crate) fn undo(self) {
        self.marks.iter().for_each(Mark::is_unused);
        self.slot.uncount_step();
    }
}
