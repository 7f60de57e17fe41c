//! Layers that look beyond their own rank.

mod exchange;
mod sync_batch_norm;

use std::sync::atomic::{AtomicBool, Ordering};

pub use self::sync_batch_norm::{SyncBatchNorm, SyncBatchNormConfig};

/// Whether there are layers whose backward waits for other ranks. Their operations come in the order of
/// the graph; gradients that were sent in between would come in an order of their own.
#[derive(Debug, Default)]
pub(crate) struct Crossing(AtomicBool);

impl Crossing {
    fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_noted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
