//! The questions of an engine to its inbox: chunks, events, and whether to continue.

use std::{
    ops::Range,
    sync::{MutexGuard, atomic::Ordering},
    time::{Duration, Instant},
};

use super::poller::Poller;
use super::{Inbox, OpPosition, RecvChunk, state::InboxState};
use crate::error::Result;
use crate::socket::Waker;
use crate::transport::{OpDeadline, Peer, Transport};

impl Inbox {
    /// The next part from a peer. `awaited` are the ranks from which the engine wants a part
    /// now, in this order; a timeout names those that have sent none. All are numbers in the group of the transport.
    pub(crate) fn take(
        &self,
        from: usize,
        awaited: Range<usize>,
        transport: &Transport,
        deadline: &mut OpDeadline,
    ) -> Result<RecvChunk> {
        let (from, peers) = (transport.member(from), transport.peers());
        let mut state = self.state.lock();
        loop {
            let was_full = state.is_full(from);
            if let Some(chunk) = state.next_chunk(from, OpPosition::First, peers, deadline)? {
                let has_room = was_full && !state.is_full(from);
                self.taken(state, has_room, deadline);
                return Ok(chunk);
            }
            state = self.pause(state, awaited.clone(), transport, deadline)?;
        }
    }

    /// The next part of an operation from a rank of the world, where it has come.
    pub(crate) fn poll(
        &self,
        from: usize,
        place: OpPosition,
        peers: &[Peer],
        deadline: &mut OpDeadline,
    ) -> Result<Option<RecvChunk>> {
        let mut state = self.state.lock();
        let was_full = state.is_full(from);
        let chunk = state.next_chunk(from, place, peers, deadline)?;
        if chunk.is_some() {
            let has_room = was_full && !state.is_full(from);
            self.taken(state, has_room, deadline);
        }
        Ok(chunk)
    }

    pub(crate) fn version(&self) -> u64 {
        self.state.lock().version
    }

    /// Waits for an event after `version`, or until it is time to ask again. `awaited` as for [`take`](Self::take).
    pub(crate) fn wait_for_event(
        &self,
        version: u64,
        awaited: Range<usize>,
        transport: &Transport,
        deadline: &mut OpDeadline,
    ) -> Result<()> {
        let state = self.state.lock();
        if state.version == version {
            drop(self.pause(state, awaited, transport, deadline)?);
        }
        Ok(())
    }

    /// Waits until something happens that was not counted in `version`, or it is `due`.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn sleep(&self, version: u64, due: Instant) {
        let mut state = self.state.lock();
        while state.version == version && Instant::now() < due {
            state = self.wait(state, due);
        }
    }

    /// Announces that the engine is about to sleep until its waker wakes it, and returns the waker; `None` if
    /// there was an event after `version`. [`after_poll`](Self::after_poll) follows.
    pub(crate) fn before_poll<'a>(&self, poller: &'a Poller, version: u64) -> Option<&'a Waker> {
        let state = self.state.lock();
        if state.version != version {
            return None;
        }
        poller.begin_poll();
        Some(poller.waker())
    }

    /// Announces that the engine no longer sleeps.
    pub(crate) fn after_poll(&self, poller: &Poller) {
        let _state = self.state.lock();
        // Whoever woke it has noted the end.
        if !poller.end_poll() {
            poller.waker().drain();
        }
    }

    /// Ends the wait of [`wait_for_event`](Self::wait_for_event).
    pub(crate) fn wake(&self) {
        self.notify(self.state.lock());
    }

    fn pause<'a>(
        &'a self,
        mut state: MutexGuard<'a, InboxState>,
        awaited: Range<usize>,
        transport: &Transport,
        deadline: &mut OpDeadline,
    ) -> Result<MutexGuard<'a, InboxState>> {
        let rank = deadline.rank;
        let (group, sequence) = (deadline.number.group, deadline.number.sequence);
        let awaited = awaited.map(|peer| transport.member(peer));
        let missing =
            awaited.filter(|peer| *peer != rank && !state.queues[*peer].holds(group, sequence));
        self.await_rank(group, missing.clone().next());
        let roots = |deadline: &OpDeadline| state.roots(missing.clone().collect(), deadline);
        let active = |rank| state.active(rank);
        let last = |rank: usize| state.queues.get(rank)?.last;
        let due = deadline.tick(
            state.longest_pause(),
            roots,
            active,
            transport.peers(),
            last,
        )?;
        let version = state.version;
        let missing: Vec<usize> = match state.has_groups() {
            true => missing.collect(),
            false => Vec::new(),
        };
        state.begin_wanting(missing.iter().copied());
        drop(state);
        let waited = transport.wait_for_arrival(version, due, deadline);
        let mut state = self.state.lock();
        state.end_wanting(missing.into_iter());
        waited?;
        Ok(state)
    }

    fn taken(&self, state: MutexGuard<'_, InboxState>, has_room: bool, deadline: &mut OpDeadline) {
        let blocked = state.blocked > 0;
        // Operations of other groups may sleep, and what they wait for may not have been read.
        match has_room {
            true => self.notify(state),
            false => drop(state),
        }
        self.await_rank(deadline.number.group, None);
        // The system is asked only where somebody waits.
        if blocked {
            self.room.notify_all();
        }
        deadline.on_progress(Instant::now());
    }

    /// Checks if a sender should continue: `Ok` while nothing speaks against it.
    pub(crate) fn check(&self, to: usize, peers: &[Peer], deadline: &OpDeadline) -> Result<()> {
        self.state.lock().check(to, peers, deadline)
    }

    /// Returns `true` if nothing is known that could end an operation whose data are here.
    pub(crate) fn has_no_failures(&self) -> bool {
        !self.has_failures.load(Ordering::Acquire)
    }

    /// Fails where a peer gave up this operation, or an earlier one, or this rank has left.
    pub(crate) fn check_abort(&self, peers: &[Peer], deadline: &OpDeadline) -> Result<()> {
        self.state.lock().check_abort(peers, deadline)
    }

    /// Waits a while for the reason why nothing can be sent to a peer any more.
    pub(crate) fn wait_for_cause(
        &self,
        to: usize,
        peers: &[Peer],
        deadline: &OpDeadline,
    ) -> Result<()> {
        let until = Instant::now() + CAUSE_WAIT;
        let mut state = self.state.lock();
        loop {
            state.check(to, peers, deadline)?;
            if Instant::now() >= until {
                return Ok(());
            }
            state = self.wait(state, until);
        }
    }
}

/// The time for which a rank whose connection broke waits for the reason.
const CAUSE_WAIT: Duration = Duration::from_millis(500);
