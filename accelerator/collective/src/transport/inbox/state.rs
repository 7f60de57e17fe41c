//! The contents and knowledge of an inbox. Every change of them is a method of this file.

use std::{
    mem::take,
    time::{Duration, Instant},
};

use super::{
    failures::{FailureCause, ObservedFailure},
    peer_queue::{OpPosition, PeerQueue, PeerState, QUEUE_BYTES, RecvChunk},
};
use crate::{
    error::{Certainty, Result},
    transport::{Abort, LastOp, LeaveKind, OpDeadline, Peer},
};

#[derive(Debug)]
pub(super) struct InboxState {
    queues: Vec<PeerQueue>,
    /// The failures that became known, in that order: the later ones are mostly collateral of
    /// the first.
    failures: Vec<ObservedFailure>,
    /// The rank that first dropped its group without a word of why, and the time of it.
    dropped: Option<(usize, Instant)>,
    closed: bool,
    /// Counts events: everything that happens.
    version: u64,
    /// The number of threads that wait for an event.
    sleepers: usize,
    /// The number of threads that wait for room.
    blocked: usize,
    /// Set while the engine sleeps until its waker wakes it.
    polling: bool,
    /// The last time at which this process said that it runs, and the silence after which the others
    /// may give it up.
    last_run: Option<(Instant, Duration)>,
    /// The time at which this process ran again after too long a pause, and the length of the pause.
    suspended: Option<(Instant, Duration)>,
}

impl InboxState {
    pub(super) fn new(world_size: usize) -> Self {
        Self {
            queues: (0..world_size).map(|_| PeerQueue::default()).collect(),
            failures: Vec::new(),
            dropped: None,
            closed: false,
            version: 0,
            sleepers: 0,
            blocked: 0,
            polling: false,
            last_run: None,
            suspended: None,
        }
    }

    /// The queue of each rank, and what is known of the rank.
    pub(super) fn queues(&self) -> &[PeerQueue] {
        &self.queues
    }

    /// The failures that became known, the first one first.
    pub(super) fn failures(&self) -> &[ObservedFailure] {
        &self.failures
    }

