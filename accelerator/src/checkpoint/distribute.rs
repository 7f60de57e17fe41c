use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::context::Context;
use crate::core::error::Result;

/// The number of bytes per broadcast.
const CHUNK: usize = 64 << 20;

/// Runs `work` on rank 0 and returns its result on every rank; if it fails, every rank gets the error. Work that
/// takes long shows that it is alive.
#[track_caller]
pub(super) fn from_main<T: Serialize + DeserializeOwned>(
    context: &Context,
    action: &str,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if context.world_size() == 1 {
        return work();
    }
    let mine = context.on_main(action, work)?;
    let reading = context.group().for_purpose(action);
    Ok(reading.broadcast_object(mine.as_ref(), 0)?)
}

/// The bytes that `read` gives on rank 0, on every rank.
#[track_caller]
pub(super) fn bytes_from_main(
    context: &Context,
    action: &str,
    read: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let length = from_main(context, action, || {
        bytes = read()?;
        Ok(bytes.len() as u64)
    })?;
    bytes.resize(length as usize, 0);
    if context.world_size() > 1 {
        for chunk in bytes.chunks_mut(CHUNK) {
            context.group().broadcast(chunk, 0)?;
        }
    }
    Ok(bytes)
}
