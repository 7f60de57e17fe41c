//! The state beside the model that an optimizer's step advances.

use std::sync::Arc;

use super::model_state::ModelState;
use super::updates::Clips;
use crate::data::ConsumeTicket;
use crate::precision::Finiteness;

/// The state that advances once an optimizer has stepped with a window's gradients: until then, a checkpoint holds
/// neither the step nor its samples. If the gradients are dropped without a step, nothing advances.
pub(crate) struct StepCommit {
    /// The clips of the gradients.
    pub(super) clips: Clips,
    pub(super) tickets: Vec<ConsumeTicket>,
    /// The finiteness of this window for the scale of losses, if losses are scaled.
    pub(super) finiteness: Option<Finiteness>,
    pub(super) _pending: Arc<()>,
    pub(super) model_state: Arc<ModelState>,
}

impl StepCommit {
    /// The window's samples are used, its step counts, and the scale of losses moves by it.
    pub(crate) fn commit(self) {
        self.model_state.count_step();
        let model = self.model_state.first_id();
        self.tickets.iter().for_each(|ticket| ticket.commit(model));
        if let Some(finiteness) = self.finiteness {
            self.model_state.update_loss_scale(finiteness);
        }
    }

    /// The replica of this rank is updated so, as those of all ranks must be; without a rate where the program steps by
    /// itself.
    pub(crate) fn note_update(&self, rate: Option<f64>) {
        self.model_state.updates().note(rate, self.clips);
    }
}