    /// The rank that first dropped its group without a word of why, and the time of it.
    pub(super) fn dropped(&self) -> Option<(usize, Instant)> {
        self.dropped
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// The number of events so far.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Returns `true` if a thread waits for an event.
    pub(super) fn has_sleepers(&self) -> bool {
        self.sleepers > 0
    }

    /// Returns `true` if a thread waits for room.
    pub(super) fn has_blocked(&self) -> bool {
        self.blocked > 0
    }

    /// Checks if the queue of a sender is full; it never is after [`close`](Self::close).
    pub(super) fn is_full(&self, from: usize) -> bool {
        !self.closed && self.queues[from].bytes >= QUEUE_BYTES
    }

    /// Puts a chunk into the queue of its sender.
    pub(super) fn push(&mut self, from: usize, chunk: RecvChunk) {
        let queue = &mut self.queues[from];
        if let Some(fingerprint) = chunk.fingerprint {
            queue.last = Some(LastOp {
                sequence: chunk.tag.sequence,
                fingerprint,
                at: Some(Instant::now()),
            });
        }
        queue.bytes += chunk.weight();
        queue.chunks.push_back(chunk);
    }

    /// Takes the next chunk of an operation from a peer, if the operation can go on.
    pub(super) fn next_chunk(
        &mut self,
        from: usize,
        position: OpPosition,
        peers: &[Peer],
        deadline: &OpDeadline,
    ) -> Result<Option<RecvChunk>> {
        self.check_abort(peers, deadline)?;
        let chunk = self.queues[from].pop(position, deadline.sequence);
        if chunk.is_none() {
            self.check(from, peers, deadline)?;
        }
        Ok(chunk)
    }

    pub(super) fn count_event(&mut self) {
        self.version += 1;
    }

    /// Counts a thread that begins to wait for an event.
    pub(super) fn begin_sleep(&mut self) {
        self.sleepers += 1;
    }

    pub(super) fn end_sleep(&mut self) {
        self.sleepers -= 1;
    }

    /// Counts a thread that begins to wait for room.
    pub(super) fn begin_block(&mut self) {
        self.blocked += 1;
    }

    pub(super) fn end_block(&mut self) {
        self.blocked -= 1;
    }

    /// Notes that the engine is about to sleep until its waker wakes it, unless there was an event
    /// after `version`, and says whether it is.
    pub(super) fn begin_poll(&mut self, version: u64) -> bool {
        self.polling = self.version == version;
        self.polling
    }

    /// Notes that the engine does not sleep on its waker any more, and says whether it did.
    pub(super) fn end_poll(&mut self) -> bool {
        take(&mut self.polling)
    }

    /// Records that a peer said goodbye.
    pub(super) fn on_left(&mut self, rank: usize, kind: LeaveKind) {
        self.queues[rank].state = match kind {
            LeaveKind::Closed => PeerState::Left,
            LeaveKind::Dropped => PeerState::Dropped,
        };
        if kind == LeaveKind::Dropped {
            self.dropped.get_or_insert((rank, Instant::now()));
        }
    }

    /// Records that a peer is gone. Returns `true` if that counts: it does not after its final message.
    pub(super) fn on_lost(&mut self, rank: usize, cause: String, certainty: Certainty) -> bool {
        if self.queues[rank].state != PeerState::Present {
            return false;
        }
        self.queues[rank].state = PeerState::Lost;
        self.detect_suspension(Instant::now());
        let cause = match self.suspended {
            // Who ended a connection meanwhile has given this rank up.
            Some((woke, slept))
                if certainty == Certainty::Guessed && woke.elapsed() < SUSPENSION_GRACE =>
            {
                FailureCause::Suspended(slept, rank, cause)
            }
            _ => FailureCause::Lost(rank, cause, certainty),
        };
        self.record_failure(None, cause);
        true
    }

    /// A peer sent what the protocol does not allow.
    pub(super) fn on_broke_protocol(&mut self, rank: usize, what: String) {
        self.queues[rank].state = PeerState::Broken;
        self.record_failure(Some(0), FailureCause::BrokeProtocol(rank, what));
    }

    /// Records that this rank cannot continue.
    pub(super) fn on_own_failure(&mut self, why: &str) {
        self.record_failure(Some(0), FailureCause::OwnFailure(why.to_owned()));
    }

    /// Records that a peer has given up.
    pub(super) fn on_aborted(&mut self, rank: usize, abort: Abort) {
        let cause = match abort.error.culprit() {
            // It reports its own end; the receiver adds the operation.
            Some(culprit) if culprit.rank() == rank && abort.error.is_peer_lost() => {
                self.queues[rank].state = PeerState::Lost;
                FailureCause::Lost(rank, culprit.cause().to_owned(), culprit.certainty)
            }
            culprit => {
                let blamed = culprit.and_then(|x| self.queues.get_mut(x.rank()));
                if let Some(queue) = blamed {
                    queue.blamed = true;
                }
                self.queues[rank].state = PeerState::Aborted;
                FailureCause::Reported(rank, abort.error)
            }
        };
        self.record_failure(Some(abort.sequence), cause);
    }

    /// Records that a peer showed at this moment that it works.
    pub(super) fn on_activity(&mut self, rank: usize, at: Option<Instant>) {
        let active = &mut self.queues[rank].active;
        *active = at.max(*active);
    }

    /// Records for which rank a peer waits; a number that is no rank counts as none.
    pub(super) fn on_waiting(&mut self, rank: usize, awaited: Option<usize>) {
        let world_size = self.queues.len();
        let awaited = awaited.filter(|rank| *rank < world_size);
        self.queues[rank].awaited = awaited.map(|rank| (rank, Instant::now()));
    }

    /// Records that this process runs, and will say so again within `limit`.
    pub(super) fn on_running(&mut self, limit: Duration) {
        let now = Instant::now();
        self.detect_suspension(now);
        self.last_run = Some((now, limit));
    }

    /// Drops what the queues hold, and takes in nothing more.
    pub(super) fn close(&mut self) {
        self.closed = true;
        for queue in &mut self.queues {
            queue.chunks.clear();
            queue.bytes = 0;
        }
    }

    fn record_failure(&mut self, sequence: Option<u64>, cause: FailureCause) {
        if self.failures.len() < MAX_FAILURES {
            self.failures.push(ObservedFailure {
                sequence,
                cause,
                since: Instant::now(),
            });
        }
    }

    fn detect_suspension(&mut self, now: Instant) {
        if let Some((last, limit)) = self.last_run {
            let slept = now.saturating_duration_since(last);
            if slept > limit {
                self.suspended = Some((now, slept));
                self.last_run = Some((now, limit));
            }
        }
    }
}

/// The most failures that are kept.
const MAX_FAILURES: usize = 64;

/// The time after this process ran again for which the end of a connection counts as the answer to
/// its own silence.
const SUSPENSION_GRACE: Duration = Duration::from_secs(2);
