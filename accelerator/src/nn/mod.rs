//! Layers that compute across ranks, and blocks that are recomputed in backward.

mod sync_batch_norm;

pub use self::sync_batch_norm::SyncBatchNorm;
pub use crate::core::device::Operations;
pub use crate::unit::{Unit, Units, recompute};
