use std::sync::Arc;

use super::slot::Slot;
use crate::data::Mark;
use crate::precision::Finiteness;

/// What moves on when an optimizer has stepped with a window's gradients: until then, a checkpoint holds neither
/// the step nor its samples. Where no step comes of them, it is dropped.
pub(crate) struct StepCommit {
    pub(super) marks: Vec<Mark>,
    /// What the scale of losses learns of this window, where losses are scaled.
    pub(super) scaled: Option<Finiteness>,
    pub(super) slot: Arc<Slot>,
}

impl StepCommit {
    /// The window's samples are used, its step counts, and the scale of losses moves by it.
    pub(crate) fn commit(self) {
        self.slot.count_step();
        self.marks.iter().for_each(Mark::commit);
        if let Some(finiteness) = self.scaled {
            self.slot.update_loss_scale(finiteness);
        }
    }
}
