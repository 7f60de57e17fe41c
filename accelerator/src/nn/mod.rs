//! Layers that look beyond their own rank, and blocks that are recomputed.

mod sync_batch_norm;

pub use self::sync_batch_norm::SyncBatchNorm;
pub use crate::unit::{Unit, Units, recompute};
