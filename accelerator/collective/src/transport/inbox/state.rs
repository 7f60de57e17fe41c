//! The contents and knowledge of an inbox, and the consequences of failures for an operation. Every change is a method
//! of this file.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use super::poller::Poller;

use crate::transport::peer::{OpPosition, PeerQueue, PeerState, QUEUE_BYTES, RecvChunk};
use crate::{
    error::{Certainty, Culprit, Error, Result},
    liveness::SUSPEND_THRESHOLD,
    transport::{Abort, LastOp, LeaveKind, OpDeadline, Peer},
    wire::GroupId,
};

#[derive(Debug)]
pub(super) struct InboxState {
    pub(super) queues: Vec<PeerQueue>,
    /// The failures that became known, in that order: the later ones are mostly collateral of
    /// the first.
    failures: Vec<ObservedFailure>,
    /// The rank that first dropped its group without a word of why, and the time of it.
    pub(super) dropped: Option<(usize, Instant)>,
    pub(super) closed: bool,
    /// Counts events: everything that happens.
    pub(super) version: u64,
    /// The number of threads that wait for an event.
    pub(super) sleepers: usize,
    /// The number of threads that wait for room.
    pub(super) blocked: usize,
    /// The engines that may sleep until their wakers wake them: one for each group.
    pollers: Vec<Arc<Poller>>,
    /// The groups, apart from the world, of which chunks are taken in.
    groups: Vec<GroupId>,
    /// The groups that were ever opened: frames of one that is closed may still be under way.
    opened: BTreeSet<u16>,
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
            pollers: Vec::new(),
            groups: Vec::new(),
            opened: BTreeSet::new(),
            last_run: None,
            suspended: None,
        }
    }

    /// Checks if the queue of a sender is full; it never is after [`close`](Self::close).
    pub(super) fn is_full(&self, from: usize) -> bool {
        let queue = &self.queues[from];
        !self.closed && queue.bytes >= QUEUE_BYTES && queue.wanted == 0
    }

    /// Notes that an operation begins to wait for chunks of these peers.
    pub(super) fn begin_wanting(&mut self, peers: impl Iterator<Item = usize>) {
        peers.for_each(|peer| self.queues[peer].wanted += 1);
    }

    pub(super) fn end_wanting(&mut self, peers: impl Iterator<Item = usize>) {
        peers.for_each(|peer| self.queues[peer].wanted -= 1);
    }

    /// Puts a chunk into the queue of its sender, unless it is of a group that this rank has left.
    pub(super) fn push(&mut self, from: usize, chunk: RecvChunk) {
        let group = chunk.tag.group;
        if group != GroupId::WORLD && !self.groups.contains(&group) {
            return;
        }
        let queue = &mut self.queues[from];
        if let Some(fingerprint) = chunk.fingerprint {
            queue.last = Some(LastOp {
                group,
                sequence: chunk.tag.sequence,
                fingerprint,
                at: Some(Instant::now()),
            });
        }
        queue.bytes += chunk.weight();
        queue.chunks.push_back(chunk);
    }

    /// Takes the next chunk of an operation from a peer, if the operation can continue.
    pub(super) fn next_chunk(
        &mut self,
        from: usize,
        position: OpPosition,
        peers: &[Peer],
        deadline: &OpDeadline,
    ) -> Result<Option<RecvChunk>> {
        self.check_abort(peers, deadline)?;
        let number = &deadline.number;
        let chunk = self.queues[from].pop(position, number.group, number.sequence);
        if chunk.is_none() {
            self.check(from, peers, deadline)?;
        }
        Ok(chunk)
    }

    /// Takes in the chunks of a group from here on; returns `false` if it ever did.
    pub(super) fn open_group(&mut self, group: GroupId) -> bool {
        let is_new = self.opened.insert(group.0);
        if is_new {
            self.groups.push(group);
        }
        is_new
    }

    /// Drops the chunks of a group, and takes in no more of them.
    pub(super) fn close_group(&mut self, group: GroupId) {
        self.groups.retain(|open| *open != group);
        for queue in &mut self.queues {
            queue.close_group(group);
        }
    }

    pub(super) fn add_poller(&mut self, poller: Arc<Poller>) {
        self.pollers.push(poller);
    }

    pub(super) fn remove_poller(&mut self, poller: &Arc<Poller>) {
        self.pollers.retain(|other| !Arc::ptr_eq(other, poller));
    }

    /// Returns `true` if there are groups other than the world.
    pub(super) fn has_groups(&self) -> bool {
        !self.groups.is_empty()
    }

    pub(super) fn pollers(&self) -> &[Arc<Poller>] {
        &self.pollers
    }

    /// Notes that a peer has left a group other than the world.
    pub(super) fn on_left_group(&mut self, rank: usize, group: GroupId, kind: LeaveKind) {
        if self.groups.contains(&group) {
            self.queues[rank].left.push((group, kind, Instant::now()));
        }
    }

    /// See [`Inbox::dropped_member`](super::Inbox::dropped_member).
    pub(super) fn dropped_member(&self, group: GroupId) -> Option<usize> {
        self.queues.iter().position(|queue| {
            let mut left = queue.left.iter();
            left.any(|(other, kind, since)| {
                *other == group && *kind == LeaveKind::Dropped && since.elapsed() >= GRACE
            })
        })
    }

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
        self.record_failure(FailedAt::Unknown, cause);
        true
    }

    pub(super) fn on_broke_protocol(&mut self, rank: usize, what: String) {
        self.queues[rank].state = PeerState::Broken;
        self.record_failure(
            FailedAt::Everywhere,
            FailureCause::BrokeProtocol(rank, what),
        );
    }

    pub(super) fn on_own_failure(&mut self, why: &str) {
        self.record_failure(
            FailedAt::Everywhere,
            FailureCause::OwnFailure(why.to_owned()),
        );
    }

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
        let at = FailedAt::Operation {
            rank,
            group: abort.group,
            sequence: abort.sequence,
        };
        self.record_failure(at, cause);
    }

    pub(super) fn on_activity(&mut self, rank: usize, at: Option<Instant>) {
        let active = &mut self.queues[rank].active;
        *active = at.max(*active);
    }

    /// Records which rank a peer waited for as of `at`; a number that is not a rank counts as none.
    pub(super) fn on_waiting(&mut self, rank: usize, awaited: Option<usize>, at: Instant) {
        let world_size = self.queues.len();
        let awaited = awaited.filter(|rank| *rank < world_size);
        self.queues[rank].awaited = awaited.map(|rank| (rank, at));
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

    fn record_failure(&mut self, at: FailedAt, cause: FailureCause) {
        if self.failures.len() < MAX_FAILURES {
            self.failures.push(ObservedFailure {
                at,
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

const MAX_FAILURES: usize = 64;

/// The time after this process ran again for which the end of a connection counts as the answer to
/// its own silence.
const SUSPENSION_GRACE: Duration = Duration::from_secs(2);

impl InboxState {
    /// See [`Inbox::active`](super::Inbox::active).
    pub(super) fn active(&self, rank: usize) -> Option<Instant> {
        self.queues.get(rank)?.active
    }

    /// See [`Inbox::roots`](super::Inbox::roots). Ranks that wait in a circle, or for this one, are taken as they are.
    pub(super) fn roots(&self, missing: Vec<usize>, deadline: &OpDeadline) -> Vec<usize> {
        let awaited = |rank: usize| {
            let (awaited, told) = self.queues.get(rank)?.awaited?;
            (told >= deadline.since).then_some(awaited)
        };
        let root = |rank: usize| {
            let mut last = rank;
            for _ in &self.queues {
                match awaited(last) {
                    None => return last,
                    Some(next) if next == deadline.rank => return rank,
                    Some(next) => last = next,
                }
            }
            rank
        };
        let mut roots: Vec<usize> = missing.into_iter().map(root).collect();
        roots.sort_unstable();
        roots.dedup();
        roots
    }

    /// Returns the failure to report: what other ranks reported about this rank itself, else the first that any rank
    /// reported. A connection that closed without a message may have closed because of that failure.
    pub(super) fn cause(&self, me: usize) -> Option<&ObservedFailure> {
        let about_me = |blame: &&ObservedFailure| match &blame.cause {
            FailureCause::Reported(_, error) => error.culprit().is_some_and(|x| x.rank() == me),
            _ => false,
        };
        let failures = || self.failures.iter();
        let spoken = || failures().find(|blame| !blame.is_guessed());
        failures()
            .find(about_me)
            .or_else(spoken)
            .or(self.failures.first())
    }

    /// The cause of a rank's loss, from those who know best.
    pub(super) fn settled(&self, rank: usize) -> Option<&Culprit> {
        let mut told = self.failures.iter().filter_map(|blame| match &blame.cause {
            FailureCause::Reported(_, error) => error.culprit(),
            _ => None,
        });
        told.find(|x| x.rank() == rank && x.certainty == Certainty::Settled)
    }

    pub(super) fn error(
        &self,
        cause: &FailureCause,
        peers: &[Peer],
        deadline: &OpDeadline,
    ) -> Error {
        let me = &peers[deadline.rank];
        match cause {
            FailureCause::Lost(rank, cause, certainty) => match self.settled(*rank) {
                Some(culprit) if *certainty == Certainty::Guessed => {
                    deadline.lost(&peers[*rank], culprit.cause(), Certainty::Settled)
                }
                _ => deadline.lost(&peers[*rank], cause, *certainty),
            },
            FailureCause::OwnFailure(why) => deadline.lost(me, why, Certainty::Settled),
            FailureCause::Suspended(slept, rank, seen) => {
                let seen = format!("rank {rank} gave it up ({seen})");
                deadline.suspended(me, *slept, &seen)
            }
            FailureCause::BrokeProtocol(rank, what) => deadline.protocol(&peers[*rank], what),
            FailureCause::Reported(by, error) => match error.culprit() {
                Some(culprit) if culprit.rank() == deadline.rank && error.is_peer_lost() => {
                    deadline.given_up(me, *by, culprit.cause())
                }
                // Who tells it was in an operation of its own; this rank says in which one it was itself.
                Some(culprit) if error.is_peer_lost() => match peers.get(culprit.rank()) {
                    Some(peer) if error.is_peer_left() => deadline.left(peer),
                    Some(peer) => deadline.lost(peer, culprit.cause(), culprit.certainty),
                    None => error.clone(),
                },
                _ => error.clone(),
            },
        }
    }

    /// The same in words, where no operation asks.
    pub(super) fn describe(&self, cause: &FailureCause, peers: &[Peer], me: usize) -> String {
        match cause {
            FailureCause::BrokeProtocol(rank, what) => {
                format!("{} broke the protocol: {what}", peers[*rank])
            }
            FailureCause::Lost(rank, why, certainty) => {
                let settled = self.settled(*rank);
                let settled = settled.filter(|_| *certainty == Certainty::Guessed);
                let why = settled.map_or(&**why, Culprit::cause);
                format!("{} is lost: {why}", peers[*rank])
            }
            FailureCause::OwnFailure(why) => format!("{} is lost: {why}", peers[me]),
            FailureCause::Suspended(_, rank, seen) => {
                format!("{} is gone, or gave this one up: {seen}", peers[*rank])
            }
            FailureCause::Reported(_, error) => error.to_string(),
        }
    }

    /// Fails where a peer gave up this operation, or an earlier one, even if its data are here:
    /// a rank that comes too late must not take the operation for done.
    pub(super) fn check_abort(&self, peers: &[Peer], deadline: &OpDeadline) -> Result<()> {
        match self.cause(deadline.rank) {
            Some(failure) if failure.dooms(deadline) => {
                Err(self.error(&failure.cause, peers, deadline))
            }
            _ if self.closed => Err(deadline.interrupted()),
            _ => Ok(()),
        }
    }

    /// Fails where nothing can come from `from` any more, or where a failure elsewhere dooms the
    /// operation. A failure elsewhere gets a moment of grace, since a peer that has done its part
    /// of this operation may be gone already while the others complete it. So does the suspicion
    /// that this rank was given up, since those who did so may say why, and the end of a connection,
    /// since a rank that failed because of another may end before the other is heard.
    pub(super) fn check(&self, from: usize, peers: &[Peer], deadline: &OpDeadline) -> Result<()> {
        self.check_abort(peers, deadline)?;
        let queue = &self.queues[from];
        let state = queue.state;
        match self.cause(deadline.rank) {
            Some(blame) => {
                let suspected =
                    blame.is_guessed() || matches!(blame.cause, FailureCause::Suspended(..));
                if blame.since.elapsed() >= GRACE || state != PeerState::Present && !suspected {
                    return Err(self.error(&blame.cause, peers, deadline));
                }
                Ok(())
            }
            None => match state {
                PeerState::Left => Err(deadline.left(&peers[from])),
                PeerState::Dropped => Err(deadline.lost(&peers[from], DROPPED, Certainty::Partial)),
                PeerState::Broken | PeerState::Aborted | PeerState::Lost | PeerState::Present => {
                    let group = deadline.number.group;
                    match queue.left.iter().find(|(left, ..)| *left == group) {
                        Some((_, LeaveKind::Closed, _)) => Err(deadline.left(&peers[from])),
                        Some((_, LeaveKind::Dropped, _)) => {
                            Err(deadline.lost(&peers[from], DROPPED, Certainty::Partial))
                        }
                        None => Ok(()),
                    }
                }
            },
        }
    }

    /// The longest pause: a process that was stopped notices it by waking late, and where a moment
    /// of grace runs its end matters.
    pub(super) fn longest_pause(&self) -> Duration {
        match self.failures.is_empty() {
            false => GRACE / 4,
            true => SUSPEND_THRESHOLD,
        }
    }
}

#[derive(Debug)]
pub(super) struct ObservedFailure {
    pub(super) at: FailedAt,
    pub(super) cause: FailureCause,
    pub(super) since: Instant,
}

/// The operation in which a rank failed.
#[derive(Clone, Copy, Debug)]
pub(super) enum FailedAt {
    /// Nothing can be done any more in any group.
    Everywhere,
    /// An operation of a group of the rank that tells it.
    Operation {
        rank: usize,
        group: GroupId,
        sequence: u64,
    },
    Unknown,
}

impl ObservedFailure {
    /// Returns `true` if an operation cannot have been done by the rank that failed, or must not be taken for done.
    fn dooms(&self, deadline: &OpDeadline) -> bool {
        match self.at {
            FailedAt::Everywhere => true,
            FailedAt::Operation {
                rank,
                group,
                sequence,
            } => {
                // A group without a common member may have the same number.
                group == deadline.number.group
                    && sequence <= deadline.number.sequence
                    && deadline.number.has_member(rank)
            }
            FailedAt::Unknown => false,
        }
    }

    /// Returns `true` if nobody has reported the failure: a connection ended.
    fn is_guessed(&self) -> bool {
        matches!(self.cause, FailureCause::Lost(_, _, Certainty::Guessed))
    }
}

#[derive(Debug)]
pub(super) enum FailureCause {
    BrokeProtocol(usize, String),
    /// This rank is gone, by its own word or without one.
    Lost(usize, String, Certainty),
    OwnFailure(String),
    /// This process did not run for so long, and then found that this rank was gone.
    Suspended(Duration, usize, String),
    /// This rank says that another one failed, or that all disagree.
    Reported(usize, Error),
}

pub(super) const GRACE: Duration = Duration::from_millis(100);

pub(crate) const DROPPED: &str =
    "it dropped its group without closing it: its program returned early or failed";
