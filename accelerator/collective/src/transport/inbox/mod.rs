//! The receive queue of a rank, what it knows of its peers, and the waker of a thread that sleeps on connections.

mod poller;
mod recv;
mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use accelerator_host::sync::{Condvar, Mutex, MutexGuard};
use state::{GRACE, InboxState};

pub(crate) use state::DROPPED;

use super::chunk::{Pool, PooledBuffer};
use super::peer::PeerState;
use super::{Abort, LastOp, LeaveKind, OpDeadline, Peer, Tag};
use crate::error::Certainty;
use crate::wire::{GroupId, Heartbeat};

pub(crate) use self::poller::Poller;
pub(crate) use super::peer::{ActivityClock, MAX_IN_FLIGHT, OpPosition, RecvChunk};

/// The parts for one rank, one queue for each sender, and what is known of the senders.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    /// Something happened that the engine may wait for.
    arrival: Condvar,
    room: Condvar,
    pool: Arc<Pool>,
    /// Set once anything is known that could end an operation whose data are here.
    has_failures: AtomicBool,
    /// The rank for which this one waits, and one; zero while it waits for nobody.
    awaited: AtomicUsize,
    activity: Arc<ActivityClock>,
}

impl Inbox {
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            state: Mutex::new(InboxState::new(world_size)),
            arrival: Condvar::new(),
            room: Condvar::new(),
            pool: Arc::new(Pool::default()),
            has_failures: AtomicBool::new(false),
            awaited: AtomicUsize::new(0),
            activity: Arc::default(),
        }
    }

    /// Memory for a part that is about to arrive.
    pub(crate) fn chunk(&self, len: usize) -> PooledBuffer {
        self.pool.chunk(len)
    }

    /// Puts a part into the queue of its sender, and says whether there is room for more; after
    /// [`close`](Self::close) it is dropped.
    pub(crate) fn push(&self, from: usize, chunk: RecvChunk) -> bool {
        let mut state = self.state.lock();
        if state.closed {
            return true;
        }
        let group = chunk.tag.group;
        state.push(from, chunk);
        let has_room = !state.is_full(from);
        self.notify_of(state, Some(group));
        has_room
    }

    /// Waits a while for room in the queue of a sender, and says whether there is some.
    pub(crate) fn has_room(&self, from: usize, pause: Duration) -> bool {
        let mut state = self.state.lock();
        if pause.is_zero() || !state.is_full(from) {
            return !state.is_full(from);
        }
        state.blocked += 1;
        let mut state = self
            .room
            .wait_timeout_while(state, pause, |state| state.is_full(from));
        state.blocked -= 1;
        !state.is_full(from)
    }

    pub(crate) fn left(&self, rank: usize, group: GroupId, kind: LeaveKind) {
        let mut state = self.state.lock();
        match group {
            GroupId::WORLD => state.on_left(rank, kind),
            _ => state.on_left_group(rank, group, kind),
        }
        self.notify(state);
    }

    /// Takes in the chunks of a group from here on; returns `false` if it ever did.
    pub(crate) fn open_group(&self, group: GroupId) -> bool {
        self.state.lock().open_group(group)
    }

    /// Drops the chunks of a group, and takes in no more of them.
    pub(crate) fn close_group(&self, group: GroupId) {
        let mut state = self.state.lock();
        state.close_group(group);
        self.room.notify_all();
        // Readers continue where a queue was full.
        self.notify(state);
    }

    /// Lets an engine sleep on its poller until something happens here; see [`before_poll`](Self::before_poll).
    pub(crate) fn add_poller(&self, poller: Arc<Poller>) {
        self.state.lock().add_poller(poller);
    }

    pub(crate) fn remove_poller(&self, poller: &Arc<Poller>) {
        self.state.lock().remove_poller(poller);
    }

    /// Notes that a peer is gone, unless it has sent a final message before.
    pub(crate) fn lost(&self, rank: usize, cause: impl Into<String>, certainty: Certainty) {
        let mut state = self.state.lock();
        if state.on_lost(rank, cause.into(), certainty) {
            self.notify_failure(state);
        }
    }

    /// Notes that a peer sends what the protocol does not allow.
    pub(crate) fn broke(&self, rank: usize, what: String) {
        let mut state = self.state.lock();
        state.on_broke_protocol(rank, what);
        self.notify_failure(state);
    }

    pub(crate) fn failed(&self, why: &str) {
        let mut state = self.state.lock();
        state.on_own_failure(why);
        self.notify_failure(state);
    }

    pub(crate) fn aborted(&self, rank: usize, abort: Abort) {
        let mut state = self.state.lock();
        state.on_aborted(rank, abort);
        self.notify_failure(state);
    }

    /// Notes for which rank an operation waits, so that others do not take this rank for the cause. Heartbeats carry it
    /// for operations of the world alone.
    pub(crate) fn await_rank(&self, group: GroupId, rank: Option<usize>) {
        if group != GroupId::WORLD {
            return;
        }
        let code = rank.map_or(0, |rank| rank + 1);
        self.awaited.store(code, Ordering::Relaxed);
    }

    pub(crate) fn awaited(&self) -> Option<usize> {
        self.awaited.load(Ordering::Relaxed).checked_sub(1)
    }

    pub(crate) fn activity(&self) -> &Arc<ActivityClock> {
        &self.activity
    }

    /// Records a heartbeat of a peer. The rank that it says the peer waits for counts as of `as_of`.
    pub(crate) fn on_heartbeat(&self, rank: usize, heartbeat: Heartbeat, as_of: Instant) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.on_waiting(rank, heartbeat.awaited, as_of);
        if let Some(age) = heartbeat.active {
            state.on_activity(rank, now.checked_sub(age));
        }
    }

    pub(crate) fn active(&self, rank: usize) -> Option<Instant> {
        self.state.lock().active(rank)
    }

    /// Returns the latest operation that a peer has begun, as far as the parts that arrived show.
    pub(crate) fn last_op(&self, rank: usize) -> Option<LastOp> {
        self.state.lock().queues.get(rank)?.last
    }

    /// The ranks at the ends of the chains of waiting that begin at `missing`, which wait for nobody themselves.
    ///
    /// A rank's report from before the clock of this wait began does not count: the rank may have got what
    /// it waited for, and reports that only with its next heartbeat.
    pub(crate) fn roots(&self, missing: Vec<usize>, deadline: &OpDeadline) -> Vec<usize> {
        self.state.lock().roots(missing, deadline)
    }

    /// Returns `true` if a peer has neither sent a final message nor been given up.
    pub(crate) fn is_present(&self, rank: usize) -> bool {
        self.state.lock().queues[rank].state == PeerState::Present
    }

    /// Returns `true` if a peer runs, as far as this rank knows, and has not sent a final message.
    pub(crate) fn can_receive(&self, rank: usize) -> bool {
        let state = self.state.lock().queues[rank].state;
        matches!(state, PeerState::Broken | PeerState::Present)
    }

    /// Waits a while until each peer has sent a final message or is gone, and gives those that are
    /// neither.
    pub(crate) fn wait_for_final_messages(&self, me: usize, timeout: Duration) -> Vec<usize> {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock();
        loop {
            let queues = state.queues.iter().enumerate();
            let present: Vec<usize> = queues
                .filter(|(rank, queue)| *rank != me && queue.state == PeerState::Present)
                .map(|(rank, _)| rank)
                .collect();
            let now = Instant::now();
            if present.is_empty() || now >= until {
                return present;
            }
            // Another thread may take the notice, so this one looks by itself, too.
            state = self.wait(state, until.min(now + GRACE / 4));
        }
    }

    /// The failure that will end an operation, unless it is a guess of a moment ago.
    pub(crate) fn failure_text(&self, me: usize, peers: &[Peer]) -> Option<String> {
        let state = self.state.lock();
        if let Some(blame) = state.cause(me) {
            let is_settled = blame.since.elapsed() >= GRACE;
            return is_settled.then(|| state.describe(&blame.cause, peers, me));
        }
        let (rank, since) = state.dropped?;
        (since.elapsed() >= GRACE).then(|| format!("{} is lost: {DROPPED}", peers[rank]))
    }

    /// The member that dropped its handle of a group, unless that was a moment ago.
    pub(crate) fn dropped_member(&self, group: GroupId) -> Option<usize> {
        self.state.lock().dropped_member(group)
    }

    /// The ranks that are gone, by their own message or without one, or by the message of others.
    pub(crate) fn gone(&self) -> Vec<usize> {
        let state = self.state.lock();
        let queues = state.queues.iter().enumerate();
        queues
            .filter(|(_, queue)| queue.is_gone())
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Notes that this process runs, and does so again soon. Where it did not for `limit`,
    /// the others have reason to give it up.
    pub(crate) fn note_running(&self, limit: Duration) {
        self.state.lock().on_running(limit);
    }

    /// Returns `true` if any peer has sent a chunk with this tag that was not taken.
    pub(crate) fn has_chunk(&self, tag: Tag) -> bool {
        let state = self.state.lock();
        let mut queues = state.queues.iter();
        queues.any(|queue| queue.chunks.iter().any(|chunk| chunk.tag == tag))
    }

    /// Drops what is there and whatever still comes.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.close();
        self.has_failures.store(true, Ordering::Release);
        state.version += 1;
        wake_pollers(&state, None);
        drop(state);
        self.room.notify_all();
        self.arrival.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    fn notify_failure(&self, state: MutexGuard<'_, InboxState>) {
        self.has_failures.store(true, Ordering::Release);
        self.notify(state);
    }

    fn notify(&self, state: MutexGuard<'_, InboxState>) {
        self.notify_of(state, None);
    }

    /// The same, of an event that concerns one group only.
    fn notify_of(&self, mut state: MutexGuard<'_, InboxState>, group: Option<GroupId>) {
        state.version += 1;
        let sleepers = state.sleepers;
        wake_pollers(&state, group);
        drop(state);
        match sleepers {
            0 => {}
            1 => self.arrival.notify_one(),
            _ => self.arrival.notify_all(),
        }
    }

    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, InboxState>,
        until: Instant,
    ) -> MutexGuard<'a, InboxState> {
        let pause = until.saturating_duration_since(Instant::now());
        state.sleepers += 1;
        let mut state = self.arrival.wait_timeout(state, pause);
        state.sleepers -= 1;
        state
    }
}

/// Wakes the engines that sleep on connections, or that of a group.
fn wake_pollers(state: &InboxState, group: Option<GroupId>) {
    for poller in state.pollers() {
        if group.is_none_or(|group| group == poller.group()) && poller.end_poll() {
            poller.wake();
        }
    }
}

#[cfg(test)]
mod tests;
