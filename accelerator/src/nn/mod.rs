//! Layers that look beyond their own rank.

mod exchange;
mod sync_batch_norm;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use self::sync_batch_norm::{SyncBatchNorm, SyncBatchNormConfig};
use crate::error::{Error, Result};

/// Whether there are layers whose backward waits for other ranks. Their operations come in the order of
/// the graph; gradients that were sent in between would come in an order of their own.
#[derive(Debug, Default)]
pub(crate) struct Crossing {
    /// What such a layer was refused first, which can return no error.
    refused: Mutex<Option<Error>>,
    there: AtomicBool,
}

impl Crossing {
    fn note(&self) {
        self.there.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_noted(&self) -> bool {
        self.there.load(Ordering::Relaxed)
    }

    /// Keeps what a layer was told, where it was called where it must not be. A group that has failed
    /// tells everybody by itself.
    fn failed(&self, error: Error) {
        if error.is_misuse() {
            self.refused().get_or_insert(error);
        }
    }

    /// Returns what was kept, once.
    pub(crate) fn check(&self) -> Result<()> {
        self.refused().take().map_or(Ok(()), Err)
    }

    fn refused(&self) -> MutexGuard<'_, Option<Error>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
