//! Where the parts for one rank wait for its engine.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{
    Abort, Peer, Tag, Watch,
    pool::{Chunk, Pool},
};
use crate::{contract::Contract, error::Error, error::Result, reduce::Share};

/// The parts for one rank, one queue for each sender, and what is known of the senders.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    /// Something happened that the engine may wait for.
    arrival: Condvar,
    /// A queue has become shorter.
    room: Condvar,
    pool: Arc<Pool>,
}

impl Inbox {
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            state: Mutex::new(State {
                queues: (0..world_size).map(|_| Queue::default()).collect(),
                cause: None,
                closed: false,
            }),
            arrival: Condvar::new(),
            room: Condvar::new(),
            pool: Arc::new(Pool::default()),
        }
    }

    /// Memory for a part that is about to arrive.
    pub(crate) fn chunk(&self, len: usize) -> Chunk {
        self.pool.chunk(len)
    }

    /// Puts a part into the queue of its sender; after [`close`](Self::close) it is dropped.
    pub(crate) fn deposit(&self, from: usize, parcel: Parcel) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        let queue = &mut state.queues[from];
        queue.bytes += parcel.chunk.bytes().len();
        queue.parcels.push_back(parcel);
        drop(state);
        self.arrival.notify_one();
    }

    /// Waits a while for room in the queue of a sender, and says whether there is some.
    pub(crate) fn has_room(&self, from: usize, pause: Duration) -> bool {
        let full = |state: &mut State| !state.closed && state.queues[from].bytes >= QUEUE_BYTES;
        let state = self.lock();
        let (mut state, _) = self
            .room
            .wait_timeout_while(state, pause, |state| full(state))
            .unwrap_or_else(PoisonError::into_inner);
        !full(&mut state)
    }

    /// Notes that a peer closed its group in good order.
    pub(crate) fn left(&self, rank: usize) {
        self.lock().queues[rank].standing = Standing::Left;
        self.arrival.notify_one();
    }

    /// Notes that a peer is gone without a word, unless it has said its last word before.
    pub(crate) fn lost(&self, rank: usize, why: impl Into<String>) {
        let mut state = self.lock();
        if state.queues[rank].standing != Standing::Present {
            return;
        }
        state.queues[rank].standing = Standing::Lost;
        state.blame(None, Cause::Lost(rank, why.into()));
        drop(state);
        self.arrival.notify_one();
    }

    /// Notes that a peer has given up.
    pub(crate) fn aborted(&self, rank: usize, abort: Abort) {
        let mut state = self.lock();
        state.queues[rank].standing = Standing::Lost;
        state.blame(Some(abort.sequence), Cause::Aborted(abort.error));
        drop(state);
        self.arrival.notify_one();
    }

    /// Drops what is there and whatever still comes.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        for queue in &mut state.queues {
            queue.parcels.clear();
            queue.bytes = 0;
        }
        drop(state);
        self.room.notify_all();
        self.arrival.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// The next part from a peer. `awaited` are the ranks from which the engine wants a part
    /// now, in this order; a timeout names those that have sent none.
    pub(crate) fn take(
        &self,
        from: usize,
        awaited: Range<usize>,
        peers: &[Peer],
        watch: &mut Watch<'_>,
    ) -> Result<Parcel> {
        let mut state = self.lock();
        loop {
            state.check_abort(watch)?;
            if let Some(parcel) = state.queues[from].pop() {
                drop(state);
                self.room.notify_all();
                watch.moved(Instant::now());
                return Ok(parcel);
            }
            state.check(from, peers, watch)?;
            let rank = watch.rank;
            let pause = watch.tick(|| {
                let silent = |peer: &usize| state.queues[*peer].parcels.is_empty();
                awaited
                    .clone()
                    .filter(|peer| *peer != rank)
                    .filter(silent)
                    .collect()
            })?;
            let pause = state.pause(pause);
            state = self.wait(state, pause);
        }
    }

    /// Whether a sender should go on: `Ok` while nothing speaks against it.
    pub(crate) fn check(&self, to: usize, peers: &[Peer], watch: &Watch<'_>) -> Result<()> {
        self.lock().check(to, peers, watch)
    }

    /// Waits a while for news about a peer to which nothing can be sent any more.
    pub(crate) fn verdict(&self, to: usize, peers: &[Peer], watch: &Watch<'_>) -> Result<()> {
        let until = Instant::now() + GRACE;
        let mut state = self.lock();
        loop {
            state.check(to, peers, watch)?;
            let now = Instant::now();
            if now >= until {
                return Ok(());
            }
            state = self.wait(state, until - now);
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, pause: Duration) -> MutexGuard<'a, State> {
        let waited = self.arrival.wait_timeout(state, pause);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state whole, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part that has arrived.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) tag: Tag,
    pub(crate) contract: Option<Contract>,
    pub(crate) chunk: Chunk,
}

