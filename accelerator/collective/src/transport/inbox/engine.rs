//! What an engine asks of its inbox: parts, news, and whether to go on.

use std::{
    ops::Range,
    sync::{MutexGuard, atomic::Ordering},
    time::{Duration, Instant},
};

use super::{Inbox, Parcel, Position, state::State};
use crate::{
    error::Result,
    transport::{Peer, Transport, Watch, bell::Bell},
};

impl Inbox {
    /// The next part from a peer. `awaited` are the ranks from which the engine wants a part
    /// now, in this order; a timeout names those that have sent none.
    pub(crate) fn take(
        &self,
        from: usize,
        awaited: Range<usize>,
        transport: &dyn Transport,
        watch: &mut Watch,
    ) -> Result<Parcel> {
        let peers = transport.peers();
        let mut state = self.lock();
        loop {
            if let Some(parcel) = state.attempt(from, Position::First, peers, watch)? {
                self.taken(state, watch);
                return Ok(parcel);
            }
            state = self.pause(state, awaited.clone(), transport, watch)?;
        }
    }

    /// The next part of an operation from a peer, where it has come.
    pub(crate) fn poll(
        &self,
        from: usize,
        place: Position,
        peers: &[Peer],
        watch: &mut Watch,
    ) -> Result<Option<Parcel>> {
        let mut state = self.lock();
        let parcel = state.attempt(from, place, peers, watch)?;
        if parcel.is_some() {
            self.taken(state, watch);
        }
        Ok(parcel)
    }

    /// Counts what happened here.
    pub(crate) fn version(&self) -> u64 {
        self.lock().version
    }

    /// Waits until something happens that was not counted in `version`, or it is time to ask
    /// again. `awaited` as for [`take`](Self::take).
    pub(crate) fn wait_for_news(
        &self,
        version: u64,
        awaited: Range<usize>,
        transport: &dyn Transport,
        watch: &mut Watch,
    ) -> Result<()> {
        let state = self.lock();
        if state.version == version {
            drop(self.pause(state, awaited, transport, watch)?);
        }
        Ok(())
    }

    /// Waits until something happens that was not counted in `version`, or it is `due`.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn sleep(&self, version: u64, due: Instant) {
        let mut state = self.lock();
        while state.version == version && Instant::now() < due {
            state = self.wait(state, due);
        }
    }

    /// Says that the engine is about to sleep until its bell rings, unless something happened
    /// that was not counted in `version`; says whether it may. It [gets up](Self::get_up)
    /// afterwards.
    pub(crate) fn doze(&self, version: u64) -> Option<&Bell> {
        let bell = self.bell.as_ref()?;
        let mut state = self.lock();
        state.dozing = state.version == version;
        state.dozing.then_some(bell)
    }

    /// Says that the engine does not sleep any more.
    pub(crate) fn get_up(&self) {
        let mut state = self.lock();
        // Whoever rang has cleared it.
        if !std::mem::take(&mut state.dozing)
            && let Some(bell) = &self.bell
        {
            bell.hush();
        }
    }

    /// Ends the wait of [`wait_for_news`](Self::wait_for_news).
    pub(crate) fn nudge(&self) {
        self.tell(self.lock());
    }

    /// Waits until something may have happened.
    fn pause<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        awaited: Range<usize>,
        transport: &dyn Transport,
        watch: &mut Watch,
    ) -> Result<MutexGuard<'a, State>> {
        let (rank, sequence) = (watch.rank, watch.sequence);
        let missing = awaited.filter(|peer| *peer != rank && !state.queues[*peer].holds(sequence));
        self.await_rank(missing.clone().next());
        let roots = |watch: &Watch| state.roots(missing.clone().collect(), watch);
        let pause = watch.tick(roots, |rank| state.active(rank))?;
        let due = Instant::now() + state.pause(pause);
        let version = state.version;
        drop(state);
        transport.await_news(version, due, watch)?;
        watch.woke(due, Instant::now());
        Ok(self.lock())
    }

    fn taken(&self, state: MutexGuard<'_, State>, watch: &mut Watch) {
        let blocked = state.blocked > 0;
        drop(state);
        self.await_rank(None);
        // The system is asked only where somebody waits.
        if blocked {
            self.room.notify_all();
        }
        watch.moved(Instant::now());
    }

    /// Whether a sender should go on: `Ok` while nothing speaks against it.
    pub(crate) fn check(&self, to: usize, peers: &[Peer], watch: &Watch) -> Result<()> {
        self.lock().check(to, peers, watch)
    }

    /// Whether nothing is known that could end an operation whose data are here.
    pub(crate) fn is_calm(&self) -> bool {
        !self.troubled.load(Ordering::Acquire)
    }

    /// Fails where a peer gave up this operation, or an earlier one, or this rank has left.
    pub(crate) fn check_abort(&self, peers: &[Peer], watch: &Watch) -> Result<()> {
        self.lock().check_abort(peers, watch)
    }

    /// Waits a while for news about a peer to which nothing can be sent any more.
    pub(crate) fn verdict(&self, to: usize, peers: &[Peer], watch: &Watch) -> Result<()> {
        let until = Instant::now() + VERDICT;
        let mut state = self.lock();
        loop {
            state.check(to, peers, watch)?;
            if Instant::now() >= until {
                return Ok(());
            }
            state = self.wait(state, until);
        }
    }
}

/// How long a rank whose connection broke waits for the reason.
const VERDICT: Duration = Duration::from_millis(500);
