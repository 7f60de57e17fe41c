//! Where the parts for one rank wait for its engine.

mod activity;
mod engine;
mod queue;
mod state;

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

pub(crate) use activity::Signs;
pub(crate) use queue::{FLIGHTS, Parcel, Position};

use super::{
    Abort, Parting, Peer, Watch,
    bell::Bell,
    pool::{Chunk, Pool},
};
use crate::error::Certainty;

use queue::{QUEUE_BYTES, Queue, Standing};
use state::{Cause, DROPPED, GRACE, State};

/// The parts for one rank, one queue for each sender, and what is known of the senders.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    /// Something happened that the engine may wait for.
    arrival: Condvar,
    /// A queue has become shorter.
    room: Condvar,
    pool: Arc<Pool>,
    /// Wakes an engine that sleeps on connections.
    bell: Option<Bell>,
    /// Whether there is anything that could end an operation whose data are here.
    troubled: AtomicBool,
    /// The rank for which this one waits, and one; zero while it waits for nobody.
    awaited: AtomicUsize,
    /// What this rank shows of its work outside of operations.
    signs: Arc<Signs>,
}

impl Inbox {
    pub(crate) fn new(world_size: usize) -> Self {
        Self::with(world_size, None)
    }

    /// One whose engine may sleep elsewhere, on the bell; see [`doze`](Self::doze).
    pub(crate) fn with_bell(world_size: usize, bell: Bell) -> Self {
        Self::with(world_size, Some(bell))
    }

    fn with(world_size: usize, bell: Option<Bell>) -> Self {
        Self {
            state: Mutex::new(State {
                queues: (0..world_size).map(|_| Queue::default()).collect(),
                blames: Vec::new(),
                dropped: None,
                closed: false,
                version: 0,
                sleepers: 0,
                blocked: 0,
                dozing: false,
                awake: None,
                slept: None,
            }),
            arrival: Condvar::new(),
            room: Condvar::new(),
            pool: Arc::new(Pool::default()),
            bell,
            troubled: AtomicBool::new(false),
            awaited: AtomicUsize::new(0),
            signs: Arc::default(),
        }
    }

    /// Memory for a part that is about to arrive.
    pub(crate) fn chunk(&self, len: usize) -> Chunk {
        self.pool.chunk(len)
    }

    /// Puts a part into the queue of its sender, and says whether there is room for more; after
    /// [`close`](Self::close) it is dropped.
    pub(crate) fn deposit(&self, from: usize, parcel: Parcel) -> bool {
        let mut state = self.lock();
        if state.closed {
            return true;
        }
        let queue = &mut state.queues[from];
        queue.bytes += parcel.weight();
        queue.parcels.push_back(parcel);
        let has_room = queue.bytes < QUEUE_BYTES;
        self.tell(state);
        has_room
    }

    /// Waits a while for room in the queue of a sender, and says whether there is some.
    pub(crate) fn has_room(&self, from: usize, pause: Duration) -> bool {
        let full = |state: &mut State| !state.closed && state.queues[from].bytes >= QUEUE_BYTES;
        let mut state = self.lock();
        if pause.is_zero() || !full(&mut state) {
            return !full(&mut state);
        }
        state.blocked += 1;
        let (mut state, _) = self
            .room
            .wait_timeout_while(state, pause, |state| full(state))
            .unwrap_or_else(PoisonError::into_inner);
        state.blocked -= 1;
        !full(&mut state)
    }

    /// Notes that a peer said goodbye.
    pub(crate) fn left(&self, rank: usize, parting: Parting) {
        let mut state = self.lock();
        state.queues[rank].standing = match parting {
            Parting::Closed => Standing::Left,
            Parting::Dropped => Standing::Dropped,
        };
        if parting == Parting::Dropped {
            state.dropped.get_or_insert((rank, Instant::now()));
        }
        self.tell(state);
    }

    /// Notes that a peer is gone without a word, unless it has said its last word before.
    pub(crate) fn lost(&self, rank: usize, cause: impl Into<String>, certainty: Certainty) {
        let mut state = self.lock();
        if state.queues[rank].standing != Standing::Present {
            return;
        }
        state.queues[rank].standing = Standing::Lost;
        let cause = cause.into();
        state.attend(Instant::now());
        let cause = match state.slept {
            // Who ended a connection meanwhile has given this rank up.
            Some((woke, slept))
                if certainty == Certainty::Guessed && woke.elapsed() < AFTERMATH =>
            {
                Cause::Overslept(slept, rank, cause)
            }
            _ => Cause::Lost(rank, cause, certainty),
        };
        state.blame(None, cause);
        self.troubled.store(true, Ordering::Release);
        self.tell(state);
    }

    /// Notes that a peer sends what the protocol does not allow.
    pub(crate) fn broke(&self, rank: usize, what: String) {
        let mut state = self.lock();
        state.queues[rank].standing = Standing::Broken;
        state.blame(Some(0), Cause::Broke(rank, what));
        self.troubled.store(true, Ordering::Release);
        self.tell(state);
    }

    /// Notes that this rank cannot go on.
    pub(crate) fn failed(&self, why: &str) {
        let mut state = self.lock();
        state.blame(Some(0), Cause::Own(why.to_owned()));
        self.troubled.store(true, Ordering::Release);
        self.tell(state);
    }

