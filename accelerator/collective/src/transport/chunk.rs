//! Chunks on their way from rank to rank.

use crate::{
    fingerprint::CollectiveFingerprint,
    wire::frame::{FrameKind, Head},
};

/// One outgoing chunk: at most [`CHUNK`](crate::wire::frame::CHUNK) bytes, and the part that they belong to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutgoingChunk<'a> {
    pub(crate) tag: Tag,
    /// The sender's fingerprint, on the first chunk of an operation.
    pub(crate) fingerprint: Option<&'a CollectiveFingerprint>,
    pub(crate) payload: &'a [u8],
}

impl OutgoingChunk<'_> {
    /// The header of its frame, behind which its fingerprint is sent as the preamble.
    pub(crate) fn head(&self, preamble: &[u8]) -> Head {
        let Tag {
            sequence,
            phase,
            index,
        } = self.tag;
        let kind = match phase {
            OpPhase::Header => FrameKind::Header,
            OpPhase::Reduce => FrameKind::Reduce,
            OpPhase::Gather => FrameKind::Gather,
        };
        Head::new(kind, sequence, index, preamble, self.payload)
    }
}

/// The position of a part: its operation, phase and chunk.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Tag {
    /// The number of the operation.
    pub(crate) sequence: u64,
    pub(crate) phase: OpPhase,
    /// The number of the chunk within its phase.
    pub(crate) index: u32,
}

/// The phases of an operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OpPhase {
    /// The fingerprint, with the first chunk.
    Header,
    /// A chunk for the rank that reduces it.
    Reduce,
    /// A chunk for a rank that keeps it.
    Gather,
}