/// In a reduction, what has arrived from each rank; nothing for the rank itself.
impl Share for Option<Parcel> {
    fn bytes(&self) -> Option<&[u8]> {
        self.as_ref().map(|parcel| parcel.chunk.bytes())
    }
}

#[derive(Debug)]
struct State {
    queues: Vec<Queue>,
    /// The first failure that became known; later ones are its collateral.
    cause: Option<Blame>,
    closed: bool,
}

impl State {
    fn blame(&mut self, sequence: Option<u64>, cause: Cause) {
        self.cause.get_or_insert(Blame {
            sequence,
            cause,
            since: Instant::now(),
        });
    }

    /// Fails where a peer gave up this operation, or an earlier one, even if its data are here:
    /// a rank that comes too late must not take the operation for done.
    fn check_abort(&self, watch: &Watch<'_>) -> Result<()> {
        match &self.cause {
            Some(Blame {
                sequence: Some(at),
                cause: Cause::Aborted(error),
                ..
            }) if *at <= watch.sequence => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Fails where nothing can come from `from` any more, or where a failure elsewhere dooms the
    /// operation. A failure elsewhere gets a moment of grace, since a peer that has done its part
    /// of this operation may be gone already while the others complete it.
    fn check(&self, from: usize, peers: &[Peer], watch: &Watch<'_>) -> Result<()> {
        self.check_abort(watch)?;
        let error = |cause: &Cause| match cause {
            Cause::Aborted(error) => error.clone(),
            Cause::Lost(rank, why) => watch.lost(&peers[*rank], why),
        };
        let standing = self.queues[from].standing;
        match &self.cause {
            Some(blame) if standing != Standing::Present || blame.since.elapsed() >= GRACE => {
                Err(error(&blame.cause))
            }
            _ if standing == Standing::Left => Err(watch.left(&peers[from])),
            _ => Ok(()),
        }
    }

    /// Shortens a pause where a moment of grace runs.
    fn pause(&self, pause: Duration) -> Duration {
        match self.cause {
            Some(_) => pause.min(GRACE / 4),
            None => pause,
        }
    }
}

#[derive(Debug, Default)]
struct Queue {
    parcels: VecDeque<Parcel>,
    bytes: usize,
    standing: Standing,
}

impl Queue {
    fn pop(&mut self) -> Option<Parcel> {
        let parcel = self.parcels.pop_front()?;
        self.bytes -= parcel.chunk.bytes().len();
        Some(parcel)
    }
}

#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Standing {
    Left,
    Lost,
    #[default]
    Present,
}

#[derive(Debug)]
struct Blame {
    /// The operation in which a peer gave up.
    sequence: Option<u64>,
    cause: Cause,
    since: Instant,
}

#[derive(Debug)]
enum Cause {
    Aborted(Error),
    Lost(usize, String),
}

/// At this many bytes the queue of one sender is full. The algorithms keep a peer a few chunks
/// ahead at most, so only a broadcast to a slow rank ever gets there.
const QUEUE_BYTES: usize = 64 * super::CHUNK;

const GRACE: Duration = Duration::from_millis(100);
