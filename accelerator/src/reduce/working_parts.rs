//! The tensors that a forward pass in half precision uses in place of parameters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::DispatchTensor;

use crate::precision::Cast;

/// The copy of the parameters for the next forward.
#[derive(Debug, Default)]
pub(crate) enum WorkingCopy {
    /// The parameters themselves are used.
    #[default]
    None,
    /// The part that the forward uses in place of each parameter, if that is another tensor.
    One(Vec<Option<WorkingPart>>),
    /// Several, whose gradients are added up at the end.
    Several,
}

/// The tensor that the forward uses in place of a parameter.
#[derive(Debug)]
pub(crate) struct WorkingPart {
    pub(crate) tensor: DispatchTensor,
    /// The cast that makes the parameter's gradient of that of this tensor, if it can be asked.
    pub(crate) cast: Option<Arc<Cast>>,
}

/// The halves of a forward pass in half precision that the program has ever asked for.
#[derive(Debug, Default)]
pub(crate) struct WorkingUse {
    /// An input was cast.
    cast: AtomicBool,
    /// A working copy of a model was made.
    copied: AtomicBool,
}

impl WorkingUse {
    pub(super) fn note_copied(&self) {
        self.copied.store(true, Ordering::Relaxed);
    }

    pub(crate) fn note_cast(&self) {
        self.cast.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if inputs are in half precision, and no model is: most models panic then, with no clear message.
    pub(crate) fn lacks_copy(&self) -> bool {
        self.cast.load(Ordering::Relaxed) && !self.copied.load(Ordering::Relaxed)
    }
}
