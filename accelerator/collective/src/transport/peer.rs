//! The other ranks: their identities, the parts that came from each, what is known of it, and the signs of work that a
//! rank shows.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use accelerator_host::sync::Mutex;

use crate::error::{Certainty, Culprit};
use crate::fingerprint::CollectiveFingerprint;
use crate::kernel::ReduceInput;
use crate::transport::chunk::PooledBuffer;
use crate::transport::{CHUNK, Tag};
use crate::wire::GroupId;

/// The identity of a rank, for messages.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) location: PeerLocation,
}

/// The place where a rank runs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum PeerLocation {
    Process { host: String, pid: u32 },
    Thread,
}

impl Peer {
    /// The name of its host.
    pub(crate) fn host(&self) -> &str {
        match &self.location {
            PeerLocation::Process { host, .. } => host,
            PeerLocation::Thread => "",
        }
    }

    pub(crate) fn culprit(&self, cause: impl Into<String>, certainty: Certainty) -> Culprit {
        let (host, pid) = match &self.location {
            PeerLocation::Process { host, pid } => (host.clone(), Some(*pid)),
            PeerLocation::Thread => ("this process".to_owned(), None),
        };
        Culprit {
            rank: self.rank,
            host,
            pid,
            cause: cause.into(),
            certainty,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            PeerLocation::Process { host, pid } => {
                write!(f, "rank {} (process {pid} on {host})", self.rank)
            }
            PeerLocation::Thread => write!(f, "rank {} (a thread of this process)", self.rank),
        }
    }
}

/// The latest collective in which a rank was seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastOp {
    pub(crate) group: GroupId,
    pub(crate) sequence: u64,
    pub(crate) fingerprint: CollectiveFingerprint,
    /// The time at which a sign of it arrived, if that is known.
    pub(crate) at: Option<Instant>,
}

/// The way in which a rank leaves that has not failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum LeaveKind {
    Closed,
    /// The last handle of the rank was dropped, and nobody said why.
    Dropped,
}

/// The position of an operation among those of its rank that are under way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum OpPosition {
    /// All before it are done.
    First,
    Later,
}

/// A part that has arrived.
#[derive(Debug)]
pub(crate) struct RecvChunk {
    pub(crate) tag: Tag,
    pub(crate) fingerprint: Option<CollectiveFingerprint>,
    pub(crate) payload: PooledBuffer,
}

impl RecvChunk {
    /// The room that it takes in its queue: its content, and the overhead of keeping it. A peer that
    /// sends parts without content fills its queue too.
    pub(super) fn weight(&self) -> usize {
        const CHUNK_OVERHEAD: usize = 512;
        self.payload.bytes().len() + CHUNK_OVERHEAD
    }
}

/// The parts that have arrived from each rank, as inputs of a reduction; `None` for the rank itself.
impl ReduceInput for Option<RecvChunk> {
    fn bytes(&self) -> Option<&[u8]> {
        self.as_ref().map(|chunk| chunk.payload.bytes())
    }
}

#[derive(Debug, Default)]
pub(super) struct PeerQueue {
    pub(super) chunks: VecDeque<RecvChunk>,
    pub(super) bytes: usize,
    pub(super) state: PeerState,
    /// The rank that this one last said it waits for, and the time of that.
    pub(super) awaited: Option<(usize, Instant)>,
    /// The latest operation that the peer has begun, as far as the parts that arrived show.
    pub(super) last: Option<LastOp>,
    /// The time at which this rank last showed that it works outside of operations.
    pub(super) active: Option<Instant>,
    /// Set once another rank blames this one.
    pub(super) blamed: bool,
    /// The groups, apart from the world, that the peer has left.
    pub(super) left: Vec<(GroupId, LeaveKind, Instant)>,
    /// The number of operations that wait for a chunk of the peer which is not there, if there are several groups.
    pub(super) wanted: usize,
}

impl PeerQueue {
    pub(super) fn is_gone(&self) -> bool {
        let by_itself = match self.state {
            PeerState::Broken | PeerState::Dropped | PeerState::Left | PeerState::Lost => true,
            PeerState::Aborted | PeerState::Present => false,
        };
        by_itself || self.blamed
    }

