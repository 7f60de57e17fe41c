//! What must be the same on every rank, compared once and named where it is not.

use accelerator_collective::ProcessGroup;

use crate::error::{Error, Result};

/// Compares `mine`, a text that says everything about `what`, with that of every other rank. All
/// ranks get the same error.
#[track_caller]
pub(crate) fn check(group: &ProcessGroup, what: &str, mine: &str) -> Result<()> {
    if group.world_size() == 1 {
        return Ok(());
    }
    let all = group.all_gather_object(&mine.to_owned())?;
    match all.iter().position(|other| *other != all[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::config(format!(
            "{what} differs between ranks: rank 0 has {}, and rank {rank} has {}; start every rank \
             with the same",
            all[0], all[rank]
        ))),
    }
}