    /// Notes that a peer has given up.
    pub(crate) fn aborted(&self, rank: usize, abort: Abort) {
        let mut state = self.lock();
        let cause = match abort.error.culprit() {
            // It tells its own end; who hears it says in which operation that was.
            Some(culprit) if culprit.rank() == rank && abort.error.is_peer_lost() => {
                state.queues[rank].standing = Standing::Lost;
                Cause::Lost(rank, culprit.cause().to_owned(), culprit.certainty)
            }
            culprit => {
                let accused = culprit.and_then(|x| state.queues.get_mut(x.rank()));
                if let Some(queue) = accused {
                    queue.accused = true;
                }
                state.queues[rank].standing = Standing::GaveUp;
                Cause::Told(rank, abort.error)
            }
        };
        state.blame(Some(abort.sequence), cause);
        self.troubled.store(true, Ordering::Release);
        self.tell(state);
    }

    /// Notes for which rank this one waits, so that others do not take it for the cause.
    pub(crate) fn await_rank(&self, rank: Option<usize>) {
        let code = rank.map_or(0, |rank| rank + 1);
        self.awaited.store(code, Ordering::Relaxed);
    }

    /// The rank for which this one waits.
    pub(crate) fn awaited(&self) -> Option<usize> {
        self.awaited.load(Ordering::Relaxed).checked_sub(1)
    }

    /// What this rank shows of its work outside of operations.
    pub(crate) fn signs(&self) -> &Arc<Signs> {
        &self.signs
    }

    /// Notes how long ago a peer showed that it works.
    pub(crate) fn works(&self, rank: usize, age: Duration) {
        let at = Instant::now().checked_sub(age);
        let active = &mut self.lock().queues[rank].active;
        *active = at.max(*active);
    }

    /// When a peer showed last that it works.
    pub(crate) fn active(&self, rank: usize) -> Option<Instant> {
        self.lock().active(rank)
    }

    /// Notes for which rank a peer waits.
    pub(crate) fn waits(&self, rank: usize, awaited: Option<usize>) {
        let mut state = self.lock();
        let world_size = state.queues.len();
        let awaited = awaited.filter(|rank| *rank < world_size);
        state.queues[rank].awaited = awaited.map(|rank| (rank, Instant::now()));
    }

    /// Those for whom `missing` wait in the end, and who wait for nobody themselves.
    ///
    /// What a rank said before the clock of this wait began does not count: it may have got what
    /// it waited for, and says so with its next heartbeat only.
    pub(crate) fn roots(&self, missing: Vec<usize>, watch: &Watch) -> Vec<usize> {
        self.lock().roots(missing, watch)
    }

    /// Whether a peer has neither said its last word nor been given up.
    pub(crate) fn is_present(&self, rank: usize) -> bool {
        self.lock().queues[rank].standing == Standing::Present
    }

    /// Whether a peer runs, as far as this rank knows, and has not said its last word.
    pub(crate) fn may_hear(&self, rank: usize) -> bool {
        let standing = self.lock().queues[rank].standing;
        matches!(standing, Standing::Broken | Standing::Present)
    }

    /// Waits a while until each peer has said its last word or is gone, and gives those that are
    /// neither.
    pub(crate) fn last_words(&self, me: usize, patience: Duration) -> Vec<usize> {
        let until = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            let queues = state.queues.iter().enumerate();
            let present: Vec<usize> = queues
                .filter(|(rank, queue)| *rank != me && queue.standing == Standing::Present)
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

    /// What will make an operation fail, unless that is a guess of a moment ago.
    pub(crate) fn trouble(&self, me: usize, peers: &[Peer]) -> Option<String> {
        let state = self.lock();
        if let Some(blame) = state.cause(me) {
            let is_settled = blame.since.elapsed() >= GRACE;
            return is_settled.then(|| state.told(&blame.cause, peers, me));
        }
        let (rank, since) = state.dropped?;
        (since.elapsed() >= GRACE).then(|| format!("{} is lost: {DROPPED}", peers[rank]))
    }

    /// The ranks that are gone, by their own word or without one, or by the word of others.
    pub(crate) fn gone(&self) -> Vec<usize> {
        let state = self.lock();
        let queues = state.queues.iter().enumerate();
        queues
            .filter(|(_, queue)| queue.is_gone())
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Notes that this process runs, and will say so again soon. Where it did not for `limit`,
    /// the others have reason to give it up.
    pub(crate) fn awake(&self, limit: Duration) {
        let now = Instant::now();
        let mut state = self.lock();
        state.attend(now);
        state.awake = Some((now, limit));
    }

    /// Drops what is there and whatever still comes.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        self.troubled.store(true, Ordering::Release);
        state.version += 1;
        for queue in &mut state.queues {
            queue.parcels.clear();
            queue.bytes = 0;
        }
        self.ring(&mut state);
        drop(state);
        self.room.notify_all();
        self.arrival.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    fn tell(&self, mut state: MutexGuard<'_, State>) {
        state.version += 1;
        let asleep = state.sleepers > 0;
        self.ring(&mut state);
        drop(state);
        if asleep {
            self.arrival.notify_one();
        }
    }

    /// Wakes the engine where it sleeps elsewhere.
    fn ring(&self, state: &mut State) {
        if std::mem::take(&mut state.dozing)
            && let Some(bell) = &self.bell
        {
            bell.ring();
        }
    }

    fn wait<'a>(&self, mut state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let pause = until.saturating_duration_since(Instant::now());
        state.sleepers += 1;
        let waited = self.arrival.wait_timeout(state, pause);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.sleepers -= 1;
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state whole, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long after this process ran again the end of a connection is taken for the answer to its
/// silence.
const AFTERMATH: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