    /// The next part of an operation. A part that has no place there is given too, for an error
    /// to be made of it: that of an operation which is over, and that of one which the peer
    /// begins only when it is done with this one.
    pub(super) fn pop(
        &mut self,
        place: OpPosition,
        group: GroupId,
        sequence: u64,
    ) -> Option<RecvChunk> {
        let belongs = |chunk: &RecvChunk| {
            let found = chunk.tag.sequence;
            chunk.tag.group == group
                && match place {
                    OpPosition::First => {
                        found <= sequence || found >= sequence + MAX_IN_FLIGHT as u64
                    }
                    OpPosition::Later => found == sequence,
                }
        };
        let index = self.chunks.iter().position(belongs)?;
        let chunk = self.chunks.remove(index)?;
        self.bytes -= chunk.weight();
        Some(chunk)
    }

    pub(super) fn holds(&self, group: GroupId, sequence: u64) -> bool {
        let tags = self.chunks.iter().map(|chunk| chunk.tag);
        tags.into_iter()
            .any(|tag| tag.group == group && tag.sequence == sequence)
    }

    /// Drops what is there of a group.
    pub(super) fn close_group(&mut self, group: GroupId) {
        self.left.retain(|(left, ..)| *left != group);
        self.chunks.retain(|chunk| chunk.tag.group != group);
        self.bytes = self.chunks.iter().map(RecvChunk::weight).sum();
    }
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum PeerState {
    /// The peer sent what the protocol does not allow, and still runs.
    Broken,
    Dropped,
    /// The group of the peer failed, and not by its own fault: it may still run.
    Aborted,
    Left,
    Lost,
    #[default]
    Present,
}

/// The most operations of one rank that are under way.
pub(crate) const MAX_IN_FLIGHT: usize = 4;

/// The bytes at which the queue of one sender is full. A peer sends at most 16 chunks of a reduction
/// ahead of this rank, for each operation under way, so only a broadcast to a slow rank ever gets
/// there: a part that is needed never waits behind a full queue of parts that are not. If there are several groups, it may
/// wait behind those of another one; so the queue is not full while an operation waits.
pub(super) const QUEUE_BYTES: usize = 128 * CHUNK;

/// The last sign of work of one rank, which ranks that wait for it count as progress.
#[derive(Debug, Default)]
pub(crate) struct ActivityClock(Mutex<ActivityState>);

#[derive(Debug, Default)]
struct ActivityState {
    last: Option<Instant>,
    /// The number of pieces of work under way that cannot show activity themselves.
    busy: usize,
    /// The time for which each of them counts as a sign after the last one.
    limit: Duration,
}

impl ActivityClock {
    /// Notes that this rank works at this moment.
    pub(crate) fn record(&self) {
        self.0.lock().last = Some(Instant::now());
    }

    /// Notes that work begins which shows activity all the time, for at most `limit` after the last
    /// one that was [recorded](Self::record).
    pub(crate) fn begin(&self, limit: Duration) {
        let mut state = self.0.lock();
        state.last = Some(Instant::now());
        state.busy += 1;
        state.limit = limit;
    }

    pub(crate) fn end(&self) {
        let mut state = self.0.lock();
        state.last = state.seen(Instant::now());
        state.busy -= 1;
    }

    pub(crate) fn last(&self) -> Option<Instant> {
        self.0.lock().seen(Instant::now())
    }
}

impl ActivityState {
    fn seen(&self, now: Instant) -> Option<Instant> {
        let last = self.last?;
        match self.busy {
            0 => Some(last),
            // A limit that no clock can hold never ends.
            _ => Some(last.checked_add(self.limit).map_or(now, |end| end.min(now))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_work_counts_until_its_limit() {
        let activity = ActivityClock::default();
        assert_eq!(activity.last(), None);
        activity.record();
        let shown = activity.last().unwrap();
        assert_eq!(activity.last(), Some(shown), "one sign is one moment");
        activity.begin(Duration::from_secs(10));
        let state = activity.0.lock();
        let began = state.last.unwrap();
        let after = |seconds| state.seen(began + Duration::from_secs(seconds)).unwrap() - began;
        assert_eq!(after(7), Duration::from_secs(7));
        assert_eq!(after(70), Duration::from_secs(10));
        drop(state);
        activity.begin(Duration::MAX);
        let state = activity.0.lock();
        let later = state.last.unwrap() + Duration::from_secs(70);
        assert_eq!(state.seen(later), Some(later));
        drop(state);
        activity.end();
        activity.end();
        assert_eq!(activity.last(), activity.0.lock().last);
    }
}
