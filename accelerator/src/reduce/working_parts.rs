//! What a forward pass in half precision uses in the place of parameters.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::DispatchTensor;

use crate::precision::Cast;

/// What was made of the parameters for the forward that comes next.
#[derive(Debug, Default)]
pub(crate) enum WorkingCopy {
    /// The parameters themselves are used.
    #[default]
    None,
    /// By parameter: what the forward uses in its place, where that is something else.
    One(Vec<Option<WorkingPart>>),
    /// Several, whose gradients are added up at the end.
    Several,
}

/// What the forward uses in the place of a parameter.
#[derive(Debug)]
pub(crate) struct WorkingPart {
    pub(crate) tensor: DispatchTensor,
    /// What makes gradients of the parameter of its gradients, if that can be asked.
    pub(crate) cast: Option<Arc<Cast>>,
}

/// Which half of a forward pass in half precision the program has ever asked for.
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

    /// Whether inputs are in half precision, and no model is: most models panic then, without a word of what is missing.
    pub(crate) fn lacks_copy(&self) -> bool {
        self.cast.load(Ordering::Relaxed) && !self.copied.load(Ordering::Relaxed)
    }
}
